"""What a person is told when something goes wrong: one table from exception to message, next step and exit code.

Commands raise; nothing below `main` catches an error only to print it. Exit codes: 0 success, 1 failure, 2 usage, 3 not found,
4 verification failed, 5 no space, 6 does not fit, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import traceback
from dataclasses import dataclass
from pathlib import Path

from rimuru_cli.output import Output
from rimuru_models.errors import RimuruError

INTERRUPTED = 130
_NO_SPACE = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}


@dataclass(frozen=True)
class Failure:
    """What is shown for one exception.

    Attributes:
        message: what happened and why.
        hint: what to type or change next, or None.
        exit_code: status with which the process ends.
    """

    message: str
    hint: str | None
    exit_code: int

    def to_dict(self) -> dict[str, object]:
        """The object that `--json` prints on stdout."""
        return {"error": {"message": self.message, "hint": self.hint, "exit_code": self.exit_code}}


def explain(error: BaseException) -> Failure:
    """Find the words for an exception. Never raises; unknown exceptions are called what they are: bugs."""
    if isinstance(error, RimuruError):
        return Failure(error.what, error.hint, error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return Failure("Interrupted.", None, INTERRUPTED)
    if isinstance(error, MemoryError) or _is_torch_out_of_memory(error):
        return Failure("There is not enough memory to go on.", "Try a smaller --memory or a smaller --context.", 6)
    if isinstance(error, ModuleNotFoundError):
        missing = error.name or str(error)
        return Failure(f"The Python package {missing} is missing, so this installation is incomplete.", "Run install.sh again.", 1)
    if isinstance(error, OSError):
        return _explain_os_error(error)
    if isinstance(error, ValueError) and _is_of_the_hubs_settings(error):
        return Failure(
            f"A variable of huggingface_hub cannot be read: {_first_line(error)}.",
            "Check HF_HUB_DOWNLOAD_TIMEOUT, HF_HUB_ETAG_TIMEOUT and the other HF_* variables.",
            2,
        )
    return Failure(
        f"Unexpected {type(error).__name__}: {_first_line(error)}",
        "This is a bug in rimuru. RIMURU_DEBUG=1 shows where it happened; please report that.",
        1,
    )


def report(error: BaseException, out: Output) -> int:
    """Show an error (stderr, or a JSON object on stdout with --json) and return the exit code. RIMURU_DEBUG=1 adds the traceback."""
    if os.environ.get("RIMURU_DEBUG"):
        out.note("".join(traceback.format_exception(error)).rstrip("\n"))
    return show(explain(error), out)


def show(failure: Failure, out: Output) -> int:
    """Show a failure that has its words already and return its exit code. What stdout does not take (it is full) goes to stderr."""
    if out.json:
        try:
            out.emit(failure.to_dict(), compact=True)  # one line: some commands have written objects line by line before
            return failure.exit_code
        except OSError:
            pass
    if failure.exit_code == INTERRUPTED:
        out.note(failure.message)
    else:
        out.note(f"error: {failure.message}", "red")
        if failure.hint:
            out.note(f"hint:  {failure.hint}")
    return failure.exit_code


def _explain_os_error(error: OSError) -> Failure:
    path = error.filename if isinstance(error.filename, str) else None
    where = f" ({path})" if path else ""
    if error.errno in _NO_SPACE:
        return Failure(f"The disk is full{where}.", "Free some space, or point RIMURU_HOME at a larger disk.", 5)
    if error.errno in _NO_DESCRIPTORS:
        return Failure("Too many files are open.", "Raise the limit with: ulimit -n 4096", 1)
    if isinstance(error, FileNotFoundError):
        return Failure(f"There is no file or folder {path or _first_line(error)}.", "Check the path.", 3)
    if isinstance(error, PermissionError):
        return Failure(
            f"Access was refused{where}: {error.strerror or _first_line(error)}.", "Check who owns the file and its permissions.", 1
        )
    if isinstance(error, IsADirectoryError):
        return Failure(f"{path or 'The path'} is a folder, and a file was expected.", "Name a file.", 2)
    return Failure(f"The system reports: {error.strerror or _first_line(error)}{where}.", None, 1)


def _is_torch_out_of_memory(error: BaseException) -> bool:
    """torch says so in RuntimeErrors of its own; it must not be imported just to ask."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in text or "not enough memory" in text


def _is_of_the_hubs_settings(error: ValueError) -> bool:
    """huggingface_hub reads its variables while it is imported, and what it cannot read ends the import."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).parts[-2:] == ("huggingface_hub", "constants.py")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no further word"
