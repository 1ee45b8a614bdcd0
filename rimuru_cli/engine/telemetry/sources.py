"""Where frames come from: a running engine (`live.py`), or a recording (`replay.py`). The dashboard knows only this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from rimuru_cli.engine.telemetry.frame import Frame

SourceState = Literal["waiting", "live", "paused", "ended"]


@dataclass(frozen=True)
class EngineEntry:
    """A running engine of this user, as the list shows it.

    Attributes:
        attached: whether frames come from this one now.
        responding: False if it is alive but has not moved for some seconds (stopped, or swapping).
    """

    pid: int
    engine_id: str
    role: str
    model: str
    device: str
    started: float
    attached: bool
    responding: bool


class FrameSource(Protocol):
    """Gives frames to one reader. Cheap to ask: `poll` never blocks for more than a few milliseconds. Not thread-safe."""

    @property
    def state(self) -> SourceState:
        """waiting: for an engine to start (none runs, or the last one ended); live; paused: a replay that stands still; ended: a replay at
        its end."""
        ...

    @property
    def can_control(self) -> bool:
        """Whether `request_ceiling` reaches an engine."""
        ...

    def poll(self) -> Frame | None:
        """The newest frame if there is one that this reader has not had yet, else None. Attaches by itself to an engine that starts."""
        ...

    def engines(self) -> list[EngineEntry]:
        """This user's running engines, newest first; a replay lists the one it plays."""
        ...

    def attach(self, engine_id: str) -> bool:
        """Take frames from this engine from now on; False if it is gone."""
        ...

    def request_ceiling(self, ceiling_bytes: int) -> bool:
        """Ask the engine for another memory ceiling. The answer comes with a later frame (`Frame.answer`); False if nobody is there."""
        ...

    def close(self) -> None:
        """Let go of everything. May be called twice."""
        ...


class Playback(FrameSource, Protocol):
    """A recording: also seekable. The dashboard shows a position bar if its source has these."""

    @property
    def position(self) -> float:
        """Seconds from the beginning of the recording."""
        ...

    @property
    def duration(self) -> float:
        """Length in seconds."""
        ...

    def seek(self, seconds: float) -> None:
        """Go to a moment, clamped to the recording; the next `poll` gives the frame that was shown then."""
        ...

    def set_speed(self, factor: float) -> None:
        """1.0 as recorded, 2.0 twice as fast, 0.0 pauses."""
        ...
