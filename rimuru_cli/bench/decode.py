"""Decoding speed, one sequence, one token at a time; optionally beside transformers on the same file, in the same process, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rimuru_cli.bench.looking_on import watched
from rimuru_cli.bench.yardstick import load_transformers
from rimuru_cli.engine.config import EngineConfig, program_bytes
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.request import SamplingParams
from rimuru_models.config import ModelConfig

Progress = Callable[[str, int, int], None]

PROMPT_TOKENS = 32
ROUNDS = 3


def run_decode_bench(
    model_dir: Path,
    *,
    versus: str | None = None,
    other: Path | None = None,
    tokens: int = 64,
    residency: float = 1.0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Tokens per second of greedy decoding on the CPU after a prompt of 32 tokens.

    The engine runs fully resident and, if `residency` is below 1, also with about that share of experts resident. With
    `versus="transformers"` the same file is decoded by transformers in float32, our arithmetic, and in the checkpoint's dtype ("auto", what
    it does unless told otherwise), with its default expert implementation. `other` is another model, run in as much memory as the first
    takes when it is fully resident: the same one in another precision, say. All take turns for three rounds; each one's best counts.

    Returns:
        JSON-able dict: settings, `rows` (runner, tokens_per_second, expert_hit_rate, resident_share, a ratio to each peer).
    """
    model = ModelConfig.from_dir(model_dir)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, model.vocab_size, (PROMPT_TOKENS,), generator=generator).tolist()
    runners: dict[str, Callable[[], float]] = {}
    engines: dict[str, Engine] = {}
    try:
        for share in sorted({1.0, min(1.0, residency)}, reverse=True):
            name = "rimuru" if share == 1.0 else f"rimuru, {share:.0%} resident"
            context = PROMPT_TOKENS + tokens + 1
            # Fully resident is the default: a pool for all experts and the whole context.
            config = (
                EngineConfig(context=context, device="cpu")
                if share == 1.0
                else EngineConfig(context=context, device="cpu", resident_share=share)
            )
            engines[name] = watched(Engine.load(model_dir, config))
            runners[name] = partial(_decode, engines[name], prompt, tokens)
        if other is not None:
            name = f"rimuru, {other.name}"
            info = engines["rimuru"].info
            same = info.dense_bytes + info.workspace_bytes + info.pool_bytes + program_bytes()
            config = EngineConfig(context=PROMPT_TOKENS + tokens + 1, device="cpu", memory_bytes=same)
            engines[name] = watched(Engine.load(other, config))
            runners[name] = partial(_decode, engines[name], prompt, tokens)
        if versus == "transformers":
            for dtype in ("float32", "auto"):
                runners[f"transformers, {dtype}"] = _transformers_runner(model_dir, prompt, tokens, dtype)
        best = dict.fromkeys(runners, 0.0)
        for done in range(ROUNDS):
            for index, (name, run) in enumerate(runners.items()):
                best[name] = max(best[name], run())
                if progress is not None:
                    progress("decoding", done * len(runners) + index + 1, ROUNDS * len(runners))
        peers = {name: speed for name, speed in best.items() if name.startswith("transformers") or (other and name.endswith(other.name))}
        rows = [_row(name, speed, engines.get(name), peers) for name, speed in best.items()]
    finally:
        for engine in engines.values():
            engine.close()
    return {
        "bench": "decode",
        "model": str(model_dir.name),
        "tokens": tokens,
        "threads": torch.get_num_threads(),
        "rounds": ROUNDS,
        "rows": rows,
    }


def _row(name: str, speed: float, engine: Engine | None, peers: dict[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {"runner": name, "tokens_per_second": round(speed, 2)}
    if engine is not None:
        snapshot = engine.snapshot()
        row["precision"] = engine.info.precision
        row["resident_share"] = round(snapshot.resident_share, 3)
        row["expert_hit_rate"] = round(snapshot.hit_rate or 0.0, 3)
        for peer, peer_speed in ((peer, peer_speed) for peer, peer_speed in peers.items() if peer != name):
            row[f"ratio to {peer}"] = round(speed / peer_speed, 2)
    return row


def _decode(engine: Engine, prompt: list[int], tokens: int) -> float:
    request = engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    while request.finish_reason is None:
        engine.step()
    return (request.timings.generated_tokens - 1) / request.timings.generation_seconds


def _transformers_runner(model_dir: Path, prompt: list[int], tokens: int, dtype: str) -> Callable[[], float]:
    model = load_transformers(model_dir, dtype)

    @torch.inference_mode()
    def run() -> float:
        """Prefill, then greedy steps by the plain forward call: no generation machinery in the way."""
        out = model(torch.tensor([prompt]), use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        started = time.perf_counter()
        for _ in range(tokens - 1):
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        return (tokens - 1) / (time.perf_counter() - started)

    return run
