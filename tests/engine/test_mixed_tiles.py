"""Files that mix formats as llama.cpp's presets do, so that gate, up and down are cut into different numbers of row tiles, layer by layer:
whatever moves, the text is that of the weights which the `gguf` package says they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from elastic import CONTEXT, CeilingMover, adversary, converse, prompts_of
from engines import answer, assert_all_free, resident_tokens
from tiny_gguf import write_tiny_gguf

from rimuru_cli.engine import loading
from rimuru_cli.engine.config import EngineConfig, plan_memory
from rimuru_cli.engine.device.plan import plan_device_memory
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.experts import pages as pages_module
from rimuru_cli.engine.experts.tiling import Content, Layer, LayerTiles, rows_of_tile
from rimuru_cli.engine.memory.geometry import round_to_entry
from rimuru_cli.engine.telemetry.assemble import FrameAssembler, Head
from rimuru_cli.engine.telemetry.collect import Collector
from rimuru_cli.engine.telemetry.frame import EXPERT
from rimuru_cli.engine.telemetry.layout import DamagedTables
from rimuru_cli.engine.telemetry.tables import Tables
from rimuru_cli.engine.telemetry.wire import TABLE_TYPES, HeadWriter, array_items, head_of, joined, pieces_of, split, tables_of
from rimuru_cli.tui import words
from rimuru_models.readers import Reader, open_reader

LAYERS = 5


def more_bits(layer: int) -> bool:
    """Whether a preset of medium size gives a layer's down projection more bits: the first and last eighths, and each third between."""
    return layer < LAYERS // 8 or layer >= 7 * LAYERS // 8 or (layer - LAYERS // 8) % 3 == 2


def kinds(low: str, high: str, gate_up: str = "Q4_K") -> dict[str, str]:
    return {"low": low, "high": high, "gate_up": gate_up}


MIXES = {
    "Q4_K_M": (kinds("Q4_K", "Q6_K"), 256, 20_480),
    "Q5_K_M": (kinds("Q5_K", "Q6_K", "Q5_K"), 256, 23_552),
    "Q4_K_M where rows are no whole blocks": (kinds("Q5_0", "Q8_0"), 160, 16_384),
    "plain layers among them": (kinds("Q4_K", "F32"), 256, 70_000),
}


@pytest.fixture(params=MIXES)
def mix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    return {name: write(name, tmp_path_factory.mktemp("mixed")) for name in MIXES}


def write(name: str, folder: Path) -> tuple[Path, Path]:
    """The file, and the checkpoint that it means."""
    wanted, f, _ = MIXES[name]

    def kind_of(tensor: str) -> str:
        if "_exps" not in tensor:
            return "F32"
        layer = int(tensor.split(".")[1])
        own = wanted["high" if more_bits(layer) else "low"]
        return own if "down" in tensor or own == "F32" else wanted["gate_up"]

    return write_tiny_gguf(folder, "qwen3_moe", kind_of, hidden_size=256, moe_intermediate_size=f, num_layers=LAYERS)


def float_reader(path: Path) -> Reader:
    """A reader whose plain weights are float32 on devices, too, as they are in the checkpoint that a file means."""
    reader = open_reader(path)
    reader.compute_dtype = reader.expert_dtype = torch.float32
    return reader


@pytest.fixture(autouse=True)
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "open_reader", float_reader)


def load(path: Path, device: str, share: float, page_bytes: int, **more: object) -> Engine:
    """An engine with room for `share` of the experts above the floor and the smallest context."""
    config = EngineConfig(
        device=device, context=CONTEXT, device_batch_tokens=24, max_batch_tokens=24, max_page_bytes=page_bytes, pool_bytes=0
    )
    with float_reader(path) as reader:
        model, formats = reader.config, reader.formats
        if device == "cpu":
            plan = plan_memory(model, config, program=0, formats=formats)
            least, pages = plan.least_pool, plan.experts
        else:
            device_plan = plan_device_memory(model, reader.compute_dtype, config, program=0, free=0, max_batch_tokens=24, formats=formats)
            least, pages = device_plan.pool, device_plan.experts
    experts = pages.pages_of(len(model.moe_layers) * model.num_experts) * pages.page_bytes
    return Engine.load(path, replace(config, pool_bytes=least + int(share * experts), poison=True, **more))


DEVICES = ["cpu", "emulated"]
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
_MEANT: dict[str, list[list[int]]] = {}


def meant_text(name: str, folder: Path) -> list[list[int]]:
    """What the same conversations are with all weights in plain memory."""
    if name not in _MEANT:
        engine = Engine.load(folder, EngineConfig(device="cpu", context=CONTEXT, resident_share=1.0))
        _MEANT[name] = converse(engine)
        engine.close()
        assert _MEANT[name][0] == resident_tokens(folder, prompts_of()[0], len(_MEANT[name][0]))
    return _MEANT[name]


@pytest.mark.parametrize("device", [*DEVICES, GPU])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_every_schedule_gives_the_text_of_what_the_file_means(
    share: float, device: str, mix: str, written: dict[str, tuple[Path, Path]]
) -> None:
    path, meant = written[mix]
    engine = load(path, device, share, MIXES[mix][2], adjuster=adversary(int(10 * share)))
    pages = engine._parts.plan.experts
    assert len(set(pages.layer_tiles)) == 2 and len(set(pages.layer_pages)) == 2
    if "plain" not in mix:
        assert not pages.alike and sum(pages.layer_pages) * pages.page_bytes < 1.1 * pages.content_bytes
    assert converse(engine) == meant_text(mix, meant)
    assert_all_free(engine)
    engine.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["Q4_K_M", "plain layers among them"])
def test_a_ceiling_that_moves(name: str, device: str, written: dict[str, tuple[Path, Path]]) -> None:
    path, meant = written[name]
    engine = load(path, device, 0.6, MIXES[name][2], adjuster=adversary(4))
    mover = CeilingMover(engine, 4, highest=engine.info.memory_bytes + engine.info.pool_bytes // 2, share=0.3)
    assert converse(engine, each_step=mover) == meant_text(name, meant)
    assert mover.changes
    engine.close()
    engine.check_integrity()


@pytest.mark.parametrize("mode", ["on_demand", "streamed"])
def test_both_ways_of_reaching_absent_experts_on_a_cpu(mode: str, written: dict[str, tuple[Path, Path]]) -> None:
    path, meant = written["Q4_K_M"]
    engine = load(path, "cpu", 0.2, MIXES["Q4_K_M"][2], moe_mode=mode)
    assert converse(engine) == meant_text("Q4_K_M", meant)
    assert_all_free(engine)
    engine.close()


def test_experts_that_no_page_locked_memory_holds(written: dict[str, tuple[Path, Path]]) -> None:
    path, meant = written["Q4_K_M"]
    engine = load(path, "emulated", 0.3, MIXES["Q4_K_M"][2], pinned_bytes=1_500_000, adjuster=adversary(6))
    host = engine._parts.host
    assert 0 < host.pinned_bytes <= 1_500_000 and host.mapped_bytes + int(host.pinned.sum()) * max(host.layer_bytes) > 0
    assert converse(engine) == meant_text("Q4_K_M", meant)
    assert_all_free(engine)
    engine.close()


def test_guesses_fetch_the_pages_of_their_layer(written: dict[str, tuple[Path, Path]]) -> None:
    path, meant = written["Q4_K_M"]
    engine = load(path, "emulated", 0.3, MIXES["Q4_K_M"][2], prediction=True)
    assert converse(engine) == meant_text("Q4_K_M", meant)
    assert_all_free(engine)
    engine.close()


def test_what_a_cpu_makes_of_unequal_tiles_says_one_text_wherever_it_lies(
    written: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planes and bfloat16 numbers round, so the text is their own. (Tiles that a CPU would choose for so small a model are equal.)"""
    for least in ("LEAST_PLANE", "LEAST_NUMBERS", "LEAST_PLANE_WITH_OFFSETS"):
        monkeypatch.setattr(pages_module, least, 1)

    def in_threes(layers: Sequence[Layer], content: Content, *limits: int) -> tuple[int, tuple[LayerTiles, ...]]:
        sizes = [content(matrix.fmt, rows_of_tile(matrix, 3), matrix.columns) for layer in layers for matrix in layer]
        return round_to_entry(max(sizes)), (LayerTiles(3, 3),) * len(layers)

    monkeypatch.setattr(pages_module, "choose_tiles", in_threes)
    path, _ = written["Q4_K_M"]
    said = []
    for share, mode in ((1.2, "auto"), (0.2, "on_demand"), (0.2, "streamed")):
        engine = load(path, "cpu", share, 16 << 20, moe_mode=mode)
        pages = engine._parts.plan.experts
        assert "packed" not in {pages.lying(layer, part) for layer in range(LAYERS) for part in range(3)}
        assert pages.tile_heights(0, 0) == pages.tile_heights(2, 2) == (96, 96, 64)
        said.append(converse(engine))
        assert_all_free(engine)
        engine.close()
    assert said[0] == said[1] == said[2]


def test_a_short_answer_in_default_pages(written: dict[str, tuple[Path, Path]]) -> None:
    """Experts as small as these are not cut for the sake of waste."""
    path, meant = written["Q4_K_M"]
    engine = load(path, "cpu", 0.5, 16 << 20)
    assert engine._parts.plan.experts.alike
    assert answer(engine, prompts_of()[1]).output_ids == resident_tokens(meant, prompts_of()[1], 20)
    engine.close()


@pytest.mark.parametrize("device", DEVICES)
def test_frames_show_the_pages_that_experts_have(device: str, written: dict[str, tuple[Path, Path]]) -> None:
    engine = load(written["Q4_K_M"][0], device, 0.5, MIXES["Q4_K_M"][2], adjuster=adversary(5))
    collector, assembler = Collector(engine._watched, "0" * 16, "chat", 0.0), FrameAssembler()
    tiles = engine._parts.plan.experts.layer_tiles
    names: set[tuple[int, str]] = set()
    moments: list[tuple[Head, Tables]] = []

    def look() -> None:
        head, tables = collector.collect(len(moments), wait=True)
        raw, arrays = split(joined(*pieces_of(HeadWriter().json(head), array_items(tables))), TABLE_TYPES)
        moments.append((head_of(raw), tables_of(arrays)))
        frame = assembler.frame(*moments[-1])
        shown = np.flatnonzero(frame.pages.kind == EXPERT)
        own = engine._parts.residency
        assert len(shown) == own.owned_pages and own.owned_pages < 7 * own.num_resident
        names.update((int(frame.pages.layer[page]), words.owner(frame, page).split(" · ")[-1]) for page in shown)

    converse(engine, each_step=look)
    head, tables = moments[-1]
    assert head.engine.layer_tiles == tuple(map(tuple, tiles)) and words.expert_pages(head.engine) == "6 or 7"
    assert {name for layer, name in names if layer == 2} == {
        *(f"{name}, tile {tile} of 2" for name in ("gate", "up") for tile in (1, 2)), *(f"down, tile {tile} of 3" for tile in (1, 2, 3))
    }  # fmt: skip
    assert {name for layer, name in names if layer == 0 and name.startswith("down")} == {"down, tile 1 of 2", "down, tile 2 of 2"}
    for odd in (
        (),
        head.engine.layer_tiles[1:],
        ((2, 3), *head.engine.layer_tiles[1:]),
        ((2, 0), *head.engine.layer_tiles[1:]),
        ((2,),) * 5,
    ):
        with pytest.raises(DamagedTables):
            FrameAssembler().frame(replace(head, engine=replace(head.engine, layer_tiles=odd)), tables)
    engine.close()
