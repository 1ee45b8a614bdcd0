"""Prompt (pp) and generation (tg) speed on a device, in rows named as llama-bench names them.

Random weights route at random and have no locality, so generation is measured twice: replaying a recorded routing, and with the uniform
routing of the random router, the worst case for a cache of experts.
"""

from __future__ import annotations

import csv
import gc
import gzip
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rimuru_cli.bench.drawn_routing import PROMPT_STEPS, drawn_experts
from rimuru_cli.bench.looking_on import watched
from rimuru_cli.bench.synthetic import SyntheticReader
from rimuru_cli.engine.config import EngineConfig, KVPrecision
from rimuru_cli.engine.device.experts import DeviceExperts
from rimuru_cli.engine.device.loading import build_device_parts
from rimuru_cli.engine.device.pinned_host import PinnedHost
from rimuru_cli.engine.device.plan import plan_device_memory
from rimuru_cli.engine.device.replay import ReplayedRouting
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.experts.ranking import ExpertRanking
from rimuru_cli.engine.parts import Parts
from rimuru_cli.engine.request import SamplingParams
from rimuru_models import load_model
from rimuru_models.errors import DoesNotFitError
from rimuru_models.layout import num_parameters

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Routing:
    """What the routers of every step and layer are made to choose.

    Attributes:
        experts: int64 [steps, layers, top_k] ascending in a row, of one answer; [steps, layers, answers, top_k] of several. weights:
            float32, same shape, summing to 1.
        prompt_steps: the first so many steps warm up.
    """

    experts: Tensor
    weights: Tensor
    prompt_steps: int

    @classmethod
    def uniform(cls, steps: int, layers: int, num_experts: int, top_k: int) -> Routing:
        """Every expert equally likely at every step: no locality at all."""
        generator = torch.Generator().manual_seed(0)
        experts = torch.rand(steps, layers, num_experts, generator=generator).topk(top_k, dim=-1).indices.sort(dim=-1).values
        return cls(experts, torch.full(experts.shape, 1.0 / top_k), 28)

    @classmethod
    def drawn(cls, tokens: int, layers: int, num_experts: int, top_k: int, answers: int) -> Routing:
        """Made up, with the habits of a recorded one, each answer on its own; see `bench/drawn_routing.py`."""
        experts = drawn_experts(PROMPT_STEPS + tokens, layers, num_experts, top_k, answers=answers)
        return cls(experts, torch.full(experts.shape, 1.0 / top_k), PROMPT_STEPS)

    @classmethod
    def recorded(cls, path: Path) -> Routing:
        """Read a recording: CSV, gzipped or not, with phase, step, layer, experts and weights."""
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = [line for line in raw.decode("utf-8").splitlines() if line and not line.startswith("#")]
        steps: dict[tuple[int, int], dict[int, tuple[list[int], list[float]]]] = {}
        for row in csv.DictReader(io.StringIO("\n".join(lines))):
            experts, weights = [int(e) for e in row["experts"].split()], [float(w) for w in row["weights"].split()]
            steps.setdefault((int(row["phase"]), int(row["step"])), {})[int(row["layer"])] = experts, weights
        ordered = [steps[key] for key in sorted(steps)]
        layers = sorted(set().union(*ordered))
        # A layer that a step does not list (llama.cpp skips the last layer for all but a prompt's last token) is taken from the next step.
        for step, following in reversed(list(pairwise(ordered))):
            for layer in layers:
                step.setdefault(layer, following[layer])
        chosen = torch.tensor([[step[layer][0] for layer in layers] for step in ordered])
        share = torch.tensor([[step[layer][1] for layer in layers] for step in ordered])
        order = chosen.argsort(-1)
        share = share.gather(-1, order)
        prompt_steps = sum(1 for phase, _ in steps if phase == 0)
        return cls(chosen.gather(-1, order), share / share.sum(-1, keepdim=True), prompt_steps)


class SyntheticModel:
    """A shape with random weights on a device: dense weights and host tier are made once and serve any number of engines."""

    def __init__(
        self,
        shape: str,
        device: torch.device,
        progress: Progress,
        *,
        dtype: torch.dtype = torch.bfloat16,
        quant: str | None = None,
        dense: str | None = None,
        kv: KVPrecision = "auto",
    ) -> None:
        self.shape, self.device, self.dtype, self.progress = shape, device, dtype, progress
        self._packed = quant, dense
        self._kv: KVPrecision = kv
        self.reader = self._reader()
        self.before = _used_bytes(device)
        with torch.inference_mode():
            self.model = load_model(self.reader, dtype, device=device, packed=True)  # type: ignore[arg-type]
        self.host = PinnedHost(self.reader, device, lambda done, total: progress("host tier", done, total))
        self.host.shared = True
        self.loaded = _used_bytes(device)

    @property
    def name(self) -> str:
        """The shape, what its weights are packed as, and keys and values, where they are codes."""
        quant, dense = self._packed
        plain = str(self.dtype).removeprefix("torch.")
        weights = [] if quant is None and dense is None else [quant or plain, f"dense {dense or plain}"]
        return ", ".join([self.shape, *weights, *(["kv q8"] if self._kv == "q8" else [])])

    def _reader(self, top_k: int | None = None) -> SyntheticReader:
        quant, dense = self._packed
        return SyntheticReader(self.shape, top_k=top_k, dtype=self.dtype, quant=quant, dense=dense)

    def engine(
        self, vram: int | None, *, top_k: int | None = None, graphs: bool = True, max_batch_tokens: int = 4096
    ) -> tuple[Engine, Parts]:
        """An engine under a ceiling. Close it, let go of it, then call `reclaim`."""
        reader = self._reader(top_k)
        self.model.config = reader.config
        for layer in self.model.layers:
            layer.mlp.top_k = reader.config.top_k  # type: ignore[union-attr]
        config = EngineConfig(memory_bytes=vram, max_batch_tokens=max_batch_tokens, device_batch_tokens=max_batch_tokens, kv=self._kv)
        return self._make(reader, config, graphs=graphs)

    def engine_with(self, config: EngineConfig) -> tuple[Engine, Parts]:
        """An engine with these settings."""
        return self._make(self._reader(), config, graphs=True)

    def _make(self, reader: SyntheticReader, config: EngineConfig, *, graphs: bool) -> tuple[Engine, Parts]:
        max_batch_tokens = config.device_batch_tokens
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 1 << 33
        dense = self.model.dense_bytes
        # What engines before this one left with the driver counts, too.
        program = self.before + max(0, _used_bytes(self.device) - self.loaded)
        plan = plan_device_memory(
            reader.config,
            self.dtype,
            config,
            program=program,
            free=free + dense,
            max_batch_tokens=max_batch_tokens,
            formats=reader.formats,
        )
        config = replace(config, max_batch_tokens=plan.max_batch_tokens)
        ranking = ExpertRanking(self.host.num_layers, self.host.num_experts, config.decay)
        with torch.inference_mode():
            parts = build_device_parts(
                reader, self.host, self.model, ranking, config, plan, self.device, self.progress, name=self.shape, graphs=graphs
            )
        return watched(Engine(parts, config)), parts


def reclaim() -> None:
    """Give the device memory of engines that are out of scope back to the driver."""
    gc.collect()  # engine and scheduler refer to each other, and the pool lives as long as they do
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class PromptSpeed:
    """How fast a prompt was.

    Attributes:
        stream_rate: bytes per second of its copies, waits included; None: nothing was streamed.
        copy_engine: bytes per second of a few copies that nothing else delays, measured while loading.
    """

    tokens_per_second: float
    stream_rate: float | None
    copy_engine: float


def measure_prompt(engine: Engine, parts: Parts, tokens: int, repeats: int = 3) -> PromptSpeed:
    """The best of `repeats` prompts, every time from an empty cache."""
    best, rate = 0.0, None
    vocab, experts = engine.vocab_size, parts.experts
    assert isinstance(experts, DeviceExperts), "prompts are streamed on a device"
    experts.timed = True
    for repeat in range(repeats + 1):
        engine.forget()  # what is measured is reading, of a prompt as of one that begins alike
        prompt = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(repeat)).tolist()
        request = engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        while request.finish_reason is None:
            engine.step()
        speed = tokens / request.timings.prompt_seconds
        if repeat and speed > best:  # the first compiles kernels
            best, rate = speed, experts.stream_rate
    experts.timed = False
    return PromptSpeed(best, rate, experts.rates.copy)


def measure_generation(engine: Engine, parts: Parts, routing: Routing, tokens: int, sequences: int = 1) -> dict[str, float]:
    """Generated tokens per second of all sequences together while the routers' choice is replaced by `routing`.

    Several sequences replay the same recording, each from a place of its own: a step takes as many rows of it as there are sequences. Where
    answers were made up, each sequence has one.
    """
    device = parts.device
    assert isinstance(parts.experts, DeviceExperts), "the recording replaces what a device's routers choose"
    steps = len(routing.experts)
    tokens = min(tokens, steps - routing.prompt_steps)
    # [steps, layers, sequences, top_k]
    if routing.experts.ndim == 4:
        experts, weights = (t[:, :, :sequences].contiguous() for t in (routing.experts, routing.weights))
    else:
        rows = (torch.arange(steps).unsqueeze(1) + torch.arange(sequences) * (steps // sequences)) % steps
        experts, weights = (t[rows].transpose(1, 2).contiguous() for t in (routing.experts, routing.weights))
    parts.experts.override = ReplayedRouting(experts, weights, device)
    params = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
    requests = [engine.submit([1], params) for _ in range(sequences)]
    started, hits, uses = 0.0, 0, 0
    for step in range(routing.prompt_steps + tokens):
        if step == routing.prompt_steps:
            hits, uses = parts.experts.hits, parts.experts.uses
            started = time.perf_counter()
        engine.step()
    seconds = time.perf_counter() - started
    for request in requests:
        engine.cancel(request)
    parts.experts.override = None
    uses = parts.experts.uses - uses
    return {
        "tokens_per_second": sequences * tokens / seconds,
        "hit_rate": (parts.experts.hits - hits) / max(1, uses),
        "tokens": tokens,
    }


def run_tokens_bench(
    tests: Sequence[str],
    *,
    shape: str,
    vram: Sequence[int | None],
    trace: Path | None = None,
    drawn: bool = False,
    device: torch.device | None = None,
    progress: Progress | None = None,
    graphs: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    quant: str | None = None,
    dense: str | None = None,
    kv: KVPrecision = "auto",
    prompts: Sequence[int] = (512, 4096),
    tokens: int = 128,
    sequences: Sequence[int] = (1,),
) -> dict[str, Any]:
    """Rows of pp and tg tests of a shape with random weights under each ceiling.

    Args:
        tests: "pp" and/or "tg".
        vram: ceilings in bytes; None: no cap.
        trace: recorded routing for tg; drawn: a made-up one.
        quant: a key of `QUANTS`: what the experts are packed as; None: plain numbers. dense: likewise the dense matrices.
        kv: what keys and values are stored as.
        sequences: how many sequences generate at once, a tg row each.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    synthetic = SyntheticModel(shape, device, progress or (lambda stage, done, total: None), dtype=dtype, quant=quant, dense=dense, kv=kv)
    own = synthetic.reader.config
    routings = {"uniform": Routing.uniform(28 + tokens, len(own.moe_layers), own.num_experts, own.top_k)}
    if drawn:
        routings["synthetic"] = Routing.drawn(tokens, len(own.moe_layers), own.num_experts, own.top_k, max(sequences))
    if trace is not None:
        routings["recorded"] = Routing.recorded(trace)
    rows: list[dict[str, Any]] = []
    try:
        for ceiling in vram:
            for label, routing in routings.items():
                # Routing as the random routers choose it touches nearly all experts in a long prompt, recorded or not.
                lengths = prompts if "pp" in tests and label == "uniform" else ()
                generate = tokens if "tg" in tests else 0
                if lengths or generate:
                    rows += _measure(synthetic, ceiling, label, routing, lengths, generate, sequences, graphs=graphs)
                    reclaim()
    finally:
        synthetic.host.shared = False
        synthetic.host.close()
    if rows and all("error" in row for row in rows):
        raise DoesNotFitError(rows[0]["error"], hint="Give a larger --vram.")
    return {"bench": "tokens", "shape": shape, "rows": rows}


def _measure(
    synthetic: SyntheticModel,
    ceiling: int | None,
    label: str,
    routing: Routing,
    prompts: Sequence[int],
    tokens: int,
    sequences: Sequence[int],
    *,
    graphs: bool,
) -> list[dict[str, Any]]:
    """Rows of one engine. A ceiling under which the shape does not fit gives one row that says so."""
    try:
        engine, parts = synthetic.engine(ceiling, top_k=routing.experts.shape[-1], graphs=graphs)
    except DoesNotFitError as error:
        return [{"model": synthetic.name, "vram_cap": ceiling, "routing": label, "error": error.what}]
    device = parts.device
    base = {
        "model": synthetic.name,
        "size": parts.host.num_layers * parts.host.num_experts * parts.host.expert_bytes + parts.plan.dense,
        "params": num_parameters(parts.model.config),
        "backend": engine.info.backend_reason,
        "vram_cap": ceiling,
        "resident_share": round(engine.snapshot().resident_share, 4),
        "top_k": parts.model.config.top_k,
    }
    rows = []
    with engine:
        for count in prompts:
            prompt = measure_prompt(engine, parts, count)
            speed = {"t/s": round(prompt.tokens_per_second, 2)}
            if prompt.stream_rate is not None:
                speed |= {"stream_gb_s": round(prompt.stream_rate / 1e9, 2), "copy_engine_gb_s": round(prompt.copy_engine / 1e9, 2)}
            rows.append({**base, "test": f"pp{count}", **speed, "vram_used": _used_bytes(device)})
        for number in sequences if tokens else ():
            result = measure_generation(engine, parts, routing, tokens, number)
            measured = {"t/s": round(result["tokens_per_second"], 2), "hit_rate": round(result["hit_rate"], 4)}
            test = f"tg{int(result['tokens'])}"
            rows.append({**base, "test": test, "sequences": number, "routing": label, **measured, "vram_used": _used_bytes(device)})
    return rows


def _used_bytes(device: torch.device) -> int:
    """Bytes of the device in use by anybody, as the driver counts them."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free
