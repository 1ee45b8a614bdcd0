"""Which engines of this user run now. Files of dead ones are taken away."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import psutil

from rimuru_cli.engine.telemetry import segment as words
from rimuru_cli.engine.telemetry.places import check_private, process_space, same_process
from rimuru_cli.engine.telemetry.segment import SUFFIX, Segment, beat_now
from rimuru_cli.engine.telemetry.sources import EngineEntry
from rimuru_cli.engine.telemetry.wire import printable

_FRESH_MS = 10_000  # a sign of life this young proves life, whatever the process table says
_SILENT_MS = 5_000  # without one for so long, an engine does not respond
_UNFINISHED_SECONDS = 60.0
_FOREIGN_SECONDS = 86_400.0


def running_engines(folder: Path, attached: str | None = None) -> list[EngineEntry]:
    """Engines that publish in a folder, newest first; none if the folder is not there or not private.

    Args:
        folder: see `Publisher`.
        attached: engine id of the one that frames come from now.
    """
    entries = []
    for path in _files(folder):
        segment = _opened(path)
        if segment is None:
            continue
        with contextlib.closing(segment):
            if segment.get(words.STATE) == words.ALIVE and is_alive(segment):
                entries.append(_entry(segment, attached))
            else:
                _sweep(segment)
    return sorted(entries, key=lambda entry: entry.started, reverse=True)


def open_engine(folder: Path, engine_id: str) -> Segment | None:
    """The segment of a running engine, mapped; None if it is gone."""
    for path in _files(folder):
        if engine_id in path.name:
            segment = _opened(path)
            if segment is None:
                continue
            if segment.card.get("engine_id") == engine_id and segment.get(words.STATE) == words.ALIVE and is_alive(segment):
                return segment
            segment.close()
    return None


def is_alive(segment: Segment) -> bool:
    """Whether the process behind a segment still runs. Its number alone proves nothing: numbers are given out again."""
    silent = beat_now() - segment.get(words.BEAT)
    if segment.get(words.PID_SPACE) != process_space():
        return 0 <= silent < _FRESH_MS  # in another container: its process numbers mean nothing here
    pid = segment.get(words.PID)
    try:
        if not psutil.pid_exists(pid):
            return False
    except OverflowError:  # a number that no process can have
        return False
    # A clock that was set moves the start of a process that lives, so a fresh sign of life counts as well.
    return same_process(pid, segment.get(words.PROCESS_START)) or (0 <= silent < _FRESH_MS and not _is_zombie(pid))


def _is_zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


def _entry(segment: Segment, attached: str | None) -> EngineEntry:
    card = segment.card
    engine_id = _text(card, "engine_id")
    started = card.get("started")
    return EngineEntry(
        pid=segment.get(words.PID),
        engine_id=engine_id,
        role=_text(card, "role"),
        model=_text(card, "model"),
        device=_text(card, "device"),
        started=float(started) if isinstance(started, (int, float)) else 0.0,
        attached=engine_id == attached,
        responding=beat_now() - segment.get(words.BEAT) < _SILENT_MS,
    )


def _text(card: dict[str, Any], name: str) -> str:
    return printable(str(card.get(name, "")))[:200]


def _files(folder: Path) -> list[Path]:
    try:
        check_private(folder)
        return sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIX))
    except OSError:
        return []


def _opened(path: Path) -> Segment | None:
    """The segment in a file; None if it has gone or is none (then it is taken away, once its process is surely dead)."""
    try:
        segment = Segment.open(path)
        if segment is None:
            number = path.name.split("-")[0]
            old = time.time() - path.stat().st_mtime > _UNFINISHED_SECONDS
            if old and not (number.isdecimal() and len(number) < 10 and psutil.pid_exists(int(number))):
                path.unlink()
    except (OSError, ValueError):
        return None
    return segment


def _sweep(segment: Segment) -> None:
    """Take away what a killed engine left behind (or what could not be removed while a reader had it mapped, as on Windows)."""
    foreign = segment.get(words.STATE) == words.ALIVE and segment.get(words.PID_SPACE) != process_space()
    with contextlib.suppress(OSError):
        if not foreign or time.time() - segment.path.stat().st_mtime > _FOREIGN_SECONDS:
            segment.close()
            segment.path.unlink()
