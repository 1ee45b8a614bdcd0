"""`rimuru bench kl`: figures against ones worked out here, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import write_tiny_checkpoint
from tiny_tokenizer import write_tiny_tokenizer

from rimuru_cli.bench.divergence import SHIPPED_TEXT, run_divergence_bench
from rimuru_cli.engine.tokenizer import Tokenizer
from rimuru_models.errors import DoesNotFitError, UsageError
from rimuru_models.quantizer.layout import Recipe
from rimuru_models.quantizer.make import quantize_checkpoint
from rimuru_models.weights import CheckpointReader

TEXT = "A short text, which is read twice. " * 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3_moe", vocab_size=259, num_layers=2)
    write_tiny_tokenizer(folder)
    return folder


def copied(model: Path, folder: Path, to: str) -> Path:
    with CheckpointReader(model) as reader:
        quantize_checkpoint(reader, folder, Recipe.of(to), list(range(200)), "s")
    return folder


def test_figures_are_those_of_plain_arithmetic(model: Path, tmp_path: Path, resident_logits: Any) -> None:
    copy = copied(model, tmp_path / "copy", "int4")
    report = run_divergence_bench(model, against=copy, text=TEXT, tokens=120)
    ids = Tokenizer.from_dir(model).encode(TEXT, add_special_tokens=True)[:120]
    want, got = (resident_logits(folder, ids).double().log_softmax(-1) for folder in (model, copy))
    following = torch.tensor(ids[1:]).unsqueeze(-1)
    own = report["rows"][-1]
    assert own["experts"] == "its own" and own["positions"] == 120
    assert own["mean_kl"] == pytest.approx(float((want.exp() * (want - got)).sum(-1).mean()), rel=1e-3, abs=1e-6)
    assert own["perplexity"] == pytest.approx(math.exp(-float(got[:-1].gather(-1, following).mean())), rel=1e-3)
    assert report["reference_perplexity"] == pytest.approx(math.exp(-float(want[:-1].gather(-1, following).mean())), rel=1e-3)
    assert own["top1_agreement"] == pytest.approx(float((want.argmax(-1) == got.argmax(-1)).double().mean()), abs=0.01)
    assert report["mean_kl"] == report["rows"][0]["mean_kl"] and report["rows"][0]["experts"] == "the reference's"


def test_more_bits_are_nearer(model: Path, tmp_path: Path) -> None:
    kls = {}
    for to in ("int8", "int4"):
        kls[to] = run_divergence_bench(model, against=copied(model, tmp_path / to, to), text=TEXT, tokens=100)["mean_kl"]
    q8 = run_divergence_bench(model, kv="q8", text=TEXT, tokens=100)
    assert 0 < kls["int8"] < 0.1 * kls["int4"] and 0 < q8["mean_kl"] < 0.1 * kls["int4"]
    assert q8["judged_precision"].endswith("KV q8")


def test_windows_that_begin_alike_are_all_read(model: Path) -> None:
    text = ("x" * 600) * 2
    report = run_divergence_bench(model, kv="q8", text=text, tokens=1000)
    assert report["tokens"] == report["rows"][0]["positions"] == 1000 - 1000 % report["window"] or report["tokens"] > 900


def test_on_the_way_of_a_device_experts_choose_for_themselves(model: Path) -> None:
    report = run_divergence_bench(model, kv="q8", text=TEXT, tokens=64, device="emulated")
    assert [row["experts"] for row in report["rows"]] == ["its own"] and report["mean_kl"] > 0


def test_the_shipped_text_is_long_enough() -> None:
    assert len(SHIPPED_TEXT.read_text(encoding="utf-8").split()) > 1200


@pytest.mark.parametrize(
    ("wishes", "words"),
    [({}, "itself"), ({"kv": "q8", "text": ""}, "too short"), ({"kv": "q8", "device": "tpu"}, "tpu")],
)
def test_what_is_refused(model: Path, wishes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run_divergence_bench(model, **wishes)


def test_models_of_different_vocabularies_are_not_compared(model: Path, tmp_path: Path) -> None:
    other = write_tiny_checkpoint(tmp_path / "other", "qwen3_moe", vocab_size=300, num_layers=1)
    write_tiny_tokenizer(other)
    with pytest.raises(UsageError, match="vocabulary"):
        run_divergence_bench(model, against=other, text=TEXT, tokens=64)


def test_models_of_different_tokenizers_are_not_compared(model: Path, tmp_path: Path) -> None:
    """As many tokens, and other words: the figures would say nothing."""
    other = shutil.copytree(model, tmp_path / "other")
    described = json.loads((other / "tokenizer.json").read_text("utf-8"))
    vocab = described["model"]["vocab"]
    vocab["a"], vocab["e"] = vocab["e"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    with pytest.raises(UsageError, match="other has another tokenizer than tiny"):
        run_divergence_bench(model, against=other, text=TEXT, tokens=64)


@pytest.mark.parametrize("change", [{"num_layers": 3}, {"num_experts": 12}, {"num_experts_per_tok": 2}, {"hidden_size": 32}])
def test_another_shape_of_model_chooses_experts_for_itself(change: dict[str, Any], model: Path, tmp_path: Path) -> None:
    other = write_tiny_checkpoint(tmp_path / "other", "qwen3_moe", **({"vocab_size": 259, "num_layers": 2} | change))
    write_tiny_tokenizer(other)
    report = run_divergence_bench(model, against=other, text=TEXT, tokens=64)
    alike = "hidden_size" in change
    assert [row["experts"] for row in report["rows"]] == (["the reference's"] if alike else []) + ["its own"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_gpu_that_is_not_here(model: Path) -> None:
    with pytest.raises(DoesNotFitError, match="needs a CUDA device"):
        run_divergence_bench(model, kv="q8", text=TEXT, device="cuda")


@pytest.fixture
def resident_logits() -> Any:
    """Logits of a model in plain memory, one sequence."""
    from rimuru_models import load_model
    from rimuru_models.interfaces import ForwardContext
    from rimuru_models.resident import ResidentExperts, ResidentKVCache

    def run(folder: Path, ids: list[int]) -> torch.Tensor:
        with CheckpointReader(folder) as reader, torch.inference_mode():
            net = load_model(reader, torch.float32)
            context = ForwardContext(torch.arange(len(ids)), ResidentKVCache(reader.config), ResidentExperts(reader))
            return net.logits(net.forward(torch.tensor(ids), context))

    return run
