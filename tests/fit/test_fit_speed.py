"""The estimates beside what was measured (docs/results): a cost model that nobody has compared with a machine is a guess."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from released_hybrids import RELEASED
from released_shapes import QWEN3_30B

from rimuru_cli.fit.locality import DRAWN, RECORDED, likely_hits, recorded_hits, uniform_hits
from rimuru_cli.fit.machine import Gpu, Machine
from rimuru_cli.fit.placement import Placement, place_on_cpu, place_on_gpu
from rimuru_cli.fit.shape import shape_of
from rimuru_cli.fit.speed import decode_range, gpu_token_seconds, prompt_range
from rimuru_models.config import ModelConfig

GIB = 1 << 30
QWEN = ModelConfig.from_dict(QWEN3_30B)
# One H200 as docs/results/2026-11-30-qwen3-30b-a3b.md has it: 4.3 TB/s copied, 54.4 GB/s over the link.
H200 = Gpu("NVIDIA H200", 143_771 << 20, 0, 4300 * 0.93, 800.0, 54.4)
HOST = Machine(H200, None, 192 * GIB, 160 * GIB, 74.0, 16)


def placed(cap_gib: int | None, top_k: int) -> tuple[Placement, Machine]:
    gpu = replace(H200, cap_bytes=None if cap_gib is None else cap_gib * GIB)
    return place_on_gpu(shape_of(replace(QWEN, top_k=top_k), None), gpu, HOST.ram_free_bytes), replace(HOST, gpu=gpu)


@pytest.mark.parametrize(("cap", "share"), [(16, 0.216), (24, 0.364), (32, 0.512), (None, 1.0)])
def test_residents_are_those_that_the_engine_had(cap: int | None, share: float) -> None:
    placement, _ = placed(cap, 8)
    residents = placement.residents(0)
    assert residents is not None
    assert residents / placement.shape.num_experts == pytest.approx(share, abs=0.002)


@pytest.mark.parametrize(("cap", "measured"), [(16, 71.5), (24, 137.4), (32, 205.4), (None, 343.4)])
def test_generation_with_recorded_routing(cap: int | None, measured: float) -> None:
    """The recording has six experts a token; the model's own eight cost more, at 16 GiB, where most are fetched, by nearly a third."""
    rates, own = (decode_range(*placed(cap, top_k), context=100) for top_k in (6, 8))
    assert rates is not None and own is not None
    assert rates.high == pytest.approx(measured, rel=0.25)
    assert rates.high * 6 / 8 * 0.99 <= own.high < rates.high
    if cap != 16:
        assert own.high == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(("cap", "measured"), [(16, 17.0), (24, 20.7), (32, 26.4), (None, 313.9)])
def test_generation_with_uniform_routing(cap: int | None, measured: float) -> None:
    rates = decode_range(*placed(cap, 8), context=100)
    assert rates is not None
    assert rates.low == pytest.approx(measured, rel=0.25)


PROMPTS = [
    (16, 512, 599.0),
    (24, 512, 727.0),
    (32, 512, 935.0),
    (None, 512, 15769.0),  # 12,346 on a slower host
    (16, 4096, 4680.0),
    (24, 4096, 5742.0),
    (32, 4096, 7319.0),
    (None, 4096, 60467.0),
]


@pytest.mark.parametrize(("cap", "tokens", "measured"), PROMPTS)
def test_prompts(cap: int | None, tokens: int, measured: float) -> None:
    rates = prompt_range(*placed(cap, 8), tokens=tokens)
    assert rates is not None
    assert rates.high == pytest.approx(measured, rel=0.25)
    assert rates.low == pytest.approx(measured, rel=0.25)


HYBRID = ModelConfig.from_dict(RELEASED["qwen3.5-35b"])


def placed_hybrid(cap_gib: int | None) -> tuple[Placement, Machine]:
    gpu = replace(H200, cap_bytes=None if cap_gib is None else cap_gib * GIB)
    return place_on_gpu(shape_of(HYBRID, None), gpu, HOST.ram_free_bytes), replace(HOST, gpu=gpu)


@pytest.mark.parametrize(
    ("cap", "share", "hits", "likely", "uniform"),
    [(16, 0.153, 0.721, 69.5, 27.4), (24, 0.286, 0.838, 101.9, 31.6), (32, 0.423, 0.908, 140.8, 37.1), (None, 1.0, 1.0, 281.5, 286.1)],
)
def test_generation_of_a_hybrid(cap: int | None, share: float, hits: float, likely: float, uniform: float) -> None:
    """docs/results: qwen3.5-35b-a3b, whose likely routing was made up: 256 experts, and as habitual as the recorded one of 128."""
    placement, machine = placed_hybrid(cap)
    residents = placement.residents(0)
    assert residents is not None and residents / placement.shape.num_experts == pytest.approx(share, abs=0.012)
    assert machine.gpu is not None
    assert 1 / gpu_token_seconds(placement, machine.gpu, 100, hits) == pytest.approx(likely, rel=0.25)
    rates = decode_range(placement, machine, context=100)
    assert rates is not None and rates.low == pytest.approx(uniform, rel=0.25)
    assert rates.high == pytest.approx(likely, rel=0.08)


@pytest.mark.parametrize(
    ("cap", "tokens", "measured"),
    [
        (16, 512, 500.6),
        (24, 512, 593.1),
        (32, 512, 728.4),
        (None, 512, 7069.0),
        (16, 4096, 3987.0),
        (24, 4096, 4721.0),
        (32, 4096, 5776.0),
        (None, 4096, 58105.0),
    ],
)
def test_prompts_of_a_hybrid(cap: int | None, tokens: int, measured: float) -> None:
    rates = prompt_range(*placed_hybrid(cap), tokens=tokens)
    assert rates is not None
    assert rates.high == pytest.approx(measured, rel=0.25)
    assert rates.low == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(("share", "measured"), [(0.216, 0.795), (0.364, 0.920), (0.512, 0.963), (1.0, 1.0)])
def test_recorded_hits_are_those_that_the_gpu_counted(share: float, measured: float) -> None:
    assert recorded_hits(share) == pytest.approx(measured, abs=0.005)


@pytest.mark.parametrize(("share", "measured"), [(0.1526, 0.7205), (0.286, 0.8379), (0.4225, 0.9076), (1.0, 1.0)])
def test_hits_of_many_experts_are_those_that_the_gpu_counted(share: float, measured: float) -> None:
    assert likely_hits(share, 256) == pytest.approx(measured, abs=0.015)
    assert likely_hits(share, 512) == likely_hits(share, 256)
    assert likely_hits(share, 128) == recorded_hits(share) == likely_hits(share, 60)


def test_uniform_hits_are_those_that_the_gpu_counted() -> None:
    assert uniform_hits(0.364) == pytest.approx(0.355, abs=0.01)


@settings(deadline=None)
@given(st.floats(-1, 2), st.floats(-1, 2))
def test_more_residents_never_miss_more(a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert 0 <= recorded_hits(low) <= recorded_hits(high) <= 1
    assert 0 <= uniform_hits(low) <= uniform_hits(high) <= 1


@pytest.mark.parametrize(("table", "num_experts"), [(RECORDED, 128), (DRAWN, 256)], ids=["recorded", "drawn"])
def test_the_tables_of_hits_rise_from_nothing_to_all(table: tuple[tuple[float, float], ...], num_experts: int) -> None:
    assert table[0] == (0.0, 0.0) and table[-1] == (1.0, 1.0)
    assert list(table) == sorted(table)
    assert [hit for _, hit in table] == sorted(hit for _, hit in table)
    assert all(likely_hits(share, num_experts) == hit for share, hit in table)


@settings(deadline=None)
@given(st.integers(14, 40), st.integers(0, 131_072), st.floats(1, 60))
def test_ranges_are_ranges(cap: int, context: int, link: float) -> None:
    placement, machine = placed(cap, 8)
    assert machine.gpu is not None
    machine = replace(machine, gpu=replace(machine.gpu, link_gb_per_s=link))
    for rates in (decode_range(placement, machine, context), prompt_range(placement, machine, max(1, context))):
        if rates is not None:
            assert 0 < rates.low <= rates.high
    assert (decode_range(placement, machine, context) is None) == (context > placement.plan.context)


@settings(deadline=None)
@given(st.integers(14, 39), st.integers(0, 12_000))
def test_more_memory_is_never_slower(cap: int, context: int) -> None:
    less, more = (decode_range(*placed(one, 8), context=context) for one in (cap, cap + 1))
    if less is not None:
        assert more is not None
        assert less.low <= more.low and less.high <= more.high


@settings(deadline=None)
@given(st.floats(1, 100), st.floats(1, 100))
def test_a_faster_link_is_never_slower(a: float, b: float) -> None:
    placement, machine = placed(24, 8)
    assert machine.gpu is not None
    slow, fast = (replace(machine, gpu=replace(machine.gpu, link_gb_per_s=rate)) for rate in sorted((a, b)))
    for estimate in (decode_range, prompt_range):
        first, second = estimate(placement, slow, 4096), estimate(placement, fast, 4096)
        assert first is not None and second is not None
        assert first.low <= second.low * 1.0001 and first.high <= second.high * 1.0001


def test_a_longer_conversation_is_slower() -> None:
    placement, machine = placed(32, 8)
    rates = [decode_range(placement, machine, context) for context in (0, 8192, 32768, 131072)]
    highs = [rate.high for rate in rates if rate is not None]
    assert len(highs) == 4
    assert highs == sorted(highs, reverse=True) and highs[0] > highs[-1]


def test_the_cpu_reads_what_does_not_fit_the_file_cache_from_the_disk() -> None:
    machine = Machine(None, "none", 512 * GIB, 460 * GIB, 40.0, 16)
    shape = shape_of(QWEN, None)
    roomy = place_on_cpu(shape, machine.ram_free_bytes)
    tight = replace(roomy, ram_free_bytes=roomy.plan.ceiling)
    small = place_on_cpu(shape, 60 * GIB)
    fast, slow = (decode_range(replace(small, ram_free_bytes=free), machine, 0) for free in (460 * GIB, small.plan.ceiling))
    assert fast is not None and slow is not None and slow.high < fast.high
    assert decode_range(tight, machine, 0) == decode_range(roomy, machine, 0), "all experts are resident: nothing is missed"


def test_the_cpu_estimate_contains_what_the_demonstration_model_did() -> None:
    # docs/results/2026-11-30-cpu-decode.md: 20.7 tok/s fully resident, on 2 processors that stream 22 to 40 GB/s.
    config = ModelConfig.from_dict(
        {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 48,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 20,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        }
    )
    for rate, slack in ((22.0, 1.1), (40.0, 1.0)):
        machine = Machine(None, "none", 24 * GIB, 20 * GIB, rate, 2)
        rates = decode_range(place_on_cpu(shape_of(config, None), machine.ram_free_bytes), machine, 40)
        assert rates is not None
        assert rates.low < 20.7 < rates.high * slack
