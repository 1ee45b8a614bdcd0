"""What it costs an engine that a dashboard can look on, and that one does."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.request import SamplingParams
from rimuru_cli.engine.telemetry import segment as words
from rimuru_cli.engine.telemetry.publish import Publisher
from rimuru_cli.engine.telemetry.segment import Segment, beat_now
from rimuru_models.config import ModelConfig

PROMPT_TOKENS = 64
ROUNDS = 5

Progress = Callable[[str, int, int], None]


def run_publishing_bench(model_dir: Path, *, tokens: int = 64, residency: float = 0.5, progress: Progress | None = None) -> dict[str, Any]:
    """Decode with nobody able to look on, with nobody looking on, and with somebody looking on; the three take turns.

    The engine's own accounting of the time that frames took is the figure to go by: two runs of the same thing differ by more, least in
    the processor's time, which other programs disturb less than the clock on the wall.

    Returns:
        JSON-able: "rows": who looks on; tokens per second and milliseconds of the processor for a token, the best of the rounds each; and
        of the round with the most tokens per second: frames per second, milliseconds per frame, share of the time that frames took.
    """
    model = ModelConfig.from_dir(model_dir)
    prompt = torch.randint(0, model.vocab_size, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    config = EngineConfig(context=PROMPT_TOKENS + tokens + 1, resident_share=residency)
    rows: dict[str, dict[str, Any]] = {}
    with Engine.load(model_dir, config) as engine:
        _decode(engine, prompt, tokens)  # warms up
        for done in range(ROUNDS):
            for index, (name, published, watched) in enumerate(
                (("nobody can", False, False), ("nobody does", True, False), ("somebody does", True, True))
            ):
                row = _measured(engine, prompt, tokens, published=published, watched=watched)
                best = rows.setdefault(name, {"looking on": name, **row})
                cpu = min(best["cpu_ms_per_token"], row["cpu_ms_per_token"])
                if row["tokens_per_second"] > best["tokens_per_second"]:
                    best.update(row)
                best["cpu_ms_per_token"] = cpu
                if progress is not None:
                    progress("decoding", done * 3 + index + 1, 3 * ROUNDS)
        device = engine.info.device
    return {
        "bench": "dashboard",
        "model": model_dir.name,
        "device": device,
        "tokens": tokens,
        "rounds": ROUNDS,
        "rows": list(rows.values()),
    }


def _measured(engine: Engine, prompt: list[int], tokens: int, *, published: bool, watched: bool) -> dict[str, Any]:
    row = {"tokens_per_second": 0.0, "cpu_ms_per_token": 0.0, "frames_per_second": 0.0, "ms_per_frame": 0.0, "share": 0.0}
    if not published:
        speed, _, cpu = _decode(engine, prompt, tokens)
        return row | {"tokens_per_second": round(speed, 2), "cpu_ms_per_token": round(cpu / tokens * 1e3, 3)}
    with tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(Path(folder) / "run", "bench")
        engine.publish(publisher)
        try:
            with _reader(Path(folder) / "run", watched):
                frames, spent = publisher.frames, publisher.seconds
                speed, elapsed, cpu = _decode(engine, prompt, tokens)
                frames, spent = publisher.frames - frames, publisher.seconds - spent
        finally:
            publisher.close()
    row |= {"tokens_per_second": round(speed, 2), "frames_per_second": round(frames / elapsed, 2), "share": round(spent / elapsed, 5)}
    return row | {"ms_per_frame": round(spent / frames * 1e3, 3) if frames else 0.0, "cpu_ms_per_token": round(cpu / tokens * 1e3, 3)}


@contextmanager
def _reader(folder: Path, watched: bool) -> Iterator[None]:
    """Give signs of life as a dashboard in another process does."""
    (path,) = folder.iterdir()
    segment = Segment.open(path)
    assert segment is not None, "an engine that publishes has a segment"
    done = threading.Event()

    def live() -> None:
        while not done.wait(0.2):
            segment.set(words.READER_BEAT, beat_now())

    thread = threading.Thread(target=live, daemon=True)
    if watched:
        segment.set(words.READER_BEAT, beat_now())
        thread.start()
    try:
        yield
    finally:
        done.set()
        if watched:
            thread.join()
        segment.close()


def _decode(engine: Engine, prompt: list[int], tokens: int) -> tuple[float, float, float]:
    """Tokens per second, seconds in all, and seconds of the processor in all."""
    started, used = time.perf_counter(), time.process_time()
    request = engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    while request.finish_reason is None:
        engine.step()
    timings = request.timings
    return (timings.generated_tokens - 1) / timings.generation_seconds, time.perf_counter() - started, time.process_time() - used
