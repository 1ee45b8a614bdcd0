from __future__ import annotations

import sys
import time
from email.utils import formatdate
from pathlib import Path

import pytest

from rimuru_cli.hub import remote_errors
from rimuru_cli.hub.patience import Temporary
from rimuru_cli.hub.remote_errors import Asked, refusal
from rimuru_models.errors import NotFoundError, RimuruError

HOST = "https://hub.example"


def asked(*, token: bool = False, foreign: bool = False) -> Asked:
    return Asked(HOST, "org/name", "main", token, "config.json", foreign)


CASES = [
    (401, {"X-Error-Code": "GatedRepo"}, False, 3, "is gated: its licence", f"{HOST}/org/name.*hf auth login"),
    (403, {"X-Error-Code": "GatedRepo"}, True, 3, "account of your token .*no access", f"{HOST}/org/name"),
    (401, {"X-Error-Code": "RepoNotFound"}, False, 3, "no model org/name on hub.example, or it is private", "auth login"),
    (404, {"X-Error-Code": "RepoNotFound"}, True, 3, "no model org/name.* your token", "spelling"),
    (401, {}, False, 3, "no model org/name", "auth login"),
    (404, {"X-Error-Code": "RevisionNotFound"}, False, 3, "no branch, tag or commit 'main'", "lists what there is"),
    (404, {"X-Error-Code": "EntryNotFound"}, False, 3, "no file config.json", "again"),
    (404, {}, False, 3, "no file config.json", "again"),
    (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, True, 3, "does not accept your token", "auth login"),
    (401, {}, True, 3, "does not accept your token", "auth login"),
    (403, {"X-Error-Message": "Access to this resource is disabled."}, False, 3, "disabled", "another"),
    (403, {"X-Error-Message": "fine-grained"}, True, 3, r"refuses access.*HTTP 403: fine-grained", "settings/tokens"),
    (418, {}, False, 1, "HTTP 418", "HF_ENDPOINT"),
]


@pytest.mark.parametrize(("status", "headers", "token", "code", "what", "hint"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_a_refusal_says_what_to_do(status: int, headers: dict[str, str], token: bool, code: int, what: str, hint: str | None) -> None:
    import re

    error = refusal(status, headers, asked(token=token))
    assert isinstance(error, RimuruError)
    assert error.exit_code == code and isinstance(error, NotFoundError) == (code == 3)
    assert re.search(what, error.what), error.what
    assert (error.hint is None) == (hint is None) and (hint is None or re.search(hint, str(error.hint))), error.hint


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_trouble_that_may_pass(status: int) -> None:
    error = refusal(status, {"Retry-After": "7"}, asked())
    assert isinstance(error, Temporary) and error.retry_after == 7


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "12"}, 12.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-3"}, None),
        ({"RateLimit": '"api";r=0;t=55'}, 55.0),
        ({"Retry-After": "9" * 400}, 999999999.0),
    ],
)
def test_how_long_a_server_asks_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    error = refusal(429, headers, asked())
    assert isinstance(error, Temporary) and error.retry_after == seconds
    assert "limits how often" in error.what and "auth login" in str(error.hint)
    assert "auth login" not in str(refusal(429, headers, asked(token=True)).hint)  # type: ignore[union-attr]


def test_a_date_to_wait_for() -> None:
    error = refusal(503, {"Retry-After": formatdate(time.time() + 100, usegmt=True)}, asked())
    assert isinstance(error, Temporary) and error.retry_after is not None and 90 < error.retry_after <= 101
    past = refusal(503, {"Retry-After": formatdate(0, usegmt=True)}, asked())
    assert isinstance(past, Temporary) and past.retry_after == 0


def test_a_signed_address_that_has_expired_is_asked_for_again() -> None:
    for status in (401, 403, 404, 410):
        assert isinstance(refusal(status, {}, asked(foreign=True)), Temporary)


def test_names_where_the_token_comes_from_but_never_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    error = refusal(401, {}, asked(token=True))
    assert isinstance(error, RimuruError)
    assert "from HF_TOKEN" in error.what and "unset HF_TOKEN" in str(error.hint)
    assert "secret" not in error.what + str(error.hint)
    monkeypatch.delenv("HF_TOKEN")
    assert "from `hf auth login`" in refusal(401, {}, asked(token=True)).what  # type: ignore[union-attr]


def test_the_login_command_is_spelled_out_where_only_rimuru_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_errors.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "my venv" / "python"))
    assert remote_errors.hf_command() == "hf"
    beside = tmp_path / "my venv" / ("hf.exe" if sys.platform == "win32" else "hf")
    beside.parent.mkdir()
    beside.touch()
    assert "my venv" in remote_errors.hf_command() and remote_errors.hf_command().startswith("'")
