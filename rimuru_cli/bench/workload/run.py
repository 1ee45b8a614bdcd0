"""One list of requests under several memory policies, simulated or for real."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from rimuru_cli.bench.gpu_only import require_gpu
from rimuru_cli.bench.machine import memory_facts
from rimuru_cli.bench.synthetic import SHAPES, SMALL_SHAPE, SMALL_SHAPES
from rimuru_cli.bench.tokens import SyntheticModel, reclaim
from rimuru_cli.bench.workload.cost import H200
from rimuru_cli.bench.workload.driver import RealClock, Run, SimulatedClock, run_workload
from rimuru_cli.bench.workload.metrics import curves, summarise
from rimuru_cli.bench.workload.policies import Policy
from rimuru_cli.bench.workload.requests import RequestSpec
from rimuru_cli.bench.workload.simulated import simulated_engine
from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.device.choice import MAX_ON_DEMAND_ROWS
from rimuru_cli.fit.machine import Gpu
from rimuru_kernels.backend import select_backend
from rimuru_models.config import ModelConfig
from rimuru_models.errors import DoesNotFitError, UsageError

Progress = Callable[[str, int, int], None]
_AFTERWARDS = 24
SEQUENCES = 300
"""Most requests that run at once, where memory allows it."""


@dataclass(frozen=True)
class Setting:
    """What is served, where.

    Attributes:
        shape: a key of `synthetic.SHAPES`; the weights are made up.
        ceiling: of device memory in bytes; None: no cap (simulated: the whole card).
        simulate: whether steps only take the time that they would.
        gpu: the card of a simulation.
        sequences: most requests at once.
        seed: of prompts and of the simulated routing.
        uniform: simulated routers choose as those of random weights do, else as recorded ones.
    """

    shape: str
    ceiling: int | None
    simulate: bool
    gpu: Gpu = field(default=H200)
    sequences: int = SEQUENCES
    seed: int = 0
    uniform: bool = False

    @property
    def model(self) -> ModelConfig:
        """The shape's configuration.

        Raises:
            UsageError: there is no such shape.
        """
        if self.shape not in SHAPES:
            raise UsageError(f"There is no shape {self.shape!r}.", hint=f"--model-shape is one of {', '.join(SHAPES)}.")
        return ModelConfig.from_dict(SHAPES[self.shape], where=self.shape)


def run_policies(
    specs: Sequence[RequestSpec], policies: Sequence[Policy], setting: Setting, *, progress: Progress | None = None
) -> dict[str, Any]:
    """Serve the same requests under every policy.

    Returns:
        JSON-able: "rows" with "policy" (its name), "kind", "share", "plain" (nothing changed about it) and the figures of
        `metrics.summarise`, "curves" and "wall_seconds"; "error" instead where the model does not fit under that policy.

    Raises:
        UsageError: an unknown shape, no request, or one that is longer than the model's context.
        DoesNotFitError: no policy fits, or there is no GPU for a real run.
    """
    report = progress or (lambda stage, done, total: None)
    model = setting.model
    longest = max((spec.prompt_tokens + spec.answer_tokens for spec in specs), default=0)
    if not policies or not specs:
        raise UsageError("There is nothing to compare.", hint="Give at least one request and one policy.")
    if longest > model.max_positions:
        raise UsageError(
            f"A request of {longest} tokens is longer than the {model.max_positions} positions of {setting.shape}.",
            hint="Limit the lengths with --longest.",
        )
    base = EngineConfig(memory_bytes=setting.ceiling, max_sequences=setting.sequences, context=longest)
    serve = _Simulated(setting, model) if setting.simulate else _Real(setting, report)
    rows: list[dict[str, Any]] = []
    try:
        for policy in policies:
            config = policy.configure(base, model)
            about = {"policy": policy.name, "kind": policy.kind, "share": policy.share, "plain": policy.plain}
            started = time.perf_counter()
            try:
                run = serve(specs, config, policy, partial(report, policy.name))
            except DoesNotFitError as error:
                rows.append({**about, "error": error.what})
                continue
            figures = summarise(run.records, run.steps, preemptions=run.preemptions)
            extra = {"wall_seconds": time.perf_counter() - started, "curves": curves(run.steps)}
            rows.append({**about, **figures, **serve.extra, **extra})
    finally:
        serve.close()
    if all("error" in row for row in rows):
        raise DoesNotFitError(rows[0]["error"], hint="Give a larger --vram.")
    return {
        "bench": "workload",
        "model": setting.shape,
        "vram_cap": setting.ceiling,
        "simulated": setting.simulate,
        "routing": "uniform" if setting.uniform or not setting.simulate else "as recorded",
        "device": serve.device,
        "requests": len(specs),
        "prompt_tokens": sum(spec.prompt_tokens for spec in specs),
        "answer_tokens": sum(spec.answer_tokens for spec in specs),
        "rows": rows,
    }


def device_bytes(simulate: bool) -> int:
    """Memory that a share of the device is meant of: the simulated card's, the GPU's, or main memory."""
    if simulate:
        return H200.total_bytes
    return int(torch.cuda.mem_get_info()[1]) if select_backend().name == "triton" else memory_facts()["ram_bytes"]


def warm_up(specs: Sequence[RequestSpec], sequences: int) -> list[RequestSpec]:
    """Requests that let an engine compile its kernels and capture the graph of every number of rows that `specs` may come to.

    So many short prompts at once as there are requests, up to the most rows of a graph; one after another ends with every step. The last
    goes on for a while, so that what steps take is known without that. Where there are more requests, some come on top, as long as any.
    """
    most = min(len(specs), sequences)
    count = min(most, MAX_ON_DEMAND_ROWS)
    prompt, total = max(spec.prompt_tokens for spec in specs), max(spec.prompt_tokens + spec.answer_tokens for spec in specs)
    short = min(16, prompt)
    answer = total - short  # longer texts than these may not fit
    lengths = [*range(2, count + 1), count + _AFTERWARDS]
    return [RequestSpec(0.0, short, min(answer, length)) for length in lengths] + [RequestSpec(0.0, prompt, 1)] * min(8, most - count)


def prompt_steps(specs: Sequence[RequestSpec], tokens: int) -> list[list[RequestSpec]]:
    """Requests, group by group, whose prompts make a step of about every size up to `tokens`; else whoever is measured first would wait for
    kernels to be compiled: they are for a few ranges of sizes, and for multiples of 16 and other numbers."""
    most, sizes = max(spec.prompt_tokens for spec in specs), [16]
    while sizes[-1] < tokens:
        sizes.append(min(tokens, 2 * sizes[-1]))
    groups = []
    for size in sorted({size - less for size in sizes for less in (0, 1)}):
        whole, rest = divmod(size, most)
        groups.append([RequestSpec(0.0, most, 1)] * whole + [RequestSpec(0.0, rest, 1)] * (rest > 0))
    return groups


def _used_bytes() -> int:
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


class _Simulated:
    """Runs on a clock of its own."""

    def __init__(self, setting: Setting, model: ModelConfig) -> None:
        self._setting, self._model = setting, model
        self.device = setting.gpu.name
        self.extra: dict[str, Any] = {}

    def __call__(self, specs: Sequence[RequestSpec], config: EngineConfig, policy: Policy, each: Callable[[int, int], None]) -> Run:
        clock, setting = SimulatedClock(), self._setting
        engine = simulated_engine(
            setting.shape, self._model, config, setting.gpu, clock, profiled=policy.profiled, seed=setting.seed, uniform=setting.uniform
        )
        with engine:
            return run_workload(engine, specs, clock, seed=setting.seed, each=each)

    def close(self) -> None:
        """Nothing to give up."""


class _Real:
    """Runs the device engine over made-up weights; their routers choose at random, so that no profile says anything about them."""

    def __init__(self, setting: Setting, report: Progress) -> None:
        on_gpu = select_backend().name == "triton"
        if setting.shape not in SMALL_SHAPES:
            require_gpu(f"The shape {setting.shape}", f"--simulate needs none; --model-shape {SMALL_SHAPE} runs anywhere.")
        device, dtype = (torch.device("cuda"), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
        self._setting, self._compiles = setting, on_gpu
        self._model = SyntheticModel(setting.shape, device, report, dtype=dtype)
        self.device = torch.cuda.get_device_name(device) if on_gpu else "cpu, emulating a device"
        self._peak = 0

    def __call__(self, specs: Sequence[RequestSpec], config: EngineConfig, policy: Policy, each: Callable[[int, int], None]) -> Run:
        self._peak = 0

        def look(done: int, total: int) -> None:
            self._peak = max(self._peak, _used_bytes())
            each(done, total)

        try:
            with self._model.engine_with(config)[0] as engine:
                groups = prompt_steps(specs, config.device_batch_tokens) if self._compiles else []
                for seed, group in enumerate([*groups, warm_up(specs, config.max_sequences)]):
                    run_workload(engine, group, RealClock(), seed=2**31 + seed)
                    engine.forget()
                return run_workload(engine, specs, RealClock(), seed=self._setting.seed, each=look)
        finally:
            reclaim()

    @property
    def extra(self) -> dict[str, Any]:
        """Device memory in use at most, all programs together, as the driver counts it; None without a GPU."""
        return {"peak_vram_bytes": self._peak or None}

    def close(self) -> None:
        """Give the weights up."""
        self._model.host.shared = False
        self._model.host.close()
