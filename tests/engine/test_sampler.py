from __future__ import annotations

import math

import pytest
import torch

from rimuru_cli.engine.request import SamplingParams
from rimuru_cli.engine.sampler import SamplerState, candidates, sample
from rimuru_models.errors import CheckpointError, RimuruError

VOCAB = 700  # more than the first look at the nucleus takes


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def greedy(**kwargs: float) -> SamplingParams:
    return SamplingParams(temperature=0.0, **kwargs)  # type: ignore[arg-type]


def test_greedy_is_argmax_and_lowest_id_on_ties() -> None:
    logits = logits_of(0, rows=3, vocab=49152)
    logits[0, [7, 40000, 123]] = 99.0
    logits[1, [49151, 31]] = 99.0
    states = [SamplerState(greedy()) for _ in range(3)]
    assert sample(logits, states) == [7, 31, int(logits[2].argmax())]
    mixed = [SamplerState(greedy(presence_penalty=0.5)), *states[1:]]
    assert sample(logits, mixed) == [7, 31, int(logits[2].argmax())]
    flat = torch.zeros(2, 5)
    assert sample(flat, states[:2]) == [0, 0]


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities [vocab] that `candidates` stands for."""
    values, ids = candidates(logits, params)
    full = torch.full_like(logits, -math.inf)
    full[torch.arange(logits.numel()) if ids is None else ids] = values
    return full.softmax(-1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=3.5),
        SamplingParams(top_k=1),
        SamplingParams(top_k=40),
        SamplingParams(top_k=100_000),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.999, temperature=5.0),
        SamplingParams(top_p=0.0),
        SamplingParams(min_p=0.05),
        SamplingParams(min_p=1.0),
        SamplingParams(min_p=0.001, temperature=4.0),
        SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02),
        SamplingParams(temperature=1.3, top_p=0.8, min_p=0.1),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_filters_equal_transformers(params: SamplingParams, seed: int) -> None:
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = logits_of(seed)
    steps = [process.TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        steps.append(process.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(process.TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(process.MinPLogitsWarper(params.min_p))
    theirs = logits
    for step in steps:
        theirs = step(None, theirs)
    expected = theirs[0].softmax(-1)
    ours = distribution(logits[0], params)
    assert torch.equal(ours > 0, expected > 0)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)


def test_top_k_keeps_ties() -> None:
    logits = torch.tensor([3.0, 1.0, 2.0, 2.0, 2.0])
    assert (distribution(logits, SamplingParams(top_k=2)) > 0).tolist() == [True, False, True, True, True]


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = logits_of(1)
    prompt, answer = [5, 9, 5, 600, 0], [9, 17, 17]
    state = SamplerState(SamplingParams(repetition_penalty=penalty), prompt)
    for token in answer:
        state.observe(token)
    expected = process.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + answer]), logits.clone())[0]
    before = logits.clone()
    torch.testing.assert_close(state.penalise(logits[0]), expected)
    assert torch.equal(logits, before)


def test_presence_and_frequency_count_the_answer_only() -> None:
    logits = logits_of(2)[0]
    answer = [3, 3, 8, 3, *range(100, 300)]
    state = SamplerState(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.0), [1, 2, 3])
    for token in answer:
        state.observe(token)
    expected = logits.clone()
    for token in set(answer):
        expected[token] -= 0.5 + 0.25 * answer.count(token)
    torch.testing.assert_close(state.penalise(logits), expected)


def test_all_penalties_together_and_greedy() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, 1.8]])
    state = SamplerState(greedy(repetition_penalty=1.5, presence_penalty=1.0), [1])
    assert [sample(logits, [state])[0] for _ in range(3)] == [0, 3, 1]


def test_seed_repeats_and_neighbours_do_not_matter() -> None:
    params = SamplingParams(temperature=1.2, top_p=0.95, seed=7)
    alone = SamplerState(params)
    rows = [logits_of(i) for i in range(12)]
    expected = [sample(row, [alone])[0] for row in rows]
    assert len(set(expected)) > 3
    crowded = SamplerState(params)
    others = [SamplerState(greedy()), SamplerState(SamplingParams(seed=7)), SamplerState(SamplingParams(repetition_penalty=1.2), [1])]
    actual = []
    for step, row in enumerate(rows):
        place = step % 4
        states = [*others[:place], crowded, *others[place:]]
        batch = logits_of(100 + step, rows=4)
        batch[place] = row[0]
        actual.append(sample(batch, states)[place])
    assert actual == expected


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.1, 0.6, 0.3, 1e-30]]).log()
    state = SamplerState(SamplingParams(seed=3))
    counts = [0] * 4
    for _ in range(4000):
        counts[sample(logits, [state])[0]] += 1
    assert counts[3] == 0
    for count, p in zip(counts, (0.1, 0.6, 0.3), strict=False):
        assert abs(count - 4000 * p) < 150  # five standard deviations


def test_cut_off_tokens_are_never_drawn() -> None:
    logits = logits_of(5, scale=0.1)
    state = SamplerState(SamplingParams(top_k=3, seed=1))
    allowed = set(logits[0].topk(3).indices.tolist())
    assert {sample(logits, [state])[0] for _ in range(200)} == allowed


def test_seeds() -> None:
    assert SamplerState(SamplingParams()).seed != SamplerState(SamplingParams()).seed
    logits = logits_of(3)
    for seed in (0, -1, 2**63, 2**64 + 5, 10**30):
        first, second = (SamplerState(SamplingParams(seed=seed)) for _ in range(2))
        assert [sample(logits, [first])[0] for _ in range(5)] == [sample(logits, [second])[0] for _ in range(5)]


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-300, 1e300])
def test_extreme_temperatures(temperature: float) -> None:
    logits = logits_of(4)
    token = sample(logits, [SamplerState(SamplingParams(temperature=temperature, seed=1))])[0]
    assert 0 <= token < VOCAB
    if temperature < 1:
        assert token == int(logits.argmax())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [greedy(), SamplingParams()])
def test_non_finite_logits(bad: float, params: SamplingParams) -> None:
    logits = logits_of(0, rows=2)
    logits[1, 17] = bad
    with pytest.raises(CheckpointError, match="not numbers") as info:
        sample(logits, [SamplerState(params), SamplerState(params)])
    assert isinstance(info.value, RimuruError)


def test_huge_finite_logits_are_fine() -> None:
    logits = torch.full((1, VOCAB), 3e38)
    logits[0, 5] = 3.1e38
    assert sample(logits, [SamplerState(greedy())]) == [5]


def test_no_rows() -> None:
    assert sample(torch.zeros(0, VOCAB), []) == []
