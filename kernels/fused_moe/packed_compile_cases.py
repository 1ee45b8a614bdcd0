"""What `compile_check` compiles of the kernels over packed weights: each format with small and large blocks, all blocks with one format."""

from __future__ import annotations

from typing import Any

import torch

from rimuru_kernels.compile_check import TARGETS, CompileCase
from rimuru_kernels.fused_moe import packed_direct, packed_gemm, packed_rows
from rimuru_kernels.fused_moe.direct_blocks import direct_blocks
from rimuru_kernels.fused_moe.launch import COPIERS, WORDS
from rimuru_kernels.fused_moe.packed_configs import PackedGemmConfig, chunks, gemm_table, rows_table
from rimuru_kernels.fused_moe.packed_launch import shapes
from rimuru_kernels.packed_weights import PackedFormat
from rimuru_kernels.packed_weights.dots import multiplies_integers
from rimuru_kernels.packed_weights.kernel import described

FORMATS = {
    "int4": PackedFormat("int4", 32, "f16", bias=8),
    "int8": PackedFormat("int8", 32, "f16"),
    "GPTQ": PackedFormat("int4", 128, "f16", "zero"),
    "FP8": PackedFormat("fp8", 128, "f32", group_rows=128),
    "MXFP4": PackedFormat("fp4", 32, "e8m0"),
    "NVFP4": PackedFormat("fp4", 16, "e4m3", factor=True),
    "Q4_K": PackedFormat("int4", 32, "u8*f16", "u8*f16"),
    "Q5_K": PackedFormat("int5", 32, "u8*f16", "u8*f16"),
    "Q6_K": PackedFormat("int6", 16, "i8*f16", bias=32),
}
CARDS = (((80, 86), False, False), ((89,), True, False), ((90, 120), True, True))
"""Which cards convert floats of 8 bits, and on which a kernel may begin before the one before it is done."""
EVERY_BLOCK = ("int4", "int8")
"""Formats that are compiled in every block shape of their table for every card; the others in the first and the last, for `FEW_CARDS`."""
FEW_CARDS = (80, 89, 120)
"""One of each kind: the oldest, one that converts floats of 8 bits, and the newest, with the least shared memory."""


def cases(f: int, d: int, top_k: int) -> list[CompileCase]:
    """Activations in bfloat16; the shape is that of one real layer."""
    made: list[CompileCase] = []
    for name, fmt in FORMATS.items():
        made += _rows(name, fmt, f, d, top_k)
        table = gemm_table(fmt)
        for _, gate_up, down in table if name in EVERY_BLOCK else (table[0], table[-1]):
            made += [_gemm(name, fmt, gate_up, f, d, top_k, gated=True), _gemm(name, fmt, down, d, f, top_k, gated=False)]
    # Where weights cannot go directly to the matrix units.
    name = EVERY_BLOCK[0]
    for plain in sorted({row[1]._replace(direct=None) for row in gemm_table(FORMATS[name]) if row[1].direct is not None}):
        made.append(_gemm(name, FORMATS[name], plain, f, d, top_k, gated=True))
    return made


def _rows(name: str, fmt: PackedFormat, f: int, d: int, top_k: int) -> list[CompileCase]:
    """All blocks of a format, with what each card can do."""
    signature = dict.fromkeys(("x_ptr", "h_ptr", "out_ptr"), "*bf16") | dict.fromkeys(("quads_ptr", "ids_ptr", "sources"), "*i64")
    signature |= {"pool": "*u8", "pool_longs": "*i64", "weights_ptr": "*fp32"}
    signature |= dict.fromkeys(("pool_words", "entries_ptr", "pages", "count"), "*i32")
    shared: dict[str, Any] = {"TOPK": top_k, "F": f, "D": d, "TILES": (3, 1, f, d)}
    copies = {"COPIERS": -(-COPIERS // top_k), "WORDS": WORDS, "PAGE_WORDS": f * d // 8, "COPIED_WORDS": f * d // 8}
    dots = [multiplies_integers(fmt, rows, columns, 2) for rows, columns in ((f, d), (d, f))]
    made: list[CompileCase] = []
    table = rows_table(fmt)
    for pairs, wide, tall in table if name in EVERY_BLOCK else dict.fromkeys((table[0], table[-1])):
        for cards, converts, overlaps in CARDS:
            targets = cards if name in EVERY_BLOCK else tuple(card for card in cards if card in FEW_CARDS)
            fast = converts and fmt.values == "fp8"
            up = shared | copies | {"EARLY": overlaps} | shapes(fmt, f, d, wide, 1, dots=dots[0], fast=fast)
            down = shared | {"SLOTS": top_k, "WAITS": overlaps} | shapes(fmt, d, f, tall, top_k, dots=dots[1], fast=fast)
            title = f"{name} up to {pairs} pairs"
            made += [
                CompileCase(f"packed gate_up_rows {title}", packed_rows.gate_up_rows, signature, up, wide.warps, 3, targets),
                CompileCase(f"packed down_rows {title}", packed_rows.down_rows, signature, down, tall.warps, 3, targets),
            ]
    return made


def _gemm(name: str, fmt: PackedFormat, config: PackedGemmConfig, n: int, k: int, top_k: int, *, gated: bool) -> CompileCase:
    signature = dict.fromkeys(("a", "out_ptr"), "*bf16") | dict.fromkeys(("sorted_ptr", "table_ptr", "entries_ptr"), "*i32")
    signature |= {"pool": "*u8", "max_tiles": "i32"}
    targets = TARGETS if name in EVERY_BLOCK else FEW_CARDS
    direct = direct_blocks(fmt, config, n, n, k, torch.bfloat16)
    if direct is not None:
        constants: dict[str, Any] = {"TOPK": top_k, "N": n, "K": k, "TILES": (3, 1, n, n), "GATED": gated} | direct.constants
        title = f"packed direct_gemm {name} {'gate-up' if gated else 'down'} {config.tile_tokens}x{direct.constants['BN']}"
        return CompileCase(title, packed_direct.direct_gemm, signature, constants, 1, direct.stages, targets)
    chunk, same, repeat = chunks(fmt, config)
    constants = {
        "TOPK": top_k, "N": n, "K": k, "TILES": (3, 1, n, n), "FMT": described(fmt, n, k),
        "BM": config.tile_tokens, "BN": config.weight_rows, "CHUNK": chunk, "SAME": same, "REPEAT": repeat,
        "GROUP": config.group, "HALVES": config.halves, "GATED": gated, "PRECISION": "tf32", "SWAP": config.swap,
    }  # fmt: skip
    title = f"packed grouped_gemm {name} {'gate-up' if gated else 'down'} {config.tile_tokens}x{config.weight_rows}x{chunk}"
    return CompileCase(title, packed_gemm.grouped_gemm, signature, constants, config.warps, config.stages, targets)
