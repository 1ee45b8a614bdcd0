"""`rimuru dashboard`: what the memory of running engines is doing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rimuru_cli.commands._window import why_no_window
from rimuru_cli.output import Output, format_bytes, format_share, table

if TYPE_CHECKING:
    from rimuru_cli.engine.telemetry.frame import Frame
    from rimuru_cli.engine.telemetry.record import Recorder
    from rimuru_cli.engine.telemetry.sources import FrameSource

_PATIENCE = 1.5  # seconds that an engine gets to write a fresh frame
_LOOK = 0.02


def dashboard(
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and leave.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --once: as JSON, errors too.")] = False,
    engine: Annotated[
        int | None, typer.Option("--engine", metavar="PID", min=1, help="Begin with this process's engine.", show_default="the newest")
    ] = None,
    record: Annotated[Path | None, typer.Option("--record", metavar="FILE", help="Also store what is seen, for --replay.")] = None,
    replay: Annotated[Path | None, typer.Option("--replay", metavar="FILE", help="Play what --record stored.")] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Play a recorded chat: no model and no GPU needed.")] = False,
    fps: Annotated[float, typer.Option("--fps", min=0.1, max=20.0, metavar="N", help="Frames a second, at most.")] = 10.0,
) -> None:
    """Watch the page pool of a running engine: what holds which page, hit rates, speeds. `+` and `-` change its memory ceiling."""
    from rimuru_models.errors import UsageError

    if sum((replay is not None, demo, engine is not None)) > 1:
        raise UsageError("--replay, --demo and --engine exclude one another.", hint="Leave all but one of them out.")
    if record is not None and (replay is not None or demo or once):
        raise UsageError("Only a running engine can be recorded.", hint="Leave out --replay, --demo and --once.")
    if json and not once:
        raise UsageError("--json prints one snapshot.", hint="Add --once.")
    out = Output(json=json)
    if once:
        _print_one(_source(engine, replay, demo, None, out), out)
        return
    unseen = why_no_window()
    if unseen is not None and record is None:
        raise UsageError(f"The dashboard needs a terminal: {unseen}.", hint="`rimuru dashboard --once` prints one snapshot.")
    recorder = None
    if record is not None:
        from rimuru_cli.engine.telemetry.record import Recorder

        recorder = Recorder(_at_home(record), hz=fps)
    try:
        source = _source(engine, replay, demo, recorder, out)
        code = _open_window(source, fps) if unseen is None else _record_only(source, fps, out)
    finally:
        if recorder is not None:
            recorder.close()
            _tell_recorded(recorder, record, out)
    if code:
        raise typer.Exit(code)


def _source(engine: int | None, replay: Path | None, demo: bool, recorder: Recorder | None, out: Output) -> FrameSource:
    """What the flags name.

    Raises:
        NotFoundError: the engine that was named does not run.
        UsageError: the recording that was named is none.
    """
    if demo:
        from rimuru_cli.engine.telemetry.replay import demo_source

        return demo_source()
    if replay is not None:
        from rimuru_cli.engine.telemetry.recording import load_recording
        from rimuru_cli.engine.telemetry.replay import ReplaySource

        recording = load_recording(_at_home(replay))
        if recording.damage is not None:
            out.warn(f"{replay} is damaged ({recording.damage}); the first {recording.duration:.0f} s of it can be played.")
        return ReplaySource(recording)
    from rimuru_cli.engine.telemetry.live import LiveSource
    from rimuru_cli.hub.paths import runtime_dir

    source = LiveSource(runtime_dir(), pid=engine, tap=recorder)
    if engine is not None:
        running = [entry.pid for entry in source.engines()]
        if engine not in running:
            from rimuru_models.errors import NotFoundError

            others = f"Running: {', '.join(map(str, running))}." if running else "Start one with: rimuru chat"
            raise NotFoundError(f"Process {engine} runs no engine of yours that can be watched.", hint=others)
    return source


def _at_home(file: Path) -> Path:
    """The path with ~ worked out. Raises UsageError if there is no such home."""
    from rimuru_models.errors import UsageError

    try:
        return file.expanduser()
    except RuntimeError as error:
        raise UsageError(f"There is no home folder for {file}.") from error


def _open_window(source: FrameSource, fps: float) -> int:
    from rimuru_cli.tui.app import run_dashboard

    return run_dashboard(source, fps=fps)


def _record_only(source: FrameSource, fps: float, out: Output) -> int:
    """Record without a window, from the first frame until the engine ends or somebody presses Ctrl-C."""
    import time

    out.note("Recording until the engine ends; Ctrl-C stops.", "dim")
    seen = False
    try:
        while not (seen and source.state == "waiting"):
            seen = source.poll() is not None or seen
            time.sleep(1.0 / fps)
    except KeyboardInterrupt:
        if not seen:
            raise
    finally:
        source.close()
    return 0


def _tell_recorded(recorder: Recorder, file: Path | None, out: Output) -> None:
    if recorder.stopped is not None:
        out.warn(recorder.stopped)
    if recorder.frames:
        out.note(f"{recorder.frames} frames in {file}", "dim")


def _print_one(source: FrameSource, out: Output) -> None:
    """Print the newest frame, or of a recording the last one.

    Raises:
        NotFoundError: nothing runs.
    """
    from rimuru_models.errors import NotFoundError

    try:
        frame = _newest(source)
        others = [entry for entry in source.engines() if not entry.attached]
    finally:
        source.close()
    if frame is None:
        raise NotFoundError("No engine of yours is running.", hint="Start one with: rimuru chat, or look at: rimuru dashboard --demo")
    if out.json:
        out.emit(frame.to_dict())
        return
    for line in snapshot_lines(frame):
        out.line(line)
    for entry in others:
        out.note(f"also running: {entry.model}, {entry.role}, process {entry.pid} (--engine {entry.pid})", "dim")


def _newest(source: FrameSource) -> Frame | None:
    import time

    from rimuru_cli.engine.telemetry.replay import ReplaySource

    if isinstance(source, ReplaySource):
        source.set_speed(0.0)
        source.seek(source.duration)
        return source.poll()
    asked, newest = time.time(), source.poll()
    deadline = time.monotonic() + _PATIENCE
    # The frame that lies there may be old: nobody looked on. In the middle of a long step it is the only one to be had.
    while source.state == "live" and (newest is None or newest.time < asked) and time.monotonic() < deadline:
        time.sleep(_LOOK)
        newest = source.poll() or newest
    return newest


def snapshot_lines(frame: Frame) -> list[str]:
    """A frame in words, a line each."""
    engine, counters = frame.engine, frame.counters
    kinds = {name: size for name, size in frame.pages.bytes_by_kind().items() if size}
    rows = [[name, format_bytes(size), format_share(size / engine.pool_bytes)] for name, size in kinds.items()]
    ceiling = {"program": engine.program_bytes, "dense": engine.dense_bytes, "workspace": engine.workspace_bytes, "pool": engine.pool_bytes}
    experts = f"{counters.resident_experts:,} of {counters.total_experts:,} experts resident"
    context = f"{counters.context_used:,} of {counters.context_possible:,} tokens of context"
    lost = f", {counters.states_not_kept:,} states not kept" if counters.states_not_kept else ""
    ttft = "-" if counters.ttft is None else f"{counters.ttft:.2f} s"
    return [
        f"{engine.model}, {engine.precision}",
        f"on {engine.device} ({engine.backend_reason}), {engine.role}, process {engine.pid}",
        f"ceiling {format_bytes(engine.ceiling_bytes)}: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in ceiling.items()),
        *table(["pool", "bytes", "share"], rows).splitlines(),
        f"{experts}, hit rate {format_share(counters.hit_rate)}, {format_bytes(counters.link_bytes)} from the host tier",
        f"{context}, {counters.running} running, {counters.waiting} waiting{lost}",
        f"step {counters.step:,}, prompt {counters.prefill_rate:.1f} t/s, generation {counters.decode_rate:.1f} t/s, first token {ttft}",
    ]
