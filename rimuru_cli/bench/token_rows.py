"""`rimuru bench pp` and `tg`: what was asked for is checked before minutes go into weights, then measured."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rimuru_cli.bench.elastic import run_elastic_bench
from rimuru_cli.bench.gpu_only import require_gpu
from rimuru_cli.bench.machine import memory_facts
from rimuru_cli.bench.packed import QUANTS
from rimuru_cli.bench.synthetic import SHAPES, SMALL_SHAPES
from rimuru_cli.bench.tokens import Routing, run_tokens_bench
from rimuru_cli.engine.config import KVPrecision
from rimuru_cli.engine.experts.pages import ExpertPages
from rimuru_cli.engine.memory.geometry import MAX_PAGE_BYTES
from rimuru_cli.settings import MemorySize
from rimuru_kernels.backend import select_backend
from rimuru_models.config import ModelConfig
from rimuru_models.errors import DoesNotFitError, UsageError
from rimuru_models.layout import dense_bytes, num_parameters

Progress = Callable[[str, int, int], None]

TESTS = ("pp", "tg")
DEFAULT_PROMPTS = (512, 4096)
_SMALL = "tiny"
_WARM_UP = 64
_NO_TG, _ASK_TG = "A recorded routing is replayed by tg, which was not asked for.", "rimuru bench pp tg --routing-trace …"
_GIB = 1 << 30


def run_token_rows(
    tests: Sequence[str],
    *,
    shape: str,
    ceilings: Sequence[MemorySize | None] = (),
    trace: Path | None = None,
    drawn: bool = False,
    quant: str | None = None,
    dense: str | None = None,
    kv: KVPrecision = "auto",
    prompts: Sequence[int] = (),
    tokens: int = 128,
    sequences: Sequence[int] = (1,),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Rows of the wanted tests of a shape with random weights; see `run_tokens_bench`.

    Without a CUDA device that runs the kernels, only shapes named "tiny" are measured: the device engine on the CPU, in float32.

    Args:
        tests: "pp" and "tg", in any order.
        shape: a key of SHAPES.
        ceilings: of device memory, None for no cap; one run without a cap when empty.
        trace: recorded routing for tg; drawn: one that is made up instead (`bench/drawn_routing.py`).
        quant: what experts are packed as, a key of `QUANTS`; None: plain numbers.
        dense: likewise all other matrices but norms and routers.
        kv: what keys and values are stored as: "auto", or "q8", 8-bit codes.
        prompts: sizes for pp in tokens; 512 and 4096, where the shape's context has room, when empty.
        tokens: to generate for tg.
        sequences: how many sequences generate at once, a row each; t/s counts the tokens of all.

    Returns:
        JSON-able: "rows" with llama-bench's columns (model, size, params, backend, test, t/s) and vram_cap, vram_used, resident_share,
        top_k; for tg sequences, routing, hit_rate; for pp, where experts were streamed, stream_gb_s (bytes over the time from the first
        copy to the last) and copy_engine_gb_s (undisturbed copies in the same process); "trace": its path.

    Raises:
        UsageError: an unknown test or shape, more tokens than the shape has positions, a recording that does not belong to the shape.
        DoesNotFitError: no device, too little main memory, or a ceiling below what the shape needs.
    """
    unknown = [test for test in tests if test not in TESTS]
    if unknown:
        raise UsageError(f"There is no test {unknown[0]!r}.", hint="The tests are pp (prompt) and tg (generation): rimuru bench pp tg …")
    if shape not in SHAPES:
        raise UsageError(f"There is no shape {shape!r}.", hint=f"--model-shape is one of {', '.join(SHAPES)}.")
    for flag, name in (("--quant", quant), ("--dense", dense)):
        if name is not None and name not in QUANTS:
            raise UsageError(f"There is no format {name!r}.", hint=f"{flag} is one of {', '.join(QUANTS)}.")
    config = ModelConfig.from_dict(SHAPES[shape], where=shape)
    on_gpu = select_backend().name == "triton"
    if shape not in SMALL_SHAPES:
        require_gpu(f"The shape {shape}", f"--model-shape {_SMALL} runs anywhere, for trying the command.")
    # One more token is generated after a prompt.
    prompts = list(dict.fromkeys(prompts)) or [count for count in DEFAULT_PROMPTS if count < config.max_positions]
    longest = max(*prompts, tokens + _WARM_UP)
    if longest >= config.max_positions:
        raise UsageError(f"{longest} tokens, warming up included, are too many for {shape}, which has {config.max_positions} positions.")
    if drawn and "tg" not in tests:
        raise UsageError(_NO_TG, hint=_ASK_TG)
    if trace is not None:
        _check_trace(trace, config, shape, tests)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    _check_memory(_weight_bytes(config, dtype, quant), shape)
    device_bytes = torch.cuda.mem_get_info()[1] if on_gpu else memory_facts()["ram_bytes"]
    report = run_tokens_bench(
        [test for test in TESTS if test in tests],
        shape=shape,
        vram=[None if ceiling is None else ceiling.of(device_bytes) for ceiling in ceilings or [None]],
        trace=trace,
        drawn=drawn,
        device=torch.device("cuda" if on_gpu else "cpu"),
        progress=progress,
        dtype=dtype,
        quant=quant,
        dense=dense,
        kv=kv,
        prompts=prompts,
        tokens=tokens,
        sequences=sequences,
    )
    name = str(dtype).removeprefix("torch.")
    return {
        **report,
        "trace": "synthetic" if drawn else None if trace is None else str(trace),
        "dtype": name,
        "experts": quant or name,
        "dense": dense or name,
        "kv": name if kv == "auto" else kv,
    }


def run_elastic_rows(
    shape: str, ceiling: MemorySize | None, lowered: MemorySize | None = None, *, progress: Progress | None = None
) -> dict[str, Any]:
    """A conversation that grows to the longest context, and a ceiling that moves; see `run_elastic_bench`. What may run where is as for
    `run_token_rows`.

    Raises:
        UsageError: an unknown shape.
        DoesNotFitError: no device, too little main memory, or a ceiling below what the shape needs.
    """
    if shape not in SHAPES:
        raise UsageError(f"There is no shape {shape!r}.", hint=f"--model-shape is one of {', '.join(SHAPES)}.")
    on_gpu = select_backend().name == "triton"
    if shape not in SMALL_SHAPES:
        require_gpu(f"The shape {shape}", f"--model-shape {_SMALL} runs anywhere, for trying the command.")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    _check_memory(num_parameters(ModelConfig.from_dict(SHAPES[shape], where=shape)) * dtype.itemsize, shape)
    device_bytes = torch.cuda.mem_get_info()[1] if on_gpu else memory_facts()["ram_bytes"]
    device = torch.device("cuda" if on_gpu else "cpu")
    most = None if ceiling is None else ceiling.of(device_bytes)
    wish = None if lowered is None else lowered.of(device_bytes)
    return run_elastic_bench(shape, ceiling=most, device=device, dtype=dtype, lowered=wish, progress=progress)


def _check_trace(trace: Path, config: ModelConfig, shape: str, tests: Sequence[str]) -> None:
    if "tg" not in tests:
        raise UsageError(_NO_TG, hint=_ASK_TG)
    try:
        routing = Routing.recorded(trace)
        steps, layers, top_k = routing.experts.shape
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError, EOFError, zlib.error, csv.Error) as error:
        raise UsageError(
            f"{trace} is no routing that this command understands ({type(error).__name__}: {error}).",
            hint="It is CSV, plain or as .gz, with the columns phase, step, layer, experts and weights.",
        ) from error
    except OSError as error:
        if error.errno is not None:  # no such file, no permission: said elsewhere
            raise
        raise UsageError(f"{trace} ends in .gz and is not a gzip file.") from error
    highest, lowest = int(routing.experts.max()), int(routing.experts.min())
    if layers != len(config.moe_layers) or not 0 <= lowest <= highest < config.num_experts or top_k > config.num_experts:
        raise UsageError(
            f"{trace} was recorded with {layers} layers and experts up to {highest}; {shape} has {len(config.moe_layers)} layers "
            f"of {config.num_experts} experts.",
            hint="Give the recording of this shape, or leave --routing-trace away for uniform routing.",
        )
    if not 0 < routing.prompt_steps < steps:
        raise UsageError(f"{trace} needs steps of a prompt (phase 0) and generated ones (phase 1).")


def _weight_bytes(config: ModelConfig, dtype: torch.dtype, quant: str | None) -> int:
    """All weights as they pass through main memory; dense ones before they are packed."""
    experts = None if quant is None else dict.fromkeys(config.moe_layers, QUANTS[quant])
    pages = ExpertPages.build(config, dtype.itemsize, experts, MAX_PAGE_BYTES)
    return dense_bytes(config, dtype.itemsize) + len(config.moe_layers) * config.num_experts * pages.expert_bytes


def _check_memory(num_bytes: int, shape: str) -> None:
    """All weights pass through main memory, and the experts stay there."""
    free = memory_facts()["ram_free_bytes"]
    if num_bytes > free:
        raise DoesNotFitError(
            f"The weights of {shape} take {num_bytes / _GIB:.1f} GiB of main memory, and {free / _GIB:.1f} GiB are free.",
            hint=f"Close other programs, or use --model-shape {_SMALL}.",
        )
