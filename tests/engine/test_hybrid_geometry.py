"""Page sizes of the released hybrid models, worked out from their config.json. All sizes are bytes."""

from __future__ import annotations

import pytest
from released_hybrids import RELEASED

from rimuru_cli.engine.config import EngineConfig, page_geometry
from rimuru_cli.engine.memory.geometry import PageKind, PoolGeometry
from rimuru_cli.engine.memory.state_layout import StateLayout
from rimuru_models.config import ModelConfig
from rimuru_models.errors import DoesNotFitError

MIB = 1 << 20
EXPERT, SSM, KV, CONV = PageKind.EXPERT, PageKind.SSM, PageKind.KV, PageKind.CONV


@pytest.mark.parametrize(
    ("name", "expert", "state", "huge", "a", "b", "row", "tokens", "rows"),
    [
        # P_e, P_s, P_h = a P_e = b P_s, conv row, tokens and conv rows of a huge page
        ("qwen3-next-80b", 2 * MIB, 2 * MIB, 2 * MIB, 1, 1, 16_384, 1024, 128),
        ("qwen3.5-35b", 2 * MIB, 2 * MIB, 2 * MIB, 1, 1, 16_384, 1024, 128),
        ("qwen3.5-122b", 6 * MIB, 4 * MIB, 12 * MIB, 2, 3, 24_576, 6144, 512),
        ("qwen3.5-397b", 8 * MIB, 4 * MIB, 8 * MIB, 1, 2, 24_576, 4096, 341),
        ("granite-4.0-h-tiny", 1_572_864, 1_572_864, 1_572_864, 1, 1, 6_656, 768, 236),
        ("granite-4.0-h-small", 6 * MIB, 4 * MIB, 12 * MIB, 2, 3, 16_896, 3072, 744),
    ],
)
def test_released_models(name: str, expert: int, state: int, huge: int, a: int, b: int, row: int, tokens: int, rows: int) -> None:
    geometry, block_tokens = page_geometry(ModelConfig.from_dict(RELEASED[name]), 2, EngineConfig())
    assert (geometry.expert_page_bytes, geometry.ssm_page_bytes, geometry.conv_row_bytes) == (expert, state, row)
    assert geometry.huge_page_bytes == huge and block_tokens == 16
    assert (geometry.pages_per_huge(EXPERT), geometry.pages_per_huge(SSM)) == (a, b)
    assert (geometry.pages_per_huge(KV) * block_tokens, geometry.pages_per_huge(CONV)) == (tokens, rows)


def test_a_state_is_float32_in_every_model_dtype() -> None:
    model = ModelConfig.from_dict(RELEASED["qwen3.5-35b"])
    for itemsize in (2, 4):
        geometry, _ = page_geometry(model, itemsize, EngineConfig())
        assert geometry.ssm_page_bytes == 2 * MIB and geometry.conv_row_bytes == 8192 * itemsize


@pytest.mark.parametrize(
    ("name", "huge_pages", "run_layers", "runs", "runs_per_parent"),
    [
        ("qwen3-next-80b", 36, 36, 1, 1),
        ("qwen3.5-35b", 30, 30, 1, 1),
        ("qwen3.5-122b", 12, 36, 1, 2),
        ("qwen3.5-397b", 23, 45, 1, 2),
        ("granite-4.0-h-tiny", 36, 36, 1, 2),
        ("granite-4.0-h-small", 12, 36, 1, 3),
    ],
)
def test_states_of_a_sequence(name: str, huge_pages: int, run_layers: int, runs: int, runs_per_parent: int) -> None:
    model = ModelConfig.from_dict(RELEASED[name])
    assert model.recurrent is not None
    geometry, _ = page_geometry(model, 2, EngineConfig())
    layout = StateLayout.build(geometry, len(model.recurrent_layers), model.recurrent.conv_rows)
    assert (layout.huge_pages, layout.run_layers, layout.runs, layout.runs_per_parent) == (huge_pages, run_layers, runs, runs_per_parent)
    assert layout.run_length <= geometry.layout(CONV).per_parent


def test_rows_are_divided_evenly_where_one_page_is_too_small() -> None:
    geometry = PoolGeometry.from_bytes(10 * 256, 256, 10 * 256, 256)
    layout = StateLayout.build(geometry, 7, 3)
    assert (layout.runs, layout.run_layers, layout.run_length, layout.runs_per_parent) == (3, 3, 9, 1)
    run = list(range(100, 109))
    assert [layout.conv_pages(run, layer) for layer in range(3)] == [[100, 101, 102], [103, 104, 105], [106, 107, 108]]
    with pytest.raises(DoesNotFitError, match="11 rows"):
        StateLayout.build(geometry, 1, 11)
