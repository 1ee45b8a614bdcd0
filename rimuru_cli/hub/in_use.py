"""Which processes have files mapped into their memory or open, as far as this system tells an ordinary user."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

_PROC = Path("/proc")
_LONGEST = 60


def users_of(paths: Iterable[Path]) -> list[str]:
    """Processes other than this one that use one of the files: "rimuru chat (process 4711)" each, by number.

    Processes of other people are not seen. Linux and Windows tell what is mapped; elsewhere only open files are known.
    """
    wanted = {os.path.normcase(os.path.realpath(path)) for path in paths}
    if not wanted:
        return []
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error, OSError):
            if any(os.path.normcase(path) in wanted for path in _files_of(process)):
                found.append((process.pid, _name(process)))
    return [f"{name} (process {pid})" for pid, name in sorted(found)]


def _files_of(process: psutil.Process) -> Iterable[str]:
    if sys.platform == "linux":
        # psutil reads `smaps`, which walks every page; the plain list of mappings is there at once.
        lines = (_PROC / str(process.pid) / "maps").read_bytes().splitlines()
        return {os.fsdecode(line.split(maxsplit=5)[5]) for line in lines if line.count(b" /")}
    if sys.platform == "win32":
        return {mapping.path for mapping in process.memory_maps()}
    return {file.path for file in process.open_files()}


def _name(process: psutil.Process) -> str:
    """How a person would know it: the command line, without the interpreter in front of a program's file, cut short."""
    try:
        words = process.cmdline()
    except (psutil.Error, OSError):
        words = []
    if len(words) > 1 and Path(words[0]).name.startswith("python") and not words[1].startswith("-"):
        words = words[1:]
    words = [Path(words[0]).name, *words[1:]] if words else [process.name()]
    text = " ".join(" ".join(words).split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
