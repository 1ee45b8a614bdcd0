"""How `packed_direct` divides one grouped product."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from rimuru_kernels.fused_moe.packed_configs import PackedGemmConfig
from rimuru_kernels.packed_weights import PackedFormat, page_parts
from rimuru_kernels.packed_weights.kernel import described
from rimuru_kernels.packed_weights.words import machine_code


class DirectBlocks(NamedTuple):
    """One launch of `packed_direct.direct_gemm`.

    blocks: programs that share a tile's weight rows. constants: arguments that are known when compiling.
    """

    blocks: int
    stages: int
    constants: dict[str, Any]


@cache
def direct_blocks(fmt: PackedFormat, config: PackedGemmConfig, n: int, rows: int, depth: int, dtype: torch.dtype) -> DirectBlocks | None:
    """Blocks for n weight rows of `depth` columns, in row tiles of `rows`, times activations of dtype.

    None where it cannot be: the kernel reads rows of whole words, and makes numbers of two bytes.
    """
    direct = config.direct
    if direct is None or dtype.itemsize != 2 or page_parts(fmt, rows, depth).values.row_bytes % 4:
        return None
    constants = {
        "FMT": described(fmt, rows, depth), "CODE": machine_code(fmt, "bf16" if dtype == torch.bfloat16 else "f16"),
        "BM": config.tile_tokens, "BN": direct.rows, "ONE": n % direct.rows == 0 and (rows >= n or rows % direct.rows == 0),
    }  # fmt: skip
    return DirectBlocks(-(-n // direct.rows), direct.stages, constants)
