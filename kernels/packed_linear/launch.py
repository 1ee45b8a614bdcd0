"""A packed matrix as the down projection of a single expert: the row kernel of `fused_moe` does the rest.

Imported only where triton can run.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from rimuru_kernels.fused_moe import packed_rows
from rimuru_kernels.fused_moe.packed_configs import PackedRowsConfig
from rimuru_kernels.fused_moe.packed_launch import quads_of, row_blocks, widths
from rimuru_kernels.packed_linear import MAX_ROWS
from rimuru_kernels.packed_weights import PackedFormat

BLOCKS = PackedRowsConfig(32, 4, 4, 2)


def few_rows(x: Tensor, page: Tensor, fmt: PackedFormat, out: Tensor) -> None:
    """out [T, n] = x [T, k] W^T for few rows; everything is checked and contiguous."""
    tokens, columns = x.shape
    rows = out.shape[1]
    ids, weights, entries = _one_expert(x.device)
    quads = quads_of(x)
    blocks = row_blocks(fmt, rows, columns, BLOCKS, 1, quads, page)
    packed_rows.down_rows[(tokens, -(-rows // (blocks["BN"] * blocks["TURNS"])))](
        x, quads, ids, weights, *widths(page), entries, out,
        TOPK=1, SLOTS=1, F=columns, D=rows, TILES=(3, 1, columns, rows), WAITS=False, **blocks,
    )  # fmt: skip


@cache
def _one_expert(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and weights of tokens that all choose expert 0, whole, and that expert's entries: all at the beginning of the page."""
    ids = torch.zeros(MAX_ROWS, 1, dtype=torch.int32, device=device)
    return ids, torch.ones(MAX_ROWS, 1, device=device), torch.zeros(1, 3, dtype=torch.int32, device=device)
