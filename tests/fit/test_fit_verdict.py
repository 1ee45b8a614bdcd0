from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback_models import model_files
from released_hybrids import RELEASED
from released_shapes import MIXTRAL, OLMOE, QWEN1_5_MOE, QWEN3_30B

from rimuru_cli.fit import check_fit
from rimuru_cli.fit.machine import Gpu, Machine
from rimuru_cli.fit.pages import page_facts
from rimuru_cli.fit.shape import shape_of
from rimuru_cli.hub.fit import FitCheck
from rimuru_models.config import ModelConfig
from rimuru_models.errors import CheckpointError
from rimuru_models.index import open_index

MIB, GIB = 1 << 20, 1 << 30
QWEN = ModelConfig.from_dict(QWEN3_30B)
RTX_4090 = Gpu("NVIDIA GeForce RTX 4090", 24 * GIB, 700 * MIB, 836.0, 165.0, 25.0)
DESKTOP = Machine(RTX_4090, None, 64 * GIB, 58 * GIB, 50.0, 16, ("the link makes 25 GB/s",))
LAPTOP = Machine(None, "no NVIDIA driver answers here", 16 * GIB, 12 * GIB, 30.0, 8)


def test_it_is_what_the_hub_asks_for() -> None:
    check: FitCheck = check_fit
    assert check("x", QWEN).report["model"] == "x"


def test_a_gaming_machine() -> None:
    verdict = check_fit("Qwen/Qwen3-30B-A3B", QWEN, machine=DESKTOP)
    report = verdict.report
    assert (verdict.runs, verdict.device, verdict.exit_code, verdict.problem, verdict.hint) == (True, "gpu", 0, None, None)
    assert verdict.headline.startswith("runs on the GPU (NVIDIA GeForce RTX 4090): 3") and verdict.headline.endswith("tokens/s")
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    on_card = sum(row["bytes"] for row in report["places"] if row["place"] == "VRAM")
    assert 0 <= report["memory"]["ceiling_bytes"] - on_card < 64 * MIB, "the parts add up to the ceiling, but for the last pages"
    contexts = report["contexts"]
    shares = [row["resident_share"] for row in contexts if row["fits"]]
    assert shares == sorted(shares, reverse=True) and len(shares) >= 3
    assert "only config.json was read: the weights are taken to be bfloat16" in report["assumptions"]
    assert "the link makes 25 GB/s" in report["assumptions"]
    assert report["precision"] == "BF16" and report["parameters"] == 30_532_122_624


def test_what_the_likely_figure_assumes_depends_on_the_number_of_experts() -> None:
    def assumed(config: ModelConfig) -> str:
        return next(line for line in check_fit("x", config, machine=DESKTOP).report["assumptions"] if line.startswith("low:"))

    assert "in a conversation recorded on Qwen3-30B-A3B (top 6 of 128" in assumed(QWEN)
    assert "a routing made up for 256 experts" in assumed(ModelConfig.from_dict(RELEASED["qwen3.5-35b"]))


def test_a_machine_without_the_memory() -> None:
    verdict = check_fit("big", QWEN, machine=LAPTOP)
    assert (verdict.runs, verdict.device, verdict.exit_code) == (False, None, 6)
    assert verdict.headline.startswith("does not run here: The model needs at least")
    assert not verdict.headline.endswith(".")
    assert verdict.problem is not None and "No GPU is used: no NVIDIA driver answers here." in verdict.problem
    assert verdict.hint is not None
    assert verdict.report["runs"] is False and verdict.report["problem"] == verdict.problem
    assert verdict.report.keys() == check_fit("big", QWEN, machine=DESKTOP).report.keys(), "programs find the same fields"
    assert (verdict.report["largest_context"], verdict.report["contexts"]) == (0, [])


def test_a_small_card_beside_much_memory_says_why_it_is_not_used() -> None:
    machine = replace(DESKTOP, gpu=replace(RTX_4090, total_bytes=8 * GIB), ram_free_bytes=120 * GIB)
    verdict = check_fit("x", QWEN, machine=machine)
    assert verdict.device == "cpu" and "device memory" in verdict.report["gpu_not_used"]


def test_little_main_memory_leaves_experts_on_the_disk_and_costs_speed() -> None:
    rich, poor = (check_fit("x", QWEN, machine=replace(DESKTOP, ram_free_bytes=free * GIB)).report for free in (120, 24))
    assert [row["place"] for row in poor["places"]][-1] in ("disk", "RAM (file cache), disk")
    assert poor["contexts"][0]["decode_tokens_per_s_high"] < rich["contexts"][0]["decode_tokens_per_s_high"] / 2
    assert poor["prompts"][0]["tokens_per_s_high"] < rich["prompts"][0]["tokens_per_s_high"] / 2
    assert any("read from the disk at 1.5 GB/s" in line for line in poor["assumptions"])
    assert not any("disk" in line for line in rich["assumptions"])


def test_a_model_that_uses_most_experts_at_every_token_says_so() -> None:
    many = replace(QWEN, top_k=100)
    assert any("expect the lower part" in line for line in check_fit("x", many, machine=DESKTOP).report["assumptions"])
    assert not any("expect the lower part" in line for line in check_fit("x", QWEN, machine=DESKTOP).report["assumptions"])


def test_headers_decide_the_precision(tmp_path: Path) -> None:
    for name, data in model_files(extra=False).items():
        (tmp_path / name).write_bytes(data)
    config = ModelConfig.from_dir(tmp_path)
    index = open_index(tmp_path)
    report = check_fit("x", config, index, machine=LAPTOP).report
    assert (report["precision"], report["stored_bytes"]) == ("F32", index.total_bytes)
    assert not any("bfloat16" in line for line in report["assumptions"])
    with pytest.raises(CheckpointError):
        check_fit("x", replace(config, hidden_size=64), index, machine=LAPTOP)


@settings(deadline=None, max_examples=60)
@given(
    values=st.sampled_from([QWEN3_30B, QWEN1_5_MOE, OLMOE, MIXTRAL, *RELEASED.values()]),
    vram=st.integers(1, 200),
    used=st.integers(0, 8),
    ram=st.integers(1, 400),
    cap=st.none() | st.integers(1, 200),
    link=st.floats(0.1, 100),
    card=st.booleans(),
)
def test_any_machine_gets_an_answer(
    values: dict[str, Any], vram: int, used: int, ram: int, cap: int | None, link: float, card: bool
) -> None:
    gpu = Gpu("card", vram * GIB, min(used, vram) * GIB, 800.0, 80.0, link, None if cap is None else min(cap, vram) * GIB) if card else None
    machine = Machine(gpu, None if card else "none", 2 * ram * GIB, ram * GIB, 20.0, 8)
    verdict = check_fit("x", ModelConfig.from_dict(values), machine=machine)
    assert verdict.exit_code == (0 if verdict.runs else 6)
    assert (verdict.problem is None) == verdict.runs
    json.dumps(verdict.report, allow_nan=False)
    if not verdict.runs:
        return
    report = verdict.report
    assert report["memory"]["minimum_bytes"] <= report["memory"]["ceiling_bytes"]
    assert all(row["bytes"] >= 0 for row in report["places"])
    for row in report["contexts"]:
        assert row["fits"] == (row["context"] <= report["largest_context"]) == (row["limit"] is None)
        if row["fits"]:
            assert 0 < row["resident_share"] <= 1
            assert 0 < row["decode_tokens_per_s_low"] <= row["decode_tokens_per_s_high"]
            assert row["resident_experts"] * report["memory"]["expert_bytes"] + row["conversation_bytes"] <= report["memory"]["pool_bytes"]


@pytest.mark.parametrize(
    ("name", "page", "state", "huge", "kv_token"),
    [
        ("qwen3.5-35b-a3b", 2_097_152, 2_097_152, 2_097_152, 20_480),
        ("qwen3.5-122b-a10b", 6_291_456, 4_194_304, 12_582_912, 24_576),
        ("qwen3.5-397b-a17b", 8_388_608, 4_194_304, 8_388_608, 30_720),
        ("qwen3-next-80b", 2_097_152, 2_097_152, 2_097_152, 24_576),
        ("granite-4.0-h-tiny", 1_572_864, 1_572_864, 1_572_864, 8_192),
    ],
)
def test_pages_of_released_hybrids(name: str, page: int, state: int, huge: int, kv_token: int) -> None:
    found = next((values for key, values in RELEASED.items() if key.startswith(name.rsplit("-a", 1)[0])), None)
    assert found is not None, sorted(RELEASED)
    facts = page_facts(ModelConfig.from_dict(found), shape_of(ModelConfig.from_dict(found), None).formats)["gpu"]
    assert (facts["P_e"], facts["P_s"], facts["P_h"], facts["kv_bytes_per_token"]) == (page, state, huge, kv_token)
    assert facts["state_bytes_per_sequence"] > 0
