"""The folder where engines of one user meet their readers, and who is alive there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import psutil

_START_SLACK = 2_000  # milliseconds; a process's start is worked out from a clock that may be set


def private_folder(path: Path) -> Path:
    """Make the folder if need be, and make sure that nobody else can look into it.

    Raises:
        OSError: it cannot be made, or is not this user's own.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(path)
    return path


def check_private(path: Path) -> None:
    """Make sure that a folder is this user's alone; its mode is put right if that is all.

    Raises:
        OSError: it is not there, is a link, or belongs to somebody else.
    """
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{path} is not a folder")
    if os.name != "posix":
        return  # on Windows the user's folders are closed to others by inheritance
    if found.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to somebody else")
    if found.st_mode & 0o077:
        path.chmod(0o700)


def process_space() -> int:
    """Number of the process-number space of this process; 0 where there is only one. Equal numbers: process numbers mean the same."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def process_start(pid: int) -> int:
    """When a process started, in milliseconds since 1970; 0 if there is none, or it is a zombie."""
    try:
        process = psutil.Process(pid)
        return 0 if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time() * 1000)
    except (psutil.Error, ValueError, OverflowError):
        return 0


def same_process(pid: int, start: int) -> bool:
    """Whether the process that started then still runs (and not another one with its number)."""
    now = process_start(pid)
    return now != 0 and abs(now - start) <= _START_SLACK
