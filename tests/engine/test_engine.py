"""The engine from outside: requests, reuse between turns, limits, cancellation, counters."""

from __future__ import annotations

import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from engines import GREEDY, answer, assert_all_free, load_engine, plan_for, resident_tokens, run_all
from tiny_checkpoints import write_tiny_checkpoint

from rimuru_cli.engine.config import Device, EngineConfig, plan_memory
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.experts.adjuster import Decision
from rimuru_cli.engine.request import RequestStatus, SamplingParams
from rimuru_models.errors import CheckpointError, DoesNotFitError, UsageError
from rimuru_models.weights import CheckpointReader

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def test_a_second_turn_computes_only_what_is_new(qwen3: Path) -> None:
    engine = load_engine(qwen3)
    first = answer(engine, PROMPT)
    assert first.timings.cached_tokens == 0
    assert first.timings.computed_tokens == len(PROMPT) + 19  # the last sampled token is not computed
    second_prompt = [*PROMPT, *first.output_ids, 7, 7, 7]
    second = answer(engine, second_prompt)
    assert second.timings.cached_tokens == len(PROMPT) + 19
    assert second.timings.computed_tokens == 4 + 19
    assert second.output_ids == resident_tokens(qwen3, second_prompt, 20)
    assert_all_free(engine)


def test_an_edited_message_reuses_everything_before_it(qwen3: Path) -> None:
    engine = load_engine(qwen3)
    answer(engine, PROMPT)
    edited = [*PROMPT[:11], 100, 101, 102]
    request = answer(engine, edited)
    assert request.timings.cached_tokens == 11
    assert request.output_ids == resident_tokens(qwen3, edited, 20)


def test_asking_the_same_again_computes_one_token_of_the_prompt(qwen3: Path) -> None:
    engine = load_engine(qwen3)
    first = answer(engine, PROMPT)
    again = answer(engine, PROMPT)
    assert again.timings.cached_tokens == len(PROMPT) - 1
    assert again.output_ids == first.output_ids


def test_a_conversation_that_is_evicted_is_computed_again(qwen3: Path) -> None:
    engine = load_engine(qwen3, 0.0, EngineConfig(context=96))
    first = answer(engine, PROMPT, replace(GREEDY, max_tokens=60))
    other = answer(engine, [99, *PROMPT], replace(GREEDY, max_tokens=74))
    again = answer(engine, PROMPT, replace(GREEDY, max_tokens=60))
    assert again.output_ids == first.output_ids
    assert len(other.output_ids) == 74
    assert_all_free(engine)


def test_end_of_answer_tokens_stop_and_are_not_part_of_the_answer(qwen3: Path) -> None:
    engine = load_engine(qwen3)
    free = answer(engine, PROMPT).output_ids
    engine.eos_ids = frozenset([free[7]])
    stopped = answer(engine, PROMPT, replace(GREEDY, ignore_eos=False))
    first = free.index(free[7])
    assert stopped.output_ids == free[:first]
    assert stopped.finish_reason == "stop"
    assert answer(engine, PROMPT).finish_reason == "length"


def test_the_context_limit_ends_an_answer(qwen3: Path) -> None:
    engine = load_engine(qwen3, config=EngineConfig(context=32))
    assert engine.info.context_limit == 32
    request = answer(engine, PROMPT, SamplingParams(temperature=0.0, ignore_eos=True))
    assert request.finish_reason == "length"
    assert request.num_tokens == 32
    assert_all_free(engine)


def test_a_prompt_that_can_never_fit_is_refused_with_numbers(qwen3: Path) -> None:
    engine = load_engine(qwen3, config=EngineConfig(context=32))
    with pytest.raises(DoesNotFitError, match=r"40 tokens.*32 tokens.*context that was set") as caught:
        engine.submit([1] * 40, GREEDY)
    assert "--context" in (caught.value.hint or "")
    with pytest.raises(DoesNotFitError):
        engine.submit([1] * 32, GREEDY)
    assert not engine.has_work
    answer(engine, [1] * 31)
    with pytest.raises(DoesNotFitError, match="model's own context"):
        load_engine(qwen3).submit([1] * 512, GREEDY)


def test_a_small_pool_limits_the_context_and_says_so(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "long", "qwen3_moe", max_position_embeddings=100_000)
    engine = load_engine(folder, 0.0)
    assert 512 <= engine.info.context_limit < 100_000 == engine.info.model_context
    assert any(f"{engine.info.context_limit:,}" in notice for notice in engine.info.notices)
    with pytest.raises(DoesNotFitError, match="memory ceiling") as caught:
        engine.submit([1] * 50_000, GREEDY)
    assert "--memory" in (caught.value.hint or "")
    # What the engine promises, it holds: a prompt that fills the whole context, with experts at the floor.
    request = answer(engine, [i % 128 for i in range(engine.info.context_limit - 3)], replace(GREEDY, max_tokens=50))
    assert request.finish_reason == "length" and len(request.output_ids) == 3
    assert_all_free(engine)


@pytest.mark.parametrize("prompt", [[], [128], [-1]])
def test_impossible_prompts(qwen3: Path, prompt: list[int]) -> None:
    engine = load_engine(qwen3)
    with pytest.raises(UsageError):
        engine.submit(prompt, GREEDY)


def test_a_ceiling_below_the_floor_says_the_minimum(qwen3: Path) -> None:
    with pytest.raises(DoesNotFitError, match=r"needs at least \d+ MiB") as caught:
        Engine.load(qwen3, EngineConfig(memory_bytes=1 << 20))
    assert "--memory" in (caught.value.hint or "")


def test_the_minimum_that_is_named_works_and_one_page_less_does_not(qwen3: Path) -> None:
    with CheckpointReader(qwen3) as reader:
        plan = plan_memory(reader.config, EngineConfig(), program=0)
        assert plan_memory(reader.config, EngineConfig(memory_bytes=plan.minimum), program=0).pool == plan.least_pool
        with pytest.raises(DoesNotFitError):
            plan_memory(reader.config, EngineConfig(memory_bytes=plan.minimum - 1), program=0)


@pytest.mark.parametrize("extra_mib", [0, 1, 7])
def test_nothing_is_planned_beyond_the_ceiling(qwen3: Path, extra_mib: int) -> None:
    ceiling = plan_for(qwen3).minimum + (extra_mib << 20)
    with CheckpointReader(qwen3) as reader:
        plan = plan_memory(reader.config, EngineConfig(memory_bytes=ceiling), program=0)
    assert plan.program + plan.dense + plan.workspace + plan.pool <= ceiling


def test_the_workspace_is_planned_for_the_context_that_is_promised(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "long", "olmoe", max_position_embeddings=200_000)
    with CheckpointReader(folder) as reader:
        small = plan_memory(reader.config, EngineConfig(), program=0)
        ceiling = small.ceiling + (500 << 20)
        large = plan_memory(reader.config, EngineConfig(memory_bytes=ceiling), program=0)
        gathered = 2 * 4 * reader.config.num_kv_heads * reader.config.head_dim
    assert large.context > 2 * small.context > 8192
    assert large.workspace - small.workspace >= gathered * (large.context - small.context)
    assert large.dense + large.workspace + large.pool <= ceiling < large.dense + large.workspace + large.pool + (64 << 10)


def test_cancelling_frees_every_page(qwen3: Path) -> None:
    engine = load_engine(qwen3, config=EngineConfig(max_batch_tokens=8))
    waiting, running = engine.submit(PROMPT, GREEDY), engine.submit([*PROMPT, 1], GREEDY)
    engine.step()
    engine.cancel(running)
    engine.check_integrity()
    engine.step()
    engine.cancel(waiting)
    engine.cancel(waiting)
    assert waiting.finish_reason == running.finish_reason == "cancelled"
    assert waiting.status is RequestStatus.FINISHED
    assert not engine.has_work and engine.step() == []
    engine.check_integrity()
    assert engine.snapshot().cached_kv_bytes == engine.snapshot().bytes_by_kind["kv"]
    assert_all_free(engine)


def test_closing_with_work_under_way_gives_everything_back(qwen3: Path) -> None:
    engine = load_engine(qwen3, 0.5)
    engine.submit(PROMPT, GREEDY)
    engine.step()
    assert_all_free(engine)
    engine.close()


def test_generate_cancels_when_its_reader_leaves(qwen3: Path) -> None:
    engine = load_engine(qwen3)
    tokens = engine.generate(PROMPT, GREEDY)
    first = [next(tokens), next(tokens)]
    tokens.close()
    assert first == resident_tokens(qwen3, PROMPT, 2)
    assert not engine.has_work


def test_counters_add_up(qwen3: Path) -> None:
    engine = load_engine(qwen3, 0.3, EngineConfig(context=64))
    request = answer(engine, PROMPT)
    snapshot = engine.snapshot()
    selections = (len(PROMPT) + 19) * engine.info.num_moe_layers * engine.info.top_k
    assert request.expert_uses == snapshot.expert_uses == selections
    assert request.expert_hits == snapshot.expert_hits < selections
    assert sum(snapshot.bytes_by_kind.values()) + snapshot.free_bytes + snapshot.tail_bytes == snapshot.pool_bytes
    assert sum(snapshot.resident_by_layer) == snapshot.resident_experts < snapshot.total_experts
    assert snapshot.to_dict()["hit_rate"] == request.expert_hits / request.expert_uses
    assert request.timings.generated_tokens == len(request.output_ids) == 20
    assert 0 < request.timings.prompt_seconds <= request.timings.ttft_seconds


def test_everything_resident_hits_always(qwen3: Path) -> None:
    engine = load_engine(qwen3, 1.0)
    assert answer(engine, PROMPT).expert_hits == engine.snapshot().expert_uses
    assert engine.snapshot().expert_bytes_read == 0


def test_sampled_tokens_do_not_depend_on_the_company(qwen3: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    alone = answer(load_engine(qwen3), PROMPT, params).output_ids
    engine = load_engine(qwen3)
    request, other = engine.submit(PROMPT, params), engine.submit([1, 2, 3], replace(params, seed=12))
    run_all(engine)
    assert request.output_ids == alone and len(other.output_ids) == 12


def test_a_checkpoint_full_of_nan_is_an_error_and_the_engine_survives_it(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "nan", "mixtral")
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"].fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    engine = load_engine(folder)
    request = engine.submit(PROMPT, GREEDY)
    for _ in range(2):  # a step that failed can be tried again: nothing counts as computed that gave no token
        with pytest.raises(CheckpointError, match="not numbers"):
            engine.step()
        engine.check_integrity()
    engine.cancel(request)
    assert_all_free(engine)


def test_an_expert_that_cannot_be_loaded_is_an_error_and_the_engine_can_be_closed(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine(qwen3, 0.5, EngineConfig(context=64, adjuster=lambda stats: Decision(0, 2, "free blocks to spare")))
    threads = threading.active_count()

    def fail(*args: object) -> None:
        raise CheckpointError("the shard is gone")

    monkeypatch.setattr(engine._parts.host, "expert", fail)
    engine._parts.residency.expand(2)
    assert threading.active_count() > threads
    with pytest.raises(CheckpointError, match="the shard is gone"):
        for _ in range(50):
            engine.submit([1], GREEDY)
            engine.step()
            time.sleep(0.01)
    engine.check_integrity()
    engine._parts.residency.expand(1)
    assert_all_free(engine)
    assert threading.active_count() == threads, "the loader's thread is still there"


@pytest.mark.parametrize("layout", ["per_expert", "fused"])
def test_no_file_is_opened_after_loading(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that is deleted while somebody talks is an error while loading or none at all."""
    folder = write_tiny_checkpoint(tmp_path / "m", "qwen3_moe", shards=3, layout=layout)
    expected = resident_tokens(folder, PROMPT, 20)
    engine = load_engine(folder, 0.0, EngineConfig(context=64, max_batch_tokens=8))

    def fail(*args: object) -> None:
        raise AssertionError("a file is read that was not needed while loading")

    monkeypatch.setattr(CheckpointReader, "view", fail)
    assert answer(engine, PROMPT).output_ids == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_batch_tokens": 0},
        {"max_sequences": 0},
        {"block_tokens": 0},
        {"context": 0},
        {"expert_offload_limit": -1},
        {"resident_share": 1.5},
        {"resident_share": float("nan")},
        {"decay": 1.0},
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        EngineConfig(**wrong)


@pytest.mark.parametrize("width", [48, 37])
def test_a_full_pool_is_whole_pages_and_holds_every_expert(width: int, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", "qwen3_moe", moe_intermediate_size=width, hidden_size=40, dtype=torch.bfloat16)
    for engine in (load_engine(folder), Engine.load(folder, EngineConfig(pool_bytes=1 << 30))):
        assert engine.snapshot().resident_experts == engine.snapshot().total_experts
        assert_all_free(engine)


def test_the_floor_of_resident_experts(qwen3: Path) -> None:
    assert plan_for(qwen3).floor == 1  # min(2 * 3, ceil(8 / 8))
    assert plan_for(qwen3, EngineConfig(expert_offload_limit=3)).floor == 5
    engine = load_engine(qwen3, 0.0, EngineConfig(expert_offload_limit=3))
    answer(engine, PROMPT, replace(GREEDY, max_tokens=100))
    assert min(engine.snapshot().resident_by_layer) >= 5


def test_the_threads_do_not_matter_for_greedy_text(qwen3: Path) -> None:
    threads = torch.get_num_threads()
    try:
        texts = []
        for count in (1, 2):
            torch.set_num_threads(count)
            texts.append(answer(load_engine(qwen3, 0.3), PROMPT).output_ids)
        assert texts[0] == texts[1]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_closed_engine_answers_nothing(device: Device, qwen3: Path) -> None:
    engine = load_engine(qwen3, config=EngineConfig(device=device))
    engine.close()
    with pytest.raises(UsageError, match="closed"):
        engine.submit(PROMPT, GREEDY)
    assert not engine.has_work and engine.step() == []
    engine.close()


@pytest.mark.parametrize(("device", "family"), [("cpu", "qwen3_moe"), ("cpu", "qwen3_5_moe"), ("emulated", "qwen3_moe")])
def test_ctrl_c_in_a_step_leaves_an_engine_that_goes_on(device: Device, family: str, tmp_path: Path) -> None:
    """Wherever it comes: between calls that move pages it waits, and a forward pass that is torn is computed again."""
    folder, pressed = write_tiny_checkpoint(tmp_path / "m", family), 0
    engine = load_engine(folder, 0.3, EngineConfig(device=device, context=128, max_batch_tokens=12, device_batch_tokens=12))
    request = engine.submit(PROMPT, replace(GREEDY, max_tokens=60))
    for nth in range(1, 400, 9):
        calls = 0

        def press(frame: FrameType, event: str, arg: object, nth: int = nth) -> None:
            nonlocal calls
            if "engine" in frame.f_code.co_filename:
                calls += 1
                if calls == nth:
                    signal.raise_signal(signal.SIGINT)

        before = sys.gettrace()
        try:
            sys.settrace(press)
            engine.step()
        except KeyboardInterrupt:
            pressed += 1
        finally:
            sys.settrace(before)
        engine.check_integrity()
    assert pressed > 5
    run_all(engine)
    assert request.output_ids == resident_tokens(folder, PROMPT, 60)
    assert_all_free(engine)
