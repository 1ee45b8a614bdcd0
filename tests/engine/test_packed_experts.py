"""Engines whose experts are packed: whatever moves, on the CPU and on a device, the text is that of the model in plain memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from elastic import CONTEXT, LENGTHS, CeilingMover, adversary, converse, prompts_of
from engines import assert_all_free, resident_tokens_of
from packed_checkpoints import PackedReader
from tiny_checkpoints import write_tiny_checkpoint

from rimuru_cli.bench.packed import QUANTS
from rimuru_cli.engine import loading
from rimuru_cli.engine.config import EngineConfig, plan_memory
from rimuru_cli.engine.device.plan import plan_device_memory
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.experts import pages as pages_module
from rimuru_cli.engine.experts.planes import has_product
from rimuru_kernels.packed_weights import PackedFormat
from rimuru_models.quantization.formats import LayerFormats

_AWQ = PackedFormat("int4", 128, "f16", "zero")
_ROWS = PackedFormat("int8", 0, "bf16")
_Q5_K = PackedFormat("int5", 32, "u8*f16", "u8*f16")
_Q4_1 = PackedFormat("int4", 32, "f16", "min")

LAYERS: dict[str, list[LayerFormats | None]] = {
    **{name: [formats] for name, formats in QUANTS.items() if name != "q4_k"},
    "awq": [LayerFormats(_AWQ, _AWQ)],
    "int8 by rows": [LayerFormats(_ROWS, _ROWS)],
    "q5_k and q4_1": [LayerFormats(_Q5_K, _Q4_1)],
    "mixed by layer": [QUANTS["int4"], QUANTS["int8"], None, QUANTS["q4_k_m"]],
}
DENSE: dict[str, list[PackedFormat]] = {
    "dense int8": [QUANTS["int8"].gate_up],
    "dense FP8": [QUANTS["fp8"].gate_up],
    "dense of many kinds": [QUANTS["q4_k_m"].down, _AWQ, QUANTS["mxfp4"].down, _Q4_1, QUANTS["nvfp4"].down],
}
LAYERS |= {name: [QUANTS["int4"]] for name in DENSE}
DEVICES = [
    "cpu",
    "emulated",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("packed"), "qwen3_moe")


@pytest.fixture(params=DEVICES)
def config(request: pytest.FixtureRequest) -> EngineConfig:
    return EngineConfig(device=request.param, context=CONTEXT, device_batch_tokens=24, max_batch_tokens=24)


_SAID: dict[str, list[list[int]]] = {}


def said(folder: Path, name: str) -> list[list[int]]:
    """What the model says in plain memory, with the experts that the codes mean."""
    if name not in _SAID:
        with PackedReader(folder, LAYERS[name], DENSE.get(name, ())) as reader:
            firsts = [resident_tokens_of(reader, prompt, count) for prompt, (_, count) in zip(prompts_of(), LENGTHS, strict=True)]
            _SAID[name] = [*firsts, resident_tokens_of(reader, [*prompts_of()[0], *firsts[0], 5, 6, 7], 20)]
    return _SAID[name]


def load(folder: Path, name: str, share: float, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine with room for `share` of the experts above the floor and the smallest context."""
    monkeypatch.setattr(loading, "open_reader", lambda path: PackedReader(path, LAYERS[name], DENSE.get(name, ())))
    with PackedReader(folder, LAYERS[name], DENSE.get(name, ())) as reader:
        model, formats, dtype = reader.config, reader.formats, reader.compute_dtype
    bare = replace(config, memory_bytes=None, pool_bytes=0)
    if config.device == "cpu":
        plan = plan_memory(model, bare, program=0, formats=formats)
        floor, least, pages = plan.floor, plan.least_pool, plan.experts
    else:
        device_plan = plan_device_memory(
            model, dtype, bare, program=0, free=0, max_batch_tokens=config.device_batch_tokens, formats=formats
        )
        floor, least, pages = device_plan.floor, device_plan.pool, device_plan.experts
    experts = len(model.moe_layers) * (model.num_experts - floor) * pages.expert_bytes
    return Engine.load(folder, replace(config, pool_bytes=least + int(share * experts), poison=True))


@pytest.mark.parametrize(("name", "share"), [*((name, 0.3) for name in LAYERS), ("int4", 1.0), ("mixed by layer", 0.0)])
def test_every_pool_size_and_every_schedule_gives_the_resident_text(
    name: str, share: float, folder: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(folder, name, share, replace(config, adjuster=adversary(int(10 * share))), monkeypatch)
    assert converse(engine) == said(folder, name)
    assert_all_free(engine)


@pytest.mark.parametrize("name", ["int4", "mixed by layer"])
def test_a_ceiling_that_moves(name: str, folder: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(folder, name, 0.6, replace(config, adjuster=adversary(4)), monkeypatch)
    mover = CeilingMover(engine, 4, highest=engine.info.memory_bytes + engine.info.pool_bytes // 2, share=0.3)
    assert converse(engine, each_step=mover) == said(folder, name)
    assert mover.changes
    engine.close()
    engine.check_integrity()


@pytest.mark.parametrize("name", ["int8", "mixed by layer"])
def test_experts_that_no_page_locked_memory_holds(name: str, folder: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    if config.device == "cpu":
        config = replace(config, moe_mode="on_demand")  # there is no other memory; absent experts come straight from the files
    engine = load(folder, name, 0.3, replace(config, pinned_bytes=40_000, adjuster=adversary(6)), monkeypatch)
    assert converse(engine) == said(folder, name)
    assert_all_free(engine)


def test_row_tiles_hold_matrices_of_their_own(folder: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "q4_k_m"
    engine = load(folder, name, 0.3, replace(config, max_page_bytes=2304, adjuster=adversary(5)), monkeypatch)
    assert engine.info.page_bytes <= 2304 and engine._parts.plan.experts.tiles > 1
    assert converse(engine) == said(folder, name)
    assert_all_free(engine)


@pytest.mark.parametrize(
    ("name", "lying"), [("int4", {"planes"}), ("fp8", {"numbers"}), ("q4_k_m", {"planes", "numbers"}), ("mixed by layer", {"planes"})]
)
def test_bfloat16_on_a_cpu_says_the_same_wherever_it_lies(
    name: str, lying: set[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger matrices than these are rounded as bfloat16 is, so the text is their own; but one text, whatever moves."""
    for least in ("LEAST_PLANE", "LEAST_PLANE_WITH_OFFSETS", "LEAST_NUMBERS"):
        monkeypatch.setattr(pages_module, least, 1)
    config = EngineConfig(device="cpu", context=CONTEXT, max_batch_tokens=24)
    texts = []
    for share, mode in ((1.0, "auto"), (0.3, "on_demand"), (0.3, "streamed"), (0.0, "on_demand")):
        engine = load(folder, name, share, replace(config, moe_mode=mode, adjuster=adversary(int(10 * share))), monkeypatch)
        experts = engine._parts.plan.experts
        assert {experts.lying(0, projection) for projection in range(3)} == (lying if has_product() else {"numbers"})
        texts.append(converse(engine))
        assert_all_free(engine)
    assert all(text == texts[0] for text in texts)


def test_packed_experts_need_less_room(folder: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {}
    for name in ("int4", "int8"):
        with load(folder, name, 1.0, config, monkeypatch) as engine:
            sizes[name] = engine.info.expert_bytes
            assert engine.info.expert_bytes == 3 * engine.info.page_bytes
    assert sizes["int4"] < sizes["int8"] < 3 * 48 * 64 * 2
