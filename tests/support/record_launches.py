"""Compile what a launch would run, for any NVIDIA target, without a GPU.

`record` stands in for the launcher: calling a kernel's host code under it with CPU tensors notes each kernel with its arguments, and
`compile_launch` compiles that specialisation (16-byte alignment assumed as the launcher finds it, constants folded) for a target.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


class Launch(NamedTuple):
    """One kernel launch: the function, its arguments by name, and the launch options."""

    function: JITFunction
    arguments: dict[str, Any]
    options: dict[str, Any]


@contextmanager
def record() -> Iterator[list[Launch]]:
    """Collect launches instead of running them."""
    launches: list[Launch] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        arguments = dict(zip(self.arg_names, args, strict=False))
        arguments |= {name: value for name, value in kwargs.items() if name in self.arg_names}
        launches.append(Launch(self, arguments, {name: value for name, value in kwargs.items() if name not in self.arg_names}))

    original = JITFunction.run
    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = original


def compile_launch(launch: Launch, capability: int) -> Any:
    """The compiled kernel; `.metadata.shared` is its shared memory in bytes, `.asm["ptx"]` its code."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.function.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[(index,)] = "*" + TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    source = ASTSource(launch.function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
