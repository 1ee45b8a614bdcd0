"""What is computed again of a text that was seen before, in models whose states belong to one length of it; the text stays the same."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GREEDY, answer, assert_all_free, load_engine, resident_tokens, run_all
from hybrids import write_hybrid
from hypothesis import given
from hypothesis import strategies as st

from rimuru_cli.engine.bookmarks import TAIL, places_to_keep
from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.engine import Engine

SHORT = replace(GREEDY, max_tokens=12)


@pytest.fixture(scope="module", params=["qwen3_5_moe", "granitemoehybrid"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("reuse"), request.param)


DEVICES = [
    "cpu",
    "emulated",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


@pytest.fixture(params=DEVICES)
def engine(request: Any, folder: Path) -> Any:
    """With room for all experts, a long chat and many states."""
    config = EngineConfig(max_batch_tokens=64, device_batch_tokens=64, device=request.param)
    engine = (
        load_engine(folder, 1.0, config)
        if request.param == "cpu"
        else Engine.load(folder, replace(config, pool_bytes=16 << 20, poison=True))
    )
    yield engine
    assert_all_free(engine)


def words(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(128) for _ in range(count)]


def ask(engine: Engine, folder: Path, prompt: list[int]) -> tuple[int, list[int]]:
    """Tokens that were not computed again, and the answer, which is checked."""
    request = answer(engine, prompt, SHORT)
    assert request.output_ids == resident_tokens(folder, prompt, 12)
    assert request.timings.computed_tokens == len(prompt) + 11 - request.timings.cached_tokens
    return request.timings.cached_tokens, request.output_ids


def whole(engine: Engine, tokens: int) -> int:
    """As many of them as fill whole blocks."""
    return tokens // engine.info.block_tokens * engine.info.block_tokens


def test_the_next_turn_computes_only_what_is_new(engine: Engine, folder: Path) -> None:
    text, expected = words(70, 1), 0
    for turn in range(4):
        cached, said = ask(engine, folder, text)
        assert cached == expected
        # the last token of an answer was sampled but never computed
        expected = len(text) + len(said) - 1
        text = [*text, *said, *words(5 + 9 * turn, turn)]


def test_an_answer_asked_for_again(engine: Engine, folder: Path) -> None:
    prompt = words(70, 1)
    first, said = ask(engine, folder, prompt)
    assert first == 0
    again, same = ask(engine, folder, prompt)
    assert again == whole(engine, 70 - TAIL) >= 48 and same == said


def test_a_thought_left_out_of_the_next_prompt(engine: Engine, folder: Path) -> None:
    """What opens an answer is not there the next time: the state near the end of the prompt still is of use."""
    prompt = words(70, 1)
    _, said = ask(engine, folder, prompt)
    second = [*prompt[:-3], *said[4:], *words(8, 2)]
    assert ask(engine, folder, second)[0] == whole(engine, 70 - TAIL)
    # and now a state lies where the two parted, at the last whole block
    assert ask(engine, folder, [*prompt[:-3], *words(20, 3)])[0] == whole(engine, 67) == 64


def test_editing_the_last_message_restarts_from_the_nearest_checkpoint(engine: Engine, folder: Path) -> None:
    opening = words(40, 1)
    _, said = ask(engine, folder, opening)
    turn = [*opening, *said]
    first = ask(engine, folder, [*turn, *words(60, 2)])
    assert first[0] == len(turn) - 1
    message = [*words(37, 2), *words(20, 3)]
    assert ask(engine, folder, [*turn, *message])[0] == len(turn) - 1, "nothing nearer was kept yet"
    parted = len(turn) + 37
    assert ask(engine, folder, [*turn, *words(37, 2), *words(20, 4)])[0] == whole(engine, parted)


def test_long_prompts_leave_states_on_the_way(engine: Engine, folder: Path) -> None:
    engine._scheduler.interval = 50  # type: ignore[attr-defined]
    prompt = words(230, 1)
    assert ask(engine, folder, prompt)[0] == 0
    kept = sorted(bookmark.length for bookmark in engine._parts.recurrent.bookmarks.all())  # type: ignore[union-attr]
    assert kept == [48, 96, 144, 192, whole(engine, 230 - TAIL), 241]
    for shared, expected in ((100, 96), (97, 96), (49, 48), (30, 0)):
        assert ask(engine, folder, [*prompt[:shared], *words(30, shared)])[0] == expected


def test_the_same_prompt_twice_at_once(engine: Engine, folder: Path) -> None:
    prompt = words(70, 1)
    requests = [engine.submit(prompt, SHORT) for _ in range(3)]
    run_all(engine)
    assert [r.output_ids for r in requests] == [resident_tokens(folder, prompt, 12)] * 3
    lengths = [c.length for c in engine._parts.recurrent.bookmarks.all()]  # type: ignore[union-attr]
    assert sorted(lengths) == [whole(engine, 70 - TAIL), 81], "what is the same is kept once"


def test_as_many_are_kept_as_are_allowed_and_the_oldest_goes_first(folder: Path) -> None:
    engine = load_engine(folder, 0.4, EngineConfig(max_batch_tokens=64, context=200))
    recurrent = engine._parts.recurrent
    assert recurrent is not None
    most = recurrent.room.most_kept
    for seed in range(most + 2):
        ask(engine, folder, words(30, seed))
        assert len(recurrent.bookmarks) <= most
    texts = [[*words(30, seed), *words(9, 99)] for seed in (0, most + 1)]
    assert ask(engine, folder, texts[0])[0] == 0, "the first one is long gone"
    assert ask(engine, folder, texts[1])[0] == whole(engine, 30 - TAIL)
    assert_all_free(engine)


def test_states_that_are_kept_give_way(folder: Path) -> None:
    """To a lower ceiling, and to a sequence that needs the room."""
    engine = load_engine(folder, 1.0, EngineConfig(max_batch_tokens=64, context=400))
    recurrent = engine._parts.recurrent
    assert recurrent is not None
    for seed in range(3):
        ask(engine, folder, words(60, seed))
    assert len(recurrent.bookmarks) == 6
    engine.set_memory(engine.least_memory)
    engine.check_integrity()
    before = len(recurrent.bookmarks)
    prompt = words(engine.info.context_limit - 13, 7)
    request, fewest = engine.submit(prompt, SHORT), before
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        fewest = min(fewest, len(recurrent.bookmarks))
    assert request.output_ids == resident_tokens(folder, prompt, 12)
    assert fewest < before <= 6
    assert_all_free(engine)


def test_a_preempted_sequence_goes_on_where_it_was(folder: Path) -> None:
    engine = load_engine(folder, 1.0, EngineConfig(max_batch_tokens=64))
    first, second = (engine.submit(words(40, seed), replace(GREEDY, max_tokens=30)) for seed in (1, 2))
    for _ in range(8):
        engine.step()
    engine._scheduler._preempt(engine._scheduler.running[-1])
    run_all(engine)
    for request, seed in ((first, 1), (second, 2)):
        assert request.output_ids == resident_tokens(folder, words(40, seed), 30)
        assert request.timings.computed_tokens == 40 + 29, "nothing was computed twice"
    assert_all_free(engine)


def test_text_that_is_forgotten_while_it_is_said_again(engine: Engine, folder: Path) -> None:
    """Blocks of its beginning are there, but no states: it is computed again beside them, and goes on when they are given up."""
    text = words(90, 5)
    ask(engine, folder, text)
    recurrent = engine._parts.recurrent
    assert recurrent is not None
    recurrent.bookmarks.forget_all()
    request = engine.submit([*text, *words(20, 6)], replace(GREEDY, max_tokens=20))
    while not request.output_ids:
        engine.step()
        engine.check_integrity()
    assert request.timings.cached_tokens == 0
    engine.forget()
    engine.check_integrity()
    run_all(engine)
    assert request.output_ids == resident_tokens(folder, [*text, *words(20, 6)], 20)


def test_recording_starts_from_nothing(engine: Engine, folder: Path) -> None:
    prompt = words(70, 1)
    ask(engine, folder, prompt)
    with engine.recording(lambda *args: None):
        assert ask(engine, folder, prompt)[0] == 0


@given(
    first=st.integers(0, 300),
    more=st.integers(1, 300),
    parted=st.integers(0, 700),
    block=st.sampled_from([1, 4, 16]),
    interval=st.integers(1, 90),
)
def test_places_to_keep(first: int, more: int, parted: int, block: int, interval: int) -> None:
    last = first + more
    places = places_to_keep(first, last, parted, block, interval)
    assert places == sorted(set(places)) and all(first < place < last and place % block == 0 for place in places)
    gap = max(1, interval // block) * block
    stops = [first, *places, last]
    assert all(after - before <= gap + block for before, after in pairwise(stops)), "no long stretch without one"
    near = (last - TAIL) // block * block
    assert near <= first or near in places


def test_what_is_not_kept_for_lack_of_room_is_counted(folder: Path) -> None:
    engine = load_engine(folder, 0.0, EngineConfig(max_batch_tokens=64, context=128))
    prompt = words(engine.info.context_limit - 13, 3)
    request = answer(engine, prompt, SHORT)
    assert request.output_ids == resident_tokens(folder, prompt, 12)
    recurrent = engine._parts.recurrent
    assert recurrent is not None
    assert engine.snapshot().states_not_kept == recurrent.room.skipped > 0
    assert engine.snapshot().to_dict()["states_not_kept"] > 0
    roomy = load_engine(folder, 1.0, EngineConfig(max_batch_tokens=64))
    answer(roomy, prompt, SHORT)
    assert roomy.snapshot().states_not_kept == 0
    for each in (engine, roomy):
        assert_all_free(each)


def test_nothing_is_given_up_for_a_state_that_cannot_be_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine(folder, 0.4, EngineConfig(max_batch_tokens=64, context=200))
    recurrent = engine._parts.recurrent
    assert recurrent is not None
    room, seed = recurrent.room, 0
    while len(recurrent.bookmarks) < room.most_kept:
        ask(engine, folder, words(30, seed))
        seed += 1
    kept = recurrent.bookmarks.all()
    # What runs leaves no room for another one, whatever else goes.
    monkeypatch.setattr(room, "held", lambda *_: (0, 1 << 20))
    assert not room.for_bookmark() and recurrent.bookmarks.all() == kept and room.skipped
    monkeypatch.undo()
    assert room.for_bookmark() and len(recurrent.bookmarks) < room.most_kept
    assert_all_free(engine)
