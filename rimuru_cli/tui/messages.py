"""What reaches the app from its worker thread. Textual delivers these in the app's own thread."""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message

from rimuru_cli.engine.telemetry.frame import Frame
from rimuru_cli.engine.telemetry.sources import EngineEntry, SourceState


@dataclass(frozen=True)
class SourceStatus:
    """How the source stands.

    Attributes:
        state: see `FrameSource.state`.
        can_control: whether the ceiling can be changed.
        position, duration: seconds of a recording; None for a live engine.
    """

    state: SourceState = "waiting"
    can_control: bool = False
    position: float | None = None
    duration: float | None = None


class FrameArrived(Message):
    """A new frame, or (None) time passed without one: what fades goes on fading."""

    def __init__(self, frame: Frame | None, status: SourceStatus) -> None:
        super().__init__()
        self.frame = frame
        self.status = status


class EnginesListed(Message):
    """The engines of this user that run now."""

    def __init__(self, engines: tuple[EngineEntry, ...]) -> None:
        super().__init__()
        self.engines = engines


class CeilingAsked(Message):
    """A request for another ceiling went out (or found nobody)."""

    def __init__(self, num_bytes: int, delivered: bool) -> None:
        super().__init__()
        self.num_bytes = num_bytes
        self.delivered = delivered


class SourceFailed(Message):
    """The source raised an error; no more frames come."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
