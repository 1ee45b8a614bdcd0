"""KV pages of 8-bit codes: half the bytes, the same text wherever pages lie and whatever moves, on the CPU and the device's way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic import CONTEXT, CeilingMover, adversary, converse, prompts_of
from engines import GREEDY, assert_all_free, load_engine, plan_for, run_all

from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.memory.geometry import PageKind, PoolGeometry
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.memory.quantized_kv import QuantizedKVView, kv_view
from rimuru_kernels.paged_attention import KVLayout
from rimuru_kernels.paged_attention.quantized import dequantize_heads, quantize_heads
from rimuru_models.errors import UsageError

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
Q8 = EngineConfig(max_batch_tokens=24, context=CONTEXT, kv="q8")


@pytest.mark.parametrize("magnitude", [0.0, 1e-7, 1e-3, 1.0, 300.0, 1e6])
def test_a_head_is_off_by_at_most_half_a_step_of_its_own(magnitude: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 16) * magnitude
    codes, scales = quantize_heads(x)
    assert codes.dtype is torch.int8 and scales.dtype is torch.float16 and scales.shape == (5, 3)
    step = x.abs().amax(-1, keepdim=True) / 127
    error = (dequantize_heads(codes, scales, torch.float32) - x).abs()
    # A rounded scale moves the largest element by up to 127 * 2^-11 of a step; the last term is the smallest float16.
    assert (error <= step * 0.57 + 2.0**-24 * 64).all()
    assert torch.equal(codes[0], quantize_heads(x[0])[0]), "what is stored depends on what is stored beside it"


@pytest.fixture
def view() -> QuantizedKVView:
    layout = KVLayout(4, 2, 6, quantized=True)
    pool = PagePool(PoolGeometry.from_bytes(expert_page_bytes=4096, kv_page_bytes=layout.page_bytes(4)), 8 * 4096, poison=True)
    view = kv_view(pool, layout, torch.float32)
    assert isinstance(view, QuantizedKVView)
    return view


def test_tokens_over_several_pages_come_back_and_copies_are_exact(view: QuantizedKVView) -> None:
    pages = view.pool.allocate(PageKind.KV, 9)[::-2]
    k, v = torch.randn(11, 2, 6), torch.randn(11, 2, 6) * 50
    view.store(k[:1], v[:1], pages, 2)
    view.store(k[1:], v[1:], pages, 3)
    wanted = [dequantize_heads(*quantize_heads(x), torch.float32) for x in (k, v)]
    for got, want in zip(view.gather(view.rows_of(pages)), wanted, strict=True):
        assert torch.equal(got[2:13], want)
    view.copy_tokens(pages[1], pages[4], 3)
    for got, want in zip(view.gather(view.rows_of(pages[4:])), wanted, strict=True):
        assert torch.equal(got[:3], want[2:5])


def test_a_layout_that_does_not_make_up_the_page_is_refused(view: QuantizedKVView) -> None:
    with pytest.raises(ValueError, match="kv page"):
        kv_view(view.pool, KVLayout(8, 2, 6, quantized=True), torch.float32)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(UsageError, match="q8"):
        EngineConfig(kv="q4")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def q8_text(checkpoints: dict[str, Path]) -> dict[str, list[list[int]]]:
    """What the model says with 8-bit keys and values while everything is resident."""
    texts = {}
    for family in ("qwen3_moe", "mixtral"):
        engine = load_engine(checkpoints[family], 1.0, Q8)
        assert engine.info.kv_dtype == "q8"
        texts[family] = converse(engine)
        assert_all_free(engine)
    return texts


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    ("share", "changes"),
    [
        pytest.param(0.0, {}, id="smallest pool"),
        pytest.param(0.4, {"adjuster": adversary(0), "moe_mode": "streamed"}, id="random moves, streamed"),
        pytest.param(0.4, {"adjuster": adversary(1), "moe_mode": "on_demand"}, id="random moves, on demand"),
    ],
)
def test_the_text_does_not_depend_on_where_pages_lie(
    family: str, share: float, changes: dict[str, Any], checkpoints: dict[str, Path], q8_text: dict[str, list[list[int]]]
) -> None:
    engine = load_engine(checkpoints[family], share, replace(Q8, **changes))
    assert converse(engine) == q8_text[family]
    assert_all_free(engine)


def test_the_text_survives_a_moving_ceiling(qwen3: Path, q8_text: dict[str, list[list[int]]]) -> None:
    engine = load_engine(qwen3, 0.6, Q8)
    mover = CeilingMover(engine, 3, highest=engine.info.memory_bytes)
    assert converse(engine, each_step=mover) == q8_text["qwen3_moe"]
    assert mover.changes, "nothing moved"
    assert_all_free(engine)


@pytest.mark.parametrize("device", ["emulated", CUDA])
def test_the_way_of_a_device_says_the_same_for_every_pool(device: Any, qwen3: Path) -> None:
    texts = []
    for share, changes in ((1.0, {}), (0.0, {}), (0.4, {"adjuster": adversary(2)})):
        engine = load_engine(qwen3, share, replace(Q8, device=device, device_batch_tokens=24, **changes))  # type: ignore[arg-type]
        assert engine.info.kv_dtype == "q8"
        texts.append(converse(engine))
        assert_all_free(engine)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("name", ["qwen3_next", "granitemoehybrid", "1:2"])
@pytest.mark.parametrize("device", ["cpu", "emulated", CUDA])
def test_attention_layers_of_hybrids(name: str, device: Any, hybrid: Any) -> None:
    """States and 8-bit tokens share the pool; the text is the same in the largest and the smallest, and while everything moves."""
    folder, _ = hybrid(name)
    config = replace(Q8, device=device, device_batch_tokens=24)
    texts = []
    for share, changes in ((1.0, {}), (0.0, {}), (0.4, {"adjuster": adversary(2)})):
        engine = load_engine(folder, share, replace(config, **changes))  # type: ignore[arg-type]
        texts.append(converse(engine))
        assert_all_free(engine)
    assert texts[0] == texts[1] == texts[2]


def test_a_prompt_that_comes_again_is_not_computed_again(qwen3: Path) -> None:
    engine = load_engine(qwen3, 0.5, Q8)
    requests = []
    for _ in range(2):
        requests.append(engine.submit(prompts_of()[0], GREEDY))
        run_all(engine)
    assert requests[0].output_ids == requests[1].output_ids
    assert requests[1].timings.cached_tokens > 0
    assert_all_free(engine)


def test_half_the_bytes_go_back_to_experts_or_to_a_longer_conversation(qwen3: Path) -> None:
    plain, small = plan_for(qwen3), plan_for(qwen3, EngineConfig(kv="q8"))
    per_token = [plan.geometry.kv_page_bytes / plan.block_tokens for plan in (plain, small)]
    assert per_token[1] < 0.33 * per_token[0]  # of float32, with scales of small heads
    same = EngineConfig(memory_bytes=plain.minimum)
    assert plan_for(qwen3, replace(same, kv="q8")).kv_pages * small.block_tokens > plan_for(qwen3, same).kv_pages * plain.block_tokens
