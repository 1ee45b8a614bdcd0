"""What `compile_check` compiles of this op: every kernel in every block shape of the tables, for the shape of one real layer."""

from __future__ import annotations

from typing import Any

from rimuru_kernels.compile_check import CompileCase
from rimuru_kernels.fused_moe import kernel, packed_compile_cases
from rimuru_kernels.fused_moe.configs import GEMM_2_BYTES, GEMM_4_BYTES, ROWS_2_BYTES, ROWS_4_BYTES, GemmConfig
from rimuru_kernels.fused_moe.launch import COPIERS, COUNT_LINES, MAX_COUNTED_PAIRS, ROUTE_CHUNK, WORDS
from rimuru_kernels.sizes import COUNT_TOKENS

TOP_K, F, D = 8, 768, 2048


def compile_cases() -> list[CompileCase]:
    """Kernels of 2-byte weights (as bfloat16) and of float32, with pages; row tiles and contiguous weights change no shared memory."""
    cases = [*_row_cases("bf16", 2), *_row_cases("fp32", 4), *_sorting_cases(), *packed_compile_cases.cases(F, D, TOP_K)]
    for type_name, itemsize, table in (("bf16", 2, GEMM_2_BYTES), ("fp32", 4, GEMM_4_BYTES)):
        seen = set()
        for _, gate_up, down in table:
            for gated, config in ((True, gate_up), (False, down)):
                for described in {False, config.described}:
                    if (gated, config, described) not in seen:
                        seen.add((gated, config, described))
                        cases.append(_gemm_case(type_name, itemsize, config, gated, described))
    return cases


def _gemm_case(type_name: str, itemsize: int, config: GemmConfig, gated: bool, described: bool) -> CompileCase:
    tokens, rows, depth = config.tile_tokens, config.weight_rows, config.depth
    pointer = f"*{type_name}"
    signature = dict.fromkeys(("a", "a_half", "w", "out_ptr"), pointer) | dict.fromkeys(("sorted_ptr", "table_ptr", "entries_ptr"), "*i32")
    signature["max_tiles"] = "i32"
    if described:
        signature["w"] = f"tensordesc<{type_name}[1,{rows // 2 if gated else rows},{depth}]>"
        if not gated:
            signature["a"] = f"tensordesc<{type_name}[{tokens},{depth}]>"
            signature["a_half"] = f"tensordesc<{type_name}[{tokens // 2},{depth}]>"
    constants: dict[str, Any] = _pages(itemsize) | {
        "N": F if gated else D,
        "K": D if gated else F,
        "BM": tokens,
        "BN": rows,
        "BK": depth,
        "GROUP": config.group,
        "HALVES": config.halves,
        "GATED": gated,
        "DESCRIBED": described,
        "PRECISION": "ieee" if itemsize == 4 else "tf32",
    }
    name = f"grouped_gemm {type_name} {'gate-up' if gated else 'down'} {tokens}x{rows}x{depth} {'described' if described else 'pointers'}"
    # Descriptions are used on 9.0 only; see launch.py.
    targets = {"targets": (90,)} if described else {}
    return CompileCase(name, kernel.grouped_gemm, signature, constants, config.warps, config.stages, **targets)


def _row_cases(type_name: str, itemsize: int) -> list[CompileCase]:
    wide, tall = ROWS_2_BYTES if itemsize == 2 else ROWS_4_BYTES
    signature = dict.fromkeys(("x_ptr", "w_ptr", "h_ptr", "out_ptr"), f"*{type_name}")
    signature |= {"ids_ptr": "*i64", "entries_ptr": "*i32", "weights_ptr": "*fp32", "sources": "*i64", "pages": "*i32", "count": "*i32"}
    sizes = _pages(itemsize) | {"F": F, "D": D}
    up = sizes | {"BN": wide.rows, "BK": wide.columns, "COPIERS": -(-COPIERS // TOP_K), "WORDS": WORDS, "PAGE_WORDS": F * D * itemsize // 8}
    down = sizes | {"BN": tall.rows, "BK": tall.columns, "SLOTS": TOP_K}
    return [
        CompileCase(f"gate_up_rows {type_name}", kernel.gate_up_rows, signature, up, wide.warps, 3),
        CompileCase(f"down_rows {type_name}", kernel.down_rows, signature, down, tall.warps, 3),
    ]


def _sorting_cases() -> list[CompileCase]:
    integers = dict.fromkeys(("sorted_ptr", "offsets_ptr", "counts_ptr", "table_ptr", "entries_ptr"), "*i32")
    integers |= {"ids_ptr": "*i64", "num_pairs": "i32", "num_tokens": "i32", "num_experts": "i32", "max_tiles": "i32"}
    sums = {"ids_ptr": "*i64", "y_ptr": "*bf16", "out_ptr": "*bf16", "weights_ptr": "*fp32"}
    counting = {"TOPK": TOP_K, "TOKENS": COUNT_TOKENS, "EXPERTS": 256}
    return [
        CompileCase("route", kernel.route, integers, {"CHUNK": ROUTE_CHUNK}, 16, 3),
        CompileCase("count_pairs", kernel.count_pairs, integers, counting | {"SLOTS": TOP_K}, 4, 3),
        CompileCase("place_pairs", kernel.place_pairs, integers, counting | {"LINES": COUNT_LINES}, 8, 3),
        CompileCase(
            "route_tiles",
            kernel.route_tiles,
            integers,
            {"CHUNK": MAX_COUNTED_PAIRS, "BM": 8, "EXPERTS": 256, "TILES": 1, "PAGED": True},
            4,
            3,
        ),
        CompileCase("tile_table", kernel.tile_table, integers, {"BM": 16, "EXPERTS": 256, "TILES": 1, "PAGED": True}, 1, 3),
        CompileCase("sum_slots", kernel.sum_slots, sums, {"TOPK": TOP_K, "D": D, "BLOCK": 1024}, 4, 3),
    ]


def _pages(itemsize: int) -> dict[str, Any]:
    return {"TOPK": TOP_K, "TILES": 1, "UNIT": 256 // itemsize, "PAGED": True}
