"""The way of a GPU (entries, device tables, streamed buffers), emulated on the CPU with the reference ops: same text, same integrity.

On a machine with a GPU the same tests run on it as well.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from elastic import CONTEXT, LENGTHS, adversary, converse, prompts_of
from engines import GREEDY, answer, assert_all_free, load_engine, resident_tokens, run_all
from tiny_checkpoints import FAMILIES, write_tiny_checkpoint

from rimuru_cli.engine import loading as engine_loading
from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.device import loading
from rimuru_cli.engine.device.plan import device_floor
from rimuru_kernels.backend import Backend
from rimuru_models.errors import DoesNotFitError

DEVICES = ["emulated", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])]


@pytest.fixture(params=DEVICES)
def config(request: pytest.FixtureRequest) -> EngineConfig:
    return EngineConfig(device=request.param, context=CONTEXT, device_batch_tokens=24)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("share", [1.0, 0.4, 0.0])
def test_every_pool_size_gives_the_resident_text(
    family: str, share: float, config: EngineConfig, checkpoints: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    engine = load_engine(checkpoints[family], share, config)
    assert converse(engine) == expected[family]
    assert_all_free(engine)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, 1])
def test_random_shrinks_and_expands_at_every_step(
    family: str, seed: int, config: EngineConfig, checkpoints: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    engine = load_engine(checkpoints[family], 0.3, replace(config, adjuster=adversary(seed)))
    assert converse(engine) == expected[family]
    assert len(engine.snapshot().events) > 5, "the adversary moved nothing"
    assert_all_free(engine)


def test_more_sequences_than_the_residents_allow_decode_in_several_passes(qwen3: Path, config: EngineConfig) -> None:
    engine = load_engine(qwen3, 0.0, replace(config, context=48, adjuster=adversary(2)))
    prompts = [[7 + i, 3, 5 + i, 100 - i] for i in range(5)]
    requests = [engine.submit(prompt, replace(GREEDY, max_tokens=12)) for prompt in prompts]
    run_all(engine)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_ids == resident_tokens(qwen3, prompt, 12)
    assert_all_free(engine)


def test_a_second_turn_computes_only_what_is_new(qwen3: Path, config: EngineConfig) -> None:
    engine = load_engine(qwen3, 0.5, config)
    first = answer(engine, prompts_of()[1])
    second = answer(engine, [*prompts_of()[1], *first.output_ids, 9])
    assert second.timings.cached_tokens == 9 + 19
    assert second.output_ids == resident_tokens(qwen3, [*prompts_of()[1], *first.output_ids, 9], 20)


def test_the_next_turn_of_one_of_two_texts_that_began_alike(qwen3: Path, config: EngineConfig) -> None:
    """Both computed the beginning; whoever ended last goes on behind the other's blocks, whose pages the device must hear of."""
    engine = load_engine(qwen3, 1.0, config)
    opening = [(3 * i) % 128 for i in range(40)]
    first, second = [*opening, 1], [*opening, 2, 3]
    short = engine.submit(first, replace(GREEDY, max_tokens=4))
    # It ends with a whole block, which its next turn has as it is.
    long = engine.submit(second, replace(GREEDY, max_tokens=-len(second) % engine.info.block_tokens + 1))
    run_all(engine)
    assert short.output_ids == resident_tokens(qwen3, first, 4)
    turn = [*second, *long.output_ids, 9]
    request = answer(engine, turn)
    assert request.timings.cached_tokens == len(turn) - 2
    assert request.output_ids == resident_tokens(qwen3, turn, 20)


def test_counters_add_up(qwen3: Path, config: EngineConfig) -> None:
    engine = load_engine(qwen3, 0.0, replace(config, adjuster=adversary(1)))
    request = answer(engine, prompts_of()[2])
    assert request.expert_uses == engine.snapshot().expert_uses
    assert 0 < request.expert_hits == engine.snapshot().expert_hits < request.expert_uses


def test_experts_are_tiled_where_pages_are_small(qwen3: Path, config: EngineConfig, expected: dict[str, list[list[int]]]) -> None:
    engine = load_engine(qwen3, 0.3, replace(config, max_page_bytes=6400, adjuster=adversary(5)))
    assert engine.info.page_bytes <= 6400
    assert converse(engine) == expected["qwen3_moe"]
    assert_all_free(engine)


def test_a_ceiling_below_the_floor_says_the_minimum(qwen3: Path, config: EngineConfig) -> None:
    with pytest.raises(DoesNotFitError, match=r"at least [\d,]+ MiB of device memory"):
        load_engine(qwen3, 0.0, replace(config, memory_bytes=1 << 20))


def test_checkpoints_in_half_precision_repeat_themselves_exactly(tmp_path: Path, config: EngineConfig) -> None:
    """bf16 is computed in bf16 here, so the text may differ from float32's; it must still not depend on the pool."""
    folder = write_tiny_checkpoint(tmp_path / "half", "qwen3_moe", dtype=torch.bfloat16)
    texts = [
        answer(load_engine(folder, share, replace(config, adjuster=adversary(seed))), prompts_of()[0]).output_ids
        for seed, share in enumerate((1.0, 0.4, 0.0))
    ]
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 20


@pytest.mark.parametrize(
    ("experts", "top_k", "floor"), [(128, 8, 16), (128, 6, 12), (32, 20, 20), (8, 2, 4), (60, 4, 8), (1, 1, 1), (4, 4, 4)]
)
def test_the_floor_of_a_device(experts: int, top_k: int, floor: int) -> None:
    assert device_floor(experts, top_k, None) == floor
    assert device_floor(experts, top_k, 0) == experts


def test_a_gpu_that_cannot_hold_the_model_leaves_it_to_the_cpu_and_says_so(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loading, "select_backend", lambda: Backend("triton", "Some GPU"))

    def refuse(*args: object) -> None:
        raise DoesNotFitError("It needs more than there is.")

    monkeypatch.setattr(loading, "load_on_device", refuse)
    engine = load_engine(qwen3, 0.5, EngineConfig(context=CONTEXT))
    assert engine.info.device == "cpu"
    assert engine.info.backend_reason == "the GPU is not used: It needs more than there is."
    with pytest.raises(DoesNotFitError, match="more than there is"):
        load_engine(qwen3, 0.5, EngineConfig(context=CONTEXT, device="cuda"))


def test_the_longest_conversation_is_the_one_expected() -> None:
    assert max(length + count for length, count in LENGTHS) + 23 <= CONTEXT
