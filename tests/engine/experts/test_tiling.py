"""Row tiles of mixed formats: the page size that wastes least, whole groups of rows, nothing lost."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rimuru_cli.engine.config import EngineConfig, page_geometry
from rimuru_cli.engine.experts import tiling
from rimuru_cli.engine.experts.pages import ExpertPages
from rimuru_cli.engine.experts.tiling import Layer, LayerTiles, Matrix, choose_tiles, rows_of_tile
from rimuru_cli.engine.memory.geometry import MAX_PAGE_BYTES, PageKind, round_to_entry
from rimuru_kernels.packed_weights.format import TILE_STEP, PackedFormat, page_bytes, tile_rows
from rimuru_models.config import ModelConfig
from rimuru_models.gguf.kinds import PACKED
from rimuru_models.quantization.formats import LayerFormats, WeightFormats

FP8 = PackedFormat("fp8", 128, "f32", group_rows=128)
NVFP4 = PackedFormat("fp4", 16, "e4m3", factor=True)
FORMATS = [*PACKED.values(), FP8, NVFP4]
ITEMSIZE = 2


def content(fmt: PackedFormat | None, rows: int, columns: int) -> int:
    return rows * columns * ITEMSIZE if fmt is None else page_bytes(fmt, rows, columns)


def layer(formats: LayerFormats | None, f: int, d: int) -> Layer:
    wide, tall = (None, None) if formats is None else formats
    return Matrix(wide, f, d), Matrix(tall, d, f)


kinds = st.one_of(st.none(), st.builds(LayerFormats, st.sampled_from(FORMATS), st.sampled_from(FORMATS)))


def ways_to_cut(own: Layer, most: int) -> set[tuple[int, int]]:
    """(pages of an expert, bytes of its largest page) of all ways to cut a layer's matrices into up to so many tiles each."""
    wide, tall = own
    ways = set()
    for counts in itertools.product(range(1, most + 1), repeat=2):
        if wide.fmt is None and counts[0] != counts[1]:
            continue
        try:
            heights = rows_of_tile(wide, counts[0]), rows_of_tile(tall, counts[1])
        except ValueError:
            continue
        size = max(content(wide.fmt, heights[0], wide.columns), content(tall.fmt, heights[1], tall.columns))
        ways.add((2 * counts[0] + counts[1], round_to_entry(size)))
    return ways


@settings(max_examples=60, deadline=None)
@given(
    st.lists(kinds, min_size=1, max_size=2),
    st.lists(st.integers(0, 1), min_size=1, max_size=6),
    st.sampled_from([64, 96, 160, 384, 512, 704, 768]),
    st.sampled_from([128, 256, 640, 1024, 2048]),
)
def test_nothing_wastes_less(formats: list[LayerFormats | None], order: list[int], f: int, d: int) -> None:
    """Compared with every way of cutting each kind of layer into up to 8 tiles; what is taken is within one part in `NEAR` of the least."""
    layers = [layer(formats[place % len(formats)], f, d) for place in order]
    whole = round_to_entry(max(content(*matrix) for own in layers for matrix in own))
    chosen = choose_tiles(layers, content, whole)
    assert chosen is not None
    size, tiles = chosen
    taken = sum(own.pages for own in tiles) * size
    kinds = Counter(layers)
    least = min(
        sum(count * pages for count, (pages, _) in zip(kinds.values(), ways, strict=True)) * max(largest for _, largest in ways)
        for ways in itertools.product(*(ways_to_cut(own, tiling.EASY_TILES) for own in kinds))
    )
    assert least <= taken and taken * tiling.NEAR <= least * (tiling.NEAR + 1)


@settings(max_examples=200, deadline=None)
@given(st.lists(kinds, min_size=1, max_size=4), st.integers(1, 2200), st.integers(1, 3000), st.integers(1 << 12, 1 << 21))
def test_tiles_are_whole_rows_and_groups_and_fit(formats: list[LayerFormats | None], f: int, d: int, most: int) -> None:
    layers = [layer(own, f, d) for own in formats]
    chosen = choose_tiles(layers, content, most)
    assume(chosen is not None)
    assert chosen is not None
    size, tiles = chosen
    assert size % 256 == 0 and size <= most
    for own, counts in zip(layers, tiles, strict=True):
        for matrix, count in zip(own, counts, strict=True):
            rows = rows_of_tile(matrix, count)
            heights = [min(rows, matrix.rows - start) for start in range(0, matrix.rows, rows)]
            assert len(heights) == count and sum(heights) == matrix.rows and min(heights) >= 1
            assert content(matrix.fmt, rows, matrix.columns) <= size
            if matrix.fmt is None:
                assert len(set(heights)) == 1 and counts.wide == counts.down
            elif count > 1:
                assert rows % matrix.fmt.group_rows == 0
                assert len(set(heights)) == 1 or rows % TILE_STEP == 0


def test_tile_rows() -> None:
    assert [tile_rows(2048, tiles) for tiles in (1, 2, 3, 4)] == [2048, 1024, 704, 512]
    assert tile_rows(384, 3, 128) == 128 and tile_rows(384, 2, 128) == 256  # 192 rows would tear a group
    assert tile_rows(100, 4) == 25 and tile_rows(80, 3) == 32
    for rows, tiles in ((100, 3), (100, 7), (128, 9), (64, 33)):
        with pytest.raises(ValueError, match="do not fill"):
            tile_rows(rows, tiles)
    for rows, tiles in ((0, 1), (5, 0)):
        with pytest.raises(ValueError, match="tiles"):
            tile_rows(rows, tiles)


def more_bits(index: int, layers: int) -> bool:
    """Which down projections presets of medium size give more bits."""
    return index < layers // 8 or index >= 7 * layers // 8 or (index - layers // 8) % 3 == 2


@pytest.mark.parametrize(
    ("layers", "f", "d", "names"),
    [
        pytest.param(48, 768, 2048, ("Q4_K", "Q4_K", "Q6_K"), id="Qwen3-30B-A3B"),
        pytest.param(40, 512, 2048, ("Q4_K", "Q4_K", "Q6_K"), id="Qwen3.5-35B-A3B"),
        pytest.param(26, 1408, 2048, ("Q4_K", "Q5_0", "Q8_0"), id="DeepSeek-V2-Lite"),
        pytest.param(24, 2880, 2880, ("Q5_0", "Q5_0", "Q8_0"), id="gpt-oss"),
        pytest.param(24, 512, 1024, ("Q4_K", "Q4_K", "Q6_K"), id="Granite 3 1B"),
        pytest.param(40, 768, 4096, ("Q4_K", "Q4_K", "Q6_K"), id="Granite 4 small"),
        pytest.param(48, 768, 2048, ("Q5_K", "Q5_K", "Q6_K"), id="Q5_K_M"),
    ],
)
def test_presets_of_medium_size_waste_little(layers: int, f: int, d: int, names: tuple[str, str, str]) -> None:
    wide, low, high = (PACKED[name] for name in names)
    model = ModelConfig.from_dict(
        {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": d, "moe_intermediate_size": f,
            "num_hidden_layers": layers, "num_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
            "head_dim": 64, "vocab_size": 100, "rms_norm_eps": 1e-6, "intermediate_size": 64, "max_position_embeddings": 128,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "rope_theta": 1e4, "hidden_act": "silu",
            "tie_word_embeddings": False, "attention_bias": False,
        },
        where="test",
    )  # fmt: skip
    experts = {layer: LayerFormats(wide, high if more_bits(layer, layers) else low) for layer in model.moe_layers}
    for cpu in (False, True):
        pages = ExpertPages.build(model, 2, experts, MAX_PAGE_BYTES, cpu=cpu)
        assert sum(pages.layer_pages) * pages.page_bytes * 0.92 <= pages.content_bytes
        formats = WeightFormats(experts, {}, "BF16", "BF16")
        geometry, tokens = page_geometry(model, 2, EngineConfig(), formats, cpu=cpu)
        assert tokens >= 8 and geometry.layout(PageKind.KV).waste <= 0.04
    assert len(set(experts.values())) == 2


def test_what_is_hardly_mixed_is_not_cut() -> None:
    """A few bytes of difference do not make pages smaller; nor do small experts."""
    small = [layer(LayerFormats(PACKED["Q4_K"], PACKED["Q6_K"]), 256, 256)] * 4
    assert choose_tiles(small, content, MAX_PAGE_BYTES) == (round_to_entry(content(PACKED["Q6_K"], 256, 256)), (LayerTiles(1, 1),) * 4)
    near = [layer(LayerFormats(FP8, PackedFormat("fp8", 0, "f32")), 768, 2048)] * 4
    chosen = choose_tiles(near, content, MAX_PAGE_BYTES)
    assert chosen is not None and chosen[1] == (LayerTiles(1, 1),) * 4


def test_pages_are_split_into_whole_pages_of_the_cache_where_that_costs_little() -> None:
    layers = [layer(LayerFormats(PACKED["Q4_K"], fmt), 768, 2048) for fmt in (PACKED["Q4_K"], PACKED["Q6_K"])]
    plain, rounded, far = (choose_tiles(layers, content, MAX_PAGE_BYTES, grain) for grain in (1, 32 << 10, 100 << 10))
    assert plain is not None and rounded is not None and plain[1] == rounded[1] == ((2, 2), (2, 3))
    assert plain[0] == 454_656 and rounded[0] == 14 * (32 << 10) and far == plain


def test_no_page_is_small_enough() -> None:
    layers = [layer(LayerFormats(FP8, PACKED["Q8_0"]), 768, 2048)]
    assert choose_tiles(layers, content, 100_000) is None
