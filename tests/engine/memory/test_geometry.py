"""Page arithmetic against the shapes of real checkpoints. All sizes are bytes; MiB = 2**20."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import pytest

from rimuru_cli.engine.memory.geometry import (
    ENTRY_BYTES,
    MAX_PAGE_BYTES,
    PageKind,
    PoolGeometry,
    choose_block_tokens,
    expert_tiling,
    huge_page_bytes,
)
from rimuru_models.errors import DoesNotFitError

MIB = 1 << 20
EXPERT, SSM, KV, CONV = PageKind.EXPERT, PageKind.SSM, PageKind.KV, PageKind.CONV


@dataclass(frozen=True)
class Row:
    """One checkpoint: what goes in (f, d, KV bytes per token and layer, state, conv row) and what must come out."""

    name: str
    f: int
    d: int
    kv_token: int
    expert: int  # P_e
    huge: int  # P_h
    tokens: int  # whole tokens per P_h and layer, at `block` tokens per KV page
    exact_blocks: tuple[int, ...]  # block sizes that divide P_h exactly ...
    inexact_blocks: tuple[int, ...]  # ... and some that do not
    ssm: int | None = None
    ssm_per_huge: int = 0
    conv: int | None = None
    conv_per_huge: int = 0
    weight_bits: int = 16
    block: int = 1


ROWS = [
    Row("qwen3.5-35b", 512, 2048, 2048, 2 * MIB, 2 * MIB, 1024, (1, 16, 1024), (2048,), 2 * MIB, 1, 16_384, 128),
    Row("qwen3-next", 512, 2048, 2048, 2 * MIB, 2 * MIB, 1024, (1, 16, 1024), (2048,), 2 * MIB, 1, 16_384, 128),
    Row("qwen3.5-122b", 1024, 3072, 2048, 6 * MIB, 12 * MIB, 6144, (1, 16, 1024), (), 4 * MIB, 3, 24_576, 512),
    Row("qwen3.5-397b", 1024, 4096, 2048, 8 * MIB, 8 * MIB, 4096, (1, 16, 4096), (), 4 * MIB, 2, 24_576, 341),
    Row("qwen3.8-flash-next", 640, 2560, 2048, 3_276_800, 3_276_800, 1600, (1, 16, 32, 64), (128,), 3 * MIB, 1, 20_480, 160),
    Row("granite-4.0-h-tiny", 512, 1536, 2048, 1_572_864, 1_572_864, 768, (1, 16, 256), (512,), 1_572_864, 1, 6_656, 236),
    Row("granite-4.0-h-small", 768, 4096, 4096, 6 * MIB, 12 * MIB, 3072, (1, 16, 512), (), 4 * MIB, 3, 16_896, 744),
    Row("nemotron-3-nano", 1856, 2688, 1024, 9_977_856, 29_933_568, 29_232, (1, 16), (), 2 * MIB, 14, 12_288, 2436),
    Row("qwen3-30b", 768, 2048, 2048, 3 * MIB, 3 * MIB, 1536, (1, 16, 512), (1024,)),
    Row("qwen1.5-moe", 1408, 2048, 8192, 5_767_168, 5_767_168, 704, (1, 16, 64), (128,)),
    Row("olmoe", 1024, 2048, 8192, 4 * MIB, 4 * MIB, 512, (1, 16, 512), ()),
    Row("gpt-oss-bf16", 2880, 2880, 2048, 16_588_800, 16_588_800, 8100, (1, 2, 4), (8, 16, 32, 64)),
    Row("gpt-oss-mxfp4", 2880, 2880, 2048, 4_147_200, 4_147_200, 2025, (1,), (2, 4, 8, 16), weight_bits=4),
    Row("glm-4.5-air", 1408, 4096, 4096, 11 * MIB, 11 * MIB, 2816, (1, 16, 256), (512,)),
    Row("glm-4.7-flash", 1536, 2048, 1152, 6 * MIB, 6 * MIB, 5460, (), (1, 2, 4, 8, 16, 32, 64), block=2),  # 5461.33
    Row("deepseek-v4-flash", 2048, 4096, 1024, 16 * MIB, 16 * MIB, 16_384, (1, 16, 16_384), ()),
    Row("granite-3.1-1b", 512, 1024, 2048, MIB, MIB, 512, (1, 16, 512), ()),
    Row("granite-3.1-3b", 512, 1536, 2048, 1_572_864, 1_572_864, 768, (1, 16, 256), (512,)),
    Row("gemma-4-26b-window", 704, 2816, 8192, 3_964_928, 3_964_928, 484, (1, 2, 4), (8, 16)),
    Row("gemma-4-26b-full", 704, 2816, 4096, 3_964_928, 3_964_928, 968, (1, 4, 8), (16, 32)),
    Row("lfm2-8b", 1792, 2048, 2048, 7 * MIB, 7 * MIB, 3584, (1, 16, 512), (1024,), conv=4096, conv_per_huge=1792),
    Row("minimax-m2.7", 1536, 3072, 4096, 9 * MIB, 9 * MIB, 2304, (1, 16, 256), (512,)),
]
BY_NAME = {row.name: row for row in ROWS}


def geometry_of(row: Row, block_tokens: int) -> PoolGeometry:
    expert = row.f * row.d * row.weight_bits // 8
    return PoolGeometry.from_bytes(expert, block_tokens * row.kv_token, row.ssm, row.conv)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_real_checkpoint(row: Row) -> None:
    geometry = geometry_of(row, row.block)
    assert geometry.expert_page_bytes == row.expert
    assert geometry.huge_page_bytes == row.huge
    assert geometry.pages_per_huge(EXPERT) * row.expert == row.huge, "experts are never padded"
    assert geometry.pages_per_huge(SSM) == row.ssm_per_huge
    assert geometry.pages_per_huge(CONV) == row.conv_per_huge
    assert geometry.pages_per_huge(KV) * row.block == row.tokens
    for layout in geometry.layouts:
        assert layout.page_bytes == layout.stride_bytes, "pages of real checkpoints need no rounding to entries"
        assert layout.tail_bytes < layout.stride_bytes
        parent_bytes = row.huge if layout.parent is None else geometry.layout(layout.parent).stride_bytes
        assert layout.per_parent * layout.stride_bytes + layout.tail_bytes == parent_bytes


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_exact_block_sizes(row: Row) -> None:
    for tokens in (*row.exact_blocks, *row.inexact_blocks):
        if tokens * row.kv_token > row.expert:
            continue
        layout = geometry_of(row, tokens).layout(KV)
        assert (layout.tail_bytes == 0 and layout.waste == 0) == (tokens in row.exact_blocks), f"{tokens} tokens"


@pytest.mark.parametrize(
    ("name", "tokens", "per_parent", "waste_percent"),
    [
        ("gpt-oss-bf16", 16, 506, 0.049),
        ("gpt-oss-bf16", 64, 126, 0.44),
        ("gpt-oss-mxfp4", 16, 126, 0.44),
        ("glm-4.7-flash", 16, 341, 0.098),
        ("glm-4.7-flash", 32, 170, 0.39),
        ("glm-4.7-flash", 64, 85, 0.39),
        ("gemma-4-26b-window", 16, 30, 0.83),
        ("gemma-4-26b-window", 64, 7, 7.4),
    ],
)
def test_kv_tails(name: str, tokens: int, per_parent: int, waste_percent: float) -> None:
    layout = geometry_of(BY_NAME[name], tokens).layout(KV)
    assert layout.per_parent == per_parent
    assert layout.waste * 100 == pytest.approx(waste_percent, rel=0.02)


@pytest.mark.parametrize(
    ("name", "waste_percent"), [("qwen3.5-397b", 0.098), ("granite-4.0-h-tiny", 0.13), ("granite-4.0-h-small", 0.098), ("qwen3.5-35b", 0)]
)
def test_conv_tails(name: str, waste_percent: float) -> None:
    row = BY_NAME[name]
    geometry = PoolGeometry.from_bytes(row.expert, 16 * row.kv_token, row.ssm, row.conv)
    layout = geometry.layout(CONV)
    assert layout.waste * 100 == pytest.approx(waste_percent, abs=0.005)


@pytest.mark.parametrize(
    ("expert", "ssm", "huge", "waste_percent"),
    [
        (2 * MIB, None, 2 * MIB, 0),
        (2 * MIB, 2 * MIB, 2 * MIB, 0),
        (6 * MIB, 4 * MIB, 12 * MIB, 0),
        (8 * MIB, 4 * MIB, 8 * MIB, 0),
        (3_276_800, 3 * MIB, 3_276_800, 4.0),  # the common multiple is 75 MiB; 4.17 % of the state's bytes
        (9_977_856, 2 * MIB, 3 * 9_977_856, 1.92),  # 1218 MiB; two experts would waste 5.42 %
        (5_505_024, 4 * MIB, 4 * 5_505_024, 4.76),  # Nemotron-3-Super: 84 MiB
        (10 * MIB, 16 * MIB, 20 * MIB, 20),  # nothing wastes <= 5 %: the least, and the smaller of equals
        (MIB + 256, 15 * MIB, 15 * (MIB + 256), 0.024),  # not even four experts hold a state
    ],
)
def test_huge_page(expert: int, ssm: int | None, huge: int, waste_percent: float) -> None:
    assert huge_page_bytes(expert, ssm) == huge
    if ssm is not None:
        assert huge % ssm / huge * 100 == pytest.approx(waste_percent, abs=0.01)


@pytest.mark.parametrize(
    ("f", "d", "itemsize", "tiles", "tile_bytes"),
    [
        (14_336, 4096, 2, 8, 14 * MIB),  # Mixtral-8x7B: 7 would do for size, but does not divide 4096
        (16_384, 6144, 2, 16, 12 * MIB),  # Mixtral-8x22B
        (10_752, 6144, 2, 12, 10_752 * 512 * 2),  # 8 gives tiles of 1344 rows, which 128 does not divide
        (2048, 4096, 2, 1, 16 * MIB),  # exactly the limit
        (2880, 2880, 2, 1, 16_588_800),
        (2880, 2880, 4, 3, 2880 * 960 * 4),  # 2 tiles of 1440 rows: no multiple of 64; 3 of 960 rows are
        (4100, 4100, 2, 4, 4100 * 1025 * 2),  # no multiple of 64 divides 4100
    ],
)
def test_expert_tiling(f: int, d: int, itemsize: int, tiles: int, tile_bytes: int) -> None:
    assert expert_tiling(f, d, itemsize) == tiles
    assert f % tiles == 0 and d % tiles == 0
    assert f * d * itemsize // tiles == tile_bytes <= MAX_PAGE_BYTES


def test_expert_tiling_without_common_divisor_says_so() -> None:
    with pytest.raises(DoesNotFitError, match="no common divisor"):
        expert_tiling(8191, 8192, 2)


def test_tiled_experts_make_tile_sized_pages() -> None:
    mixtral = PoolGeometry.build(f=14_336, d=4096, weight_itemsize=2, kv_heads=8, head_dim=128, kv_itemsize=2, block_tokens=16)
    assert (mixtral.tiles, mixtral.pages_per_expert) == (8, 24)
    assert mixtral.expert_page_bytes == mixtral.huge_page_bytes == 14 * MIB
    assert mixtral.kv_page_bytes == 16 * 4096
    assert mixtral.layout(KV).per_parent == 224
    assert mixtral.kinds == (EXPERT, KV)


def test_third_level_goes_where_less_is_lost() -> None:
    # 12 MiB huge pages of 2 experts or 3 states. 1.5 MiB pages fit 6 MiB exactly, 4 MiB with a tail; 1 MiB fits both: expert size.
    assert PoolGeometry.from_bytes(6 * MIB, 3 * MIB // 2, 4 * MIB).layout(KV).parent is EXPERT
    assert PoolGeometry.from_bytes(6 * MIB, MIB, 4 * MIB).layout(KV).parent is EXPERT
    geometry = PoolGeometry.from_bytes(6 * MIB, 4 * MIB, 4 * MIB)
    assert geometry.layout(KV).parent is SSM
    assert geometry.pages_per_huge(KV) == 3
    # Through 3 MiB states the 3,276,800-byte huge page would lose their 4 % tail, and gain nothing.
    assert PoolGeometry.from_bytes(3_276_800, 128 * 2048, 3 * MIB).layout(KV).parent is EXPERT
    # Larger than an expert, but not than a state.
    assert PoolGeometry.from_bytes(2 * MIB, 3 * MIB, 4 * MIB).layout(KV).parent is SSM


def test_pages_larger_than_their_parents_are_refused() -> None:
    with pytest.raises(DoesNotFitError, match="KV page") as caught:
        PoolGeometry.from_bytes(MIB, MIB + 1)
    assert "block_tokens" in str(caught.value.hint)
    with pytest.raises(DoesNotFitError, match="convolution"):
        PoolGeometry.from_bytes(MIB, 1024, None, MIB + 1)
    with pytest.raises(ValueError, match="expert_page_bytes"):
        PoolGeometry.from_bytes(0, 1)


def test_tiny_pages_are_rounded_to_entries() -> None:
    geometry = PoolGeometry.from_bytes(1000, 200, 600, 100)
    assert [layout.stride_bytes for layout in geometry.layouts] == [1024, 768, 256, 256]
    assert geometry.huge_page_bytes == 3072
    assert all(layout.stride_bytes % ENTRY_BYTES == 0 for layout in geometry.layouts)
    assert geometry.layout(KV).waste == pytest.approx(1 - 4 * 200 / 1024)
    assert [layout.level for layout in geometry.layouts] == [2, 2, 3, 3]


@pytest.mark.parametrize(
    ("kv_token", "expert", "ssm", "requested", "tokens"),
    [
        (2048, 3 * MIB, None, 16, 16),
        (2048, 3 * MIB, None, 100, 64),  # powers of two only
        (8192, 3_964_928, None, 64, 32),  # 64 would waste 7.4 %, 32 wastes 0.83 %
        (2048, 16_588_800, None, 16, 16),
        (1152, 6 * MIB, None, 16, 16),
        (1536, 55_296, None, 16, 4),  # 16 and 8 waste 11 %; 4 tokens fit 9 times
        (256, 4608, None, 16, 2),
        (300, 1000, None, 16, 2),  # rounding to entries counts: 1 token and 2 tokens use 600 bytes of 1024, 4 do not fit
        (3000, 4096, 3 * 4096, 16, 4),  # the state's page wastes 2.3 %, the least there is
    ],
)
def test_choose_block_tokens(kv_token: int, expert: int, ssm: int | None, requested: int, tokens: int) -> None:
    chosen = choose_block_tokens(kv_token, expert, ssm, requested=requested)
    assert chosen == tokens
    PoolGeometry.from_bytes(expert, chosen * kv_token, ssm)


def test_choose_block_tokens_limits() -> None:
    assert choose_block_tokens(8192, 3_964_928, requested=64, max_tail=Fraction(8, 100)) == 64
    with pytest.raises(DoesNotFitError, match="one token"):
        choose_block_tokens(5000, 4096)
