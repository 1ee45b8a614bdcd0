"""What tests of the dashboard share: sources under the test's control, apps whose clock stands still, pictures that can be compared."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from synthetic_engine import Scenario, SyntheticEngine
from textual.pilot import Pilot

from rimuru_cli.engine.telemetry.frame import Frame
from rimuru_cli.engine.telemetry.sources import EngineEntry, SourceState
from rimuru_cli.tui.app import RimuruApp
from rimuru_cli.tui.messages import FrameArrived, SourceStatus

TRUECOLOR = {"COLORTERM": "truecolor", "TERM": "xterm-256color"}
SIXTEEN = {"TERM": "xterm"}
NONE = {"TERM": "xterm-256color", "NO_COLOR": "1"}
UPDATE = "UPDATE_PICTURES"


class HandSource:
    """A source that gives what the test puts into `frames`, and keeps what it was asked."""

    def __init__(self, *frames: Frame, state: SourceState = "live", control: bool = True) -> None:
        self.frames = list(frames)
        self.state = state
        self.can_control = control
        self.listed: list[EngineEntry] = []
        self.asked: list[object] = []
        self.closed = 0
        self.threads: set[int] = set()
        self.fails: Exception | None = None
        self.delivers = True

    def poll(self) -> Frame | None:
        self.threads.add(threading.get_ident())
        if self.fails is not None:
            raise self.fails
        return self.frames.pop(0) if self.frames else None

    def engines(self) -> list[EngineEntry]:
        return list(self.listed)

    def attach(self, engine_id: str) -> bool:
        self.asked.append(engine_id)
        return any(entry.engine_id == engine_id for entry in self.listed)

    def request_ceiling(self, ceiling_bytes: int) -> bool:
        self.asked.append(ceiling_bytes)
        return self.delivers

    def close(self) -> None:
        self.closed += 1


class HandPlayback(HandSource):
    """The same for a recording."""

    position = 12.0
    duration = 60.0

    def seek(self, seconds: float) -> None:
        self.asked.append(("seek", seconds))

    def set_speed(self, factor: float) -> None:
        self.asked.append(("speed", factor))


def entry_of(frame: Frame, **changes: object) -> EngineEntry:
    """The frame's engine as the list shows it."""
    engine = frame.engine
    entry = EngineEntry(engine.pid, engine.engine_id, engine.role, engine.model, engine.device, engine.started, True, True)
    return replace(entry, **changes)  # type: ignore[arg-type]


def small_engine(**options: object) -> SyntheticEngine:
    """A made-up engine that is quick to draw."""
    return SyntheticEngine(**{"pages": 600, "layers": 12, "experts": 32, "top_k": 4, **options})  # type: ignore[arg-type]


def played(engine: SyntheticEngine, *plan: tuple[Scenario, int]) -> list[Frame]:
    """Frames of several scenarios, one after the other."""
    return [frame for scenario, count in plan for frame in engine.play(scenario, count)]


def new_app(source: HandSource | None = None, environ: dict[str, str] | None = None) -> RimuruApp:
    """An app whose clock stands still; frames are given to it with `show`. Without a source no thread asks for any."""
    app = RimuruApp(source or HandSource(), environ=TRUECOLOR if environ is None else environ)
    app.pool.clock = lambda: 1000.0
    if source is None:
        app._bridge.start = lambda: None  # type: ignore[method-assign]
    return app


async def show(pilot: Pilot[int], *frames: Frame | None, status: SourceStatus | None = None) -> None:
    """Deliver frames as the bridge would, and draw everything. Only the last one is drawn; the others become the past."""
    app = pilot.app
    assert isinstance(app, RimuruApp)
    await pilot.pause()
    status = status or SourceStatus("live", can_control=True)
    source = app._bridge._source
    source.state, source.can_control = status.state, status.can_control  # type: ignore[misc]
    for frame in frames[:-1]:
        assert frame is not None, "time passes after the last frame"
        app.pool.add(frame)
    if frames:
        app.post_message(FrameArrived(frames[-1], status))
    await pilot.pause()
    app._draw(everything=True)
    await pilot.pause()


def screen_text(app: RimuruApp) -> str:
    """What the screen shows, line by line."""
    return "\n".join(strip.text.rstrip() for strip in app.screen._compositor.render_strips())


async def until(pilot: Pilot[int], holds: Callable[[], object], what: str = "it", seconds: float = 10.0) -> None:
    """Let the app work until something holds."""
    for _ in range(int(seconds / 0.02)):
        if holds():
            return
        await pilot.pause(0.02)
    raise AssertionError(f"{what} did not happen; the screen shows\n{screen_text(pilot.app)}")  # type: ignore[arg-type]


async def compare_picture(app: RimuruApp, file: Path) -> None:
    """Compare the screen with a stored SVG. UPDATE_PICTURES=1 stores it anew; look at the change before you keep it."""
    svg = normalised(app.export_screenshot(title="rimuru", simplify=True))
    if os.environ.get(UPDATE):
        file.parent.mkdir(exist_ok=True)
        file.write_text(svg, encoding="utf-8", newline="\n")
    stored = file.read_text(encoding="utf-8") if file.exists() else ""
    if svg != stored:
        new = file.with_suffix(".new.svg")
        if os.access(file.parent, os.W_OK):
            new.write_text(svg, encoding="utf-8", newline="\n")
        raise AssertionError(
            f"The picture differs from {file.name}; the new one is {new.name}. {UPDATE}=1 stores it. {_first_change(stored, svg)}"
        )


def normalised(svg: str) -> str:
    """The picture without what is the same in all of them or changes with versions of libraries: fonts, numbers in names."""
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = re.sub(r"terminal-\d+-", "terminal-", svg)
    svg = re.sub(r'<clipPath id="terminal-line-\d+">.*?</clipPath>', "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!-- Generated with Rich .*?-->\n", "", svg)
    return "\n".join(line.strip() for line in svg.splitlines() if line.strip()) + "\n"


def _first_change(old: str, new: str) -> str:
    for number, (before, after) in enumerate(zip(old.splitlines(), new.splitlines(), strict=False), start=1):
        if before != after:
            place = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
            return f"Line {number} first: {before[max(0, place - 60) : place + 60]!r} became {after[max(0, place - 60) : place + 60]!r}."
    return "One of them is longer."


Check = Callable[[Pilot[int]], Awaitable[None]]
