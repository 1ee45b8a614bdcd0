"""Every exception becomes a message, a next step and an exit code."""

from __future__ import annotations

import errno
import json

import pytest

from rimuru_cli import errors
from rimuru_cli.output import Output
from rimuru_models.errors import (
    CheckpointError,
    DoesNotFitError,
    NoSpaceError,
    NotFoundError,
    RimuruError,
    UsageError,
    VerificationError,
)

CASES: list[tuple[BaseException, int, str]] = [
    (RimuruError("plain"), 1, "plain"),
    (CheckpointError("model.safetensors: tensor x has the wrong shape."), 1, "tensor x"),
    (UsageError("wrong"), 2, "wrong"),
    (NotFoundError("gone"), 3, "gone"),
    (VerificationError("sha256"), 4, "sha256"),
    (NoSpaceError("full"), 5, "full"),
    (DoesNotFitError("too large"), 6, "too large"),
    (KeyboardInterrupt(), 130, "Interrupted"),
    (MemoryError(), 6, "not enough memory"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 6, "not enough memory"),
    (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 5, "/x/y"),
    (OSError(errno.EMFILE, "Too many open files"), 1, "Too many files"),
    (FileNotFoundError(errno.ENOENT, "No such file", "here.txt"), 3, "here.txt"),
    (PermissionError(errno.EACCES, "Permission denied", "secret"), 1, "secret"),
    (IsADirectoryError(errno.EISDIR, "Is a directory", "folder"), 2, "folder"),
    (OSError(errno.EIO, "Input/output error", "disk"), 1, "Input/output error"),
    (ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers"), 1, "tokenizers"),
    (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero"),
    (ValueError(), 1, "ValueError: no further word"),
]


@pytest.mark.parametrize(("error", "code", "words"), CASES, ids=[type(error).__name__ + str(i) for i, (error, _, _) in enumerate(CASES)])
def test_each_exception_has_words_and_a_code(error: BaseException, code: int, words: str) -> None:
    failure = errors.explain(error)
    assert failure.exit_code == code
    assert words in failure.message


def test_people_read_it_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert errors.report(UsageError("What happened.", hint="type this"), Output()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: What happened.\nhint:  type this\n"


def test_programs_read_json_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert errors.report(NotFoundError("Gone.", hint=None), Output(json=True)) == 3
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"error": {"message": "Gone.", "hint": None, "exit_code": 3}}
    assert captured.err == ""


def test_traceback_only_when_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        raise ZeroDivisionError("x")
    except ZeroDivisionError as caught:
        error = caught
    errors.report(error, Output())
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("RIMURU_DEBUG", "1")
    errors.report(error, Output())
    assert "Traceback" in capsys.readouterr().err
