"""The kernel benchmarks under one roof: which there are, and where each one lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rimuru_cli.bench.gpu_only import require_gpu
from rimuru_models.errors import UsageError

Progress = Callable[[str, int, int], None]


def _moe() -> dict[str, Any]:
    from rimuru_cli.bench.kernels import run_kernel_bench

    return run_kernel_bench("fused_moe")


def _attention() -> dict[str, Any]:
    from rimuru_cli.bench.kernels_attention import run_attention_bench

    return run_attention_bench()


def _fetch() -> dict[str, Any]:
    from rimuru_cli.bench.kernels_fetch import run_fetch_bench

    return run_fetch_bench()


def _recurrent() -> dict[str, Any]:
    from rimuru_cli.bench.kernels_recurrent import run_recurrent_bench

    return run_recurrent_bench()


def _packed_moe() -> dict[str, Any]:
    from rimuru_cli.bench.kernels_packed import run_packed_bench

    return run_packed_bench()


OPS: dict[str, Callable[[], dict[str, Any]]] = {
    "moe": _moe,
    "attention": _attention,
    "fetch": _fetch,
    "recurrent": _recurrent,
    "packed-moe": _packed_moe,
}


def run_kernel_reports(ops: Sequence[str] = (), progress: Progress | None = None) -> dict[str, Any]:
    """Run the benchmarks of some ops.

    Args:
        ops: keys of OPS; all of them when empty.
        progress: called with the op that comes next.

    Returns:
        JSON-able: "bench" and, by op, the op's own report.

    Raises:
        UsageError: an unknown op.
        DoesNotFitError: the kernels do not run on this machine.
    """
    unknown = [op for op in ops if op not in OPS]
    if unknown:
        raise UsageError(f"There is no kernel benchmark {unknown[0]!r}.", hint=f"--op is one of {', '.join(OPS)}.")
    require_gpu("Timing kernels", "`rimuru doctor` says what this machine has; `rimuru bench decode` measures the CPU.")
    wanted = list(dict.fromkeys(ops)) or list(OPS)
    report: dict[str, Any] = {"bench": "kernels"}
    for index, op in enumerate(wanted):
        if progress is not None:
            progress(f"kernels: {op}", index, len(wanted))
        report[op] = OPS[op]()
    return report
