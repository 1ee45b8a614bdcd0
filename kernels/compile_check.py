"""Compiles every Triton kernel in every shipped configuration for graphics cards that are not here, and says what shared memory it takes.

A kernel that runs on one card may not launch on another: cards of compute capability 8.6, 8.9 and 12.0 have 99 KiB of shared memory a
block, an H200 has 227 KiB, and the compiler pipelines loads differently for each. Compiling needs no graphics card, so this can be
checked anywhere.

An op takes part by having a module `compile_cases` with a function `compile_cases() -> list[CompileCase]`.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import rimuru_kernels

TARGETS = (80, 86, 89, 90, 120)
"""Compute capabilities, times ten, that every kernel has to compile for."""

MAX_SHARED_BYTES = 101_376


class CompileCase(NamedTuple):
    """One kernel in one configuration.

    kernel: the decorated function. signature: Triton type of each argument that is no constant ("*bf16", "i32", "tensordesc<…>");
    pointers count as aligned to 16 bytes, as torch's are, without which loads are not pipelined and shared memory comes out too small.
    constants: the rest.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    targets: tuple[int, ...] = TARGETS


class Compiled(NamedTuple):
    """What came out for one target: shared memory of a block in bytes and, where compilation failed, the error."""

    name: str
    target: int
    shared_bytes: int
    error: str | None


def ops_with_cases() -> list[str]:
    """Names of the ops that take part."""
    folders = [module.name for module in pkgutil.iter_modules(rimuru_kernels.__path__) if module.ispkg]
    return [op for op in folders if importlib.util.find_spec(f"rimuru_kernels.{op}.compile_cases") is not None]


def cases_of(op: str) -> list[CompileCase]:
    """All configurations that an op ships."""
    cases: list[CompileCase] = importlib.import_module(f"rimuru_kernels.{op}.compile_cases").compile_cases()
    return cases


def compile_for(case: CompileCase, target: int) -> Compiled:
    """Compiles one case to machine code for one compute capability (times ten)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else case.signature[name] for name in names}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if signature[name].startswith("*")}
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    try:
        source = ASTSource(case.kernel, signature, constants, aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    except Exception as error:
        return Compiled(case.name, target, -1, f"{type(error).__name__}: {error}")
    return Compiled(case.name, target, compiled.metadata.shared, None)


def compile_op(op: str, targets: Sequence[int] = TARGETS, processes: int = 2, share: tuple[int, int] = (0, 1)) -> list[Compiled]:
    """Compiles all cases of an op for the targets, or one of so many shares of them. Triton must not be in its interpreter mode."""
    jobs = [(op, place, target) for place, case in enumerate(cases_of(op)) for target in targets if target in case.targets]
    jobs = jobs[share[0] :: share[1]]
    if processes == 1:
        return [_compile_job(job) for job in jobs]
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(_compile_job, jobs, chunksize=4))


def _compile_job(job: tuple[str, int, int]) -> Compiled:
    op, place, target = job
    return compile_for(cases_of(op)[place], target)
