"""`rimuru bench agreement`: the figures by hand, engines that agree, and engines that must not be found to agree."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import write_tiny_checkpoint
from tiny_tokenizer import write_tiny_tokenizer

from rimuru_cli.bench import agreement, gpu_only
from rimuru_cli.bench.agreement import Comparison, Tolerance, exceeded
from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.loading import load_parts
from rimuru_cli.engine.parts import Parts
from rimuru_cli.main import main
from rimuru_kernels.backend import Backend

Cli = Callable[..., tuple[int, str, str]]
FEW = ("--device", "emulated", "--prompts", "3", "--tokens", "5")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {}
    for name, dtype, seed in (("float32", torch.float32, 0), ("bfloat16", torch.bfloat16, 0), ("other", torch.float32, 7)):
        made[name] = write_tiny_checkpoint(root / name, "qwen3_moe", vocab_size=320, dtype=dtype, seed=seed)
        write_tiny_tokenizer(made[name])
    return made


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setattr(gpu_only, "select_backend", lambda: Backend("torch", "no CUDA device found"))

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["bench", "agreement", *words])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


def test_the_same_arithmetic_agrees_everywhere(cli: Cli, checkpoints: dict[str, Path]) -> None:
    code, out, err = cli(str(checkpoints["float32"]), *FEW, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    row = report["rows"][0]
    assert row["top1_agreement"] == 1.0 and row["same_answers"] == 3 and report["exceeded"] == []
    assert row["mean_kl"] < 1e-6 and row["relative_logit_delta"] < 1e-4 and row["largest_margin"] == 0.0
    assert 3 < row["positions"] <= 15


def test_bfloat16_is_close_and_not_the_same(cli: Cli, checkpoints: dict[str, Path]) -> None:
    code, out, _ = cli(str(checkpoints["bfloat16"]), *FEW, "--residency", "50%", "--json")
    row = json.loads(out)["rows"][0]
    assert code == 0 and 1e-4 < row["relative_logit_delta"] < 0.1


def test_another_model_does_not_pass(cli: Cli, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The judged engine computes with other weights: the text is dictated all the same, figures and exit code say that it is wrong."""

    def load(model_dir: Path, config: EngineConfig, progress: None) -> Parts:
        return load_parts(checkpoints["other"] if config.device == "emulated" else model_dir, config, progress)

    monkeypatch.setattr(agreement, "load_parts", load)
    code, out, err = cli(str(checkpoints["float32"]), *FEW)
    assert code == 4 and "emulated" in out
    assert "error:" in err and "mean_kl" in err.splitlines()[-1] and "top1_agreement" in err.splitlines()[-1]
    code, out, err = cli(str(checkpoints["float32"]), *FEW, "--json")
    assert code == 4 and err == "" and "mean_kl" in json.loads(out)["exceeded"]


def test_refusals(cli: Cli, checkpoints: dict[str, Path]) -> None:
    folder = str(checkpoints["float32"])
    code, _, err = cli(folder)
    assert code == 6 and "--device emulated" in err
    assert cli(folder, "--device", "tpu")[0] == 2
    assert cli(folder, "--device", "emulated", "--vs", "llama.cpp")[0] == 2
    assert cli(folder, "--device", "emulated", "--prompts", "0")[0] == 2


def test_transformers_as_the_yardstick(cli: Cli, checkpoints: dict[str, Path]) -> None:
    pytest.importorskip("transformers")
    code, out, _ = cli(str(checkpoints["bfloat16"]), *FEW, "--vs", "transformers", "--json")
    ours, theirs = json.loads(out)["rows"]
    assert code == 0 and theirs["positions"] == ours["positions"]
    assert 1e-4 < theirs["relative_logit_delta"] < 0.1, "it computed the same text in bfloat16"


def test_an_engine_whose_context_ends_sooner(checkpoints: dict[str, Path]) -> None:
    prompt = list(range(40))
    answers = agreement.reference_answers(checkpoints["float32"], [prompt], 12, lambda *_: None)
    assert len(answers.ids[0]) == 12
    short = EngineConfig(device="emulated", context=46)
    row = agreement.dictated_answers(checkpoints["float32"], short, answers, lambda *_: None).row("it")
    assert 0 < row["positions"] < 12 and row["top1_agreement"] == 1.0


def test_figures_by_hand() -> None:
    want = torch.tensor([[0.0, 1.0, 3.0], [2.0, 2.5, 0.0]])
    got = torch.tensor([[0.5, 1.0, 3.0], [3.0, 2.5, 0.0]])
    comparison = Comparison()
    comparison.add_answer(want, got)
    comparison.add_answer(want[:1], want[:1] + 4.0)  # a constant more changes no probability
    row = comparison.row("it")
    p, q = want.double().softmax(-1), got.double().softmax(-1)
    kl = (p * (p / q).log()).sum(-1)
    spread = want.double().std(-1)
    assert (row["positions"], row["top1_agreement"], row["same_answers"]) == (3, round(2 / 3, 5), 1)
    assert row["mean_logit_delta"] == pytest.approx((0.5 / 3 + 1.0 / 3 + 4.0) / 3, abs=1e-5)
    assert row["largest_logit_delta"] == 4.0
    assert row["relative_logit_delta"] == pytest.approx(float((0.5 / 3 + 4.0) / spread[0] + 1.0 / 3 / spread[1]) / 3, abs=1e-5)
    assert row["mean_kl"] == pytest.approx(float(kl.sum()) / 3, abs=1e-6) and row["largest_kl"] == pytest.approx(float(kl.max()), abs=1e-5)
    assert row["largest_margin"] == pytest.approx(0.5 / float(spread[1]), abs=1e-5)


def test_what_is_no_number_is_never_within_the_tolerance() -> None:
    good = Comparison()
    good.add_answer(torch.eye(4), torch.eye(4))
    assert exceeded(good.row("it"), Tolerance()) == []
    for name in ("top1_agreement", "mean_kl", "relative_logit_delta", "largest_margin"):
        assert exceeded(good.row("it") | {name: math.nan}, Tolerance()) == [name]
