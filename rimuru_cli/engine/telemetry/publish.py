"""The engine's side of the dashboard: a segment in the user's folder, frames while somebody looks on, and their requests.

While nobody looks on, a step pays for one comparison. The engine's own thread writes frames at the end of steps; a second thread does so
while nothing happens, and keeps the sign of life going. Whatever goes wrong here ends the publishing, never an answer.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rimuru_cli.engine.telemetry import segment as words
from rimuru_cli.engine.telemetry.collect import Collector, Watched
from rimuru_cli.engine.telemetry.frame import CeilingAnswer, Role
from rimuru_cli.engine.telemetry.places import private_folder, process_space, process_start
from rimuru_cli.engine.telemetry.segment import SUFFIX, Segment, beat_now
from rimuru_cli.engine.telemetry.wire import HeadWriter, array_items, pieces_of

ATTACHED_MS = 3_000
"""So long after a reader's last sign of life frames are still written for it."""

# Changes the ceiling to so many bytes and says in words what came of it; raises RimuruError or MemoryError if nothing did.
SetCeiling = Callable[[int], str]

_MOST_HZ = 20.0
_SHARE = 0.007  # most of the engine's time that frames may take; where they take longer, they come less often
_LONG_FRAME = 3e-3  # seconds; the first frame may take longer without being taken at its word
_TICK = 0.1
_SLOW_TICK = 0.3
_STILL = 0.5  # seconds between frames while nothing happens
_CHECK_SECONDS = 10.0  # between two looks whether the file is still there
_SLOT_SLACK = 64 << 10


class Pace:
    """How long to wait between two frames, so that they take no more than a share of the time.

    Frames are judged by a running mean in which one that took long counts as twice the mean at most: on a busy machine a frame may be
    interrupted for a while, which says nothing about the next.

    Args:
        interval: least seconds from the beginning of a frame to that of the next.
        share: of the time, that frames may take.
    """

    def __init__(self, interval: float, share: float) -> None:
        self._interval, self._share = interval, share
        self._mean: float | None = None

    def wait(self, seconds: float) -> float:
        """Seconds from the end of a frame that took so many to the beginning of the next."""
        mean = self._mean
        self._mean = min(seconds, _LONG_FRAME) if mean is None else 0.75 * mean + 0.25 * min(seconds, 2.0 * mean)
        return max(self._interval - seconds, self._mean / self._share)


def _say_goodbye(segment: Segment, state: int) -> None:
    with contextlib.suppress(Exception):
        segment.set(words.STATE, state)
    segment.close()
    with contextlib.suppress(OSError):
        segment.path.unlink()


class CanPublish(Protocol):
    """An engine that takes a publisher."""

    def publish(self, publisher: Publisher) -> None:
        """See `Engine.publish`."""
        ...


def try_to_publish(engine: CanPublish, folder: Path, role: Role) -> str | None:
    """Let dashboards look on if that is possible here; what to tell the person if it is not."""
    try:
        engine.publish(Publisher(folder, role))
    except Exception as error:  # whatever it is, the engine works without
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return f"The dashboard cannot look on: {why} ({folder})."
    return None


class Publisher:
    """Publishes one engine. Give it to `Engine.publish`.

    Args:
        folder: of this user's running engines; made if need be.
        role: which command runs the engine.
        hz: most frames a second.

    Attributes:
        failure: why publishing ended before the engine did; None if it did not.
        frames, seconds: written for readers so far, and the engine's time that they took.
    """

    def __init__(self, folder: Path, role: Role, *, hz: float = _MOST_HZ) -> None:
        self._folder, self._role = folder, role
        self._pace = Pace(1.0 / min(hz, _MOST_HZ), _SHARE)
        self._segment: Segment | None = None
        self._collector: Collector | None = None
        self._set_ceiling: SetCeiling | None = None
        self._number = self._asked = 0
        self._due = self._idle_due = 0.0
        self._answer: CeilingAnswer | None = None
        self._heads = HeadWriter()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self.failure: str | None = None
        self.frames, self.seconds = 0, 0.0

    def open(self, engine: Watched, turn: threading.RLock, set_ceiling: SetCeiling | None = None) -> None:
        """Write the first frame and start to look for readers.

        Args:
            engine: what to read.
            turn: held by whoever uses the engine.
            set_ceiling: changes the ceiling; called between steps. None: it cannot be changed.

        Raises:
            OSError: the folder cannot be made or is not private, or there is no room.
        """
        engine_id = secrets.token_hex(8)
        self._turn, self._set_ceiling = turn, set_ceiling
        self._collector = Collector(engine, engine_id, self._role, time.time())
        try:
            self._write_frame(wait=True)
            self._thread = threading.Thread(target=self._look_after, name="rimuru-publisher", daemon=True)
            self._thread.start()
        except BaseException:
            self._thread = None
            self._leave()
            raise
        # A process that ends without closing its engine; one that is killed leaves a file that readers know to be dead.
        atexit.register(self.close)

    def stepped(self) -> None:
        """A step is done. Called by the engine, which holds the turn."""
        now = time.perf_counter()
        if now < self._due or self._segment is None:
            return
        self._guarded(self._serve, now, wait=False)

    def close(self) -> None:
        """Say goodbye and take the file away. May be called twice, and from any thread."""
        atexit.unregister(self.close)
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and self._pid == os.getpid():
            thread.join(timeout=2.0)
        self._leave()

    def _leave(self) -> None:
        segment, self._segment = self._segment, None
        # Whoever still holds this must not hold the engine and its pool as well.
        self._collector = self._set_ceiling = None
        if segment is not None and self._pid == os.getpid():  # a forked child has the parent's mapping, and nothing to say about it
            _say_goodbye(segment, words.CLOSED)

    def _guarded(self, action: Callable[..., None], *args: float, wait: bool) -> None:
        try:
            action(*args, wait=wait)
        except Exception as error:  # whatever it is, the answer that is being made is worth more
            self.failure = f"{type(error).__name__}: {error}"
            self._stop.set()
            self._leave()

    def _serve(self, now: float, *, wait: bool) -> None:
        """Do what readers want: another ceiling, a frame. The turn is held."""
        segment, collector = self._segment, self._collector
        if segment is None or collector is None:
            return
        asked = segment.asked(self._asked)
        if asked is not None:
            self._asked = asked[0]
            self._change_ceiling(asked[1])
        if not self._attached(segment):
            collector.sample()
            self._due = now + _SLOW_TICK
            return
        self._write_frame(wait=wait)
        done = time.perf_counter()
        self.frames, self.seconds = self.frames + 1, self.seconds + done - now
        self._due = done + self._pace.wait(done - now)
        self._idle_due = done + _STILL

    def _attached(self, segment: Segment) -> bool:
        return 0 <= beat_now() - segment.get(words.READER_BEAT) < ATTACHED_MS

    def _write_frame(self, *, wait: bool) -> None:
        assert self._collector is not None, "open until it is left"
        self._number += 1
        head, tables = self._collector.collect(self._number, wait=wait, answer=self._answer)
        pieces, total = pieces_of(self._heads.json(head), array_items(tables))
        if self._segment is None or total > self._segment.slot_bytes:
            self._move(total)
        assert self._segment is not None, "a move leaves a segment or raises"
        self._segment.write(pieces, total)

    def _move(self, num_bytes: int) -> None:
        """Go on in a new, larger file."""
        assert self._collector is not None, "open until it is left"
        identity = self._collector.identity()
        card = {
            "engine_id": identity.engine_id,
            "role": self._role,
            "model": identity.model[:200],
            "device": identity.device[:100],
            "started": identity.started,
        }
        own = {words.PID: self._pid, words.PID_SPACE: process_space(), words.PROCESS_START: process_start(self._pid)}
        path = private_folder(self._folder) / f"{self._pid}-{identity.engine_id}-{self._number}{SUFFIX}"
        larger = Segment.create(path, num_bytes + num_bytes // 2 + _SLOT_SLACK, card, own)
        old, self._segment = self._segment, larger
        if old is not None:
            larger.set(words.READER_BEAT, old.get(words.READER_BEAT))
            _say_goodbye(old, words.MOVED)

    def _return(self, now: float, *, wait: bool) -> None:
        """Somebody took the file away (such as a service that tidies up temporary files): make another one. The turn is held."""
        if self._segment is not None:
            self._move(self._segment.slot_bytes)
            self._write_frame(wait=wait)

    def _change_ceiling(self, num_bytes: int) -> None:
        ok, text = False, "This engine cannot change its ceiling."
        if self._set_ceiling is not None:
            try:
                text = self._set_ceiling(num_bytes)
                ok = True
            except Exception as error:
                text = str(getattr(error, "what", error)) or type(error).__name__
        self._answer = CeilingAnswer(num_bytes, ok, text, time.time())

    def _look_after(self) -> None:
        """The second thread: signs of life, and frames while the engine has nothing to do."""
        attached, checked = False, time.monotonic()
        while not self._stop.wait(_TICK if attached else _SLOW_TICK):
            segment = self._segment
            if segment is None:
                return
            with contextlib.suppress(Exception):  # the other thread may just have left it
                segment.set(words.BEAT, beat_now())
                attached = self._attached(segment)
                wanted = (attached and time.perf_counter() >= self._idle_due) or segment.asked(self._asked) is not None
                lost = time.monotonic() - checked >= _CHECK_SECONDS and not segment.path.exists()
                if (wanted or lost) and self._turn.acquire(blocking=False):
                    checked = time.monotonic()
                    try:
                        self._guarded(self._return if lost else self._serve, time.perf_counter(), wait=True)
                    finally:
                        self._turn.release()
