"""GGUF models on the command line, from the hub to an answer, in this process."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from loopback_hub import LoopbackHub
from loopback_setup import connect
from tiny_gguf import add_tokenizer, write_tiny_gguf
from tiny_tokenizer import SPECIALS, write_tiny_tokenizer

from rimuru_cli.fit import nvml
from rimuru_cli.hub import patience
from rimuru_cli.main import main

NAME = "org/tiny-GGUF"
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """One model quantised in two ways, with a tokenizer in it."""
    found: dict[str, bytes] = {}
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(tokenizer)
    described = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    described["model"]["vocab"] |= SPECIALS | {"Hi": 259}
    described["model"]["merges"] = [["H", "i"]]
    (tokenizer / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    for kind in ("Q4_0", "Q8_0"):
        folder = tmp_path_factory.mktemp(kind)
        path, _ = write_tiny_gguf(
            folder,
            "qwen3_moe",
            lambda name, kind=kind: kind,
            moe_intermediate_size=64,
            num_layers=2,
            vocab_size=264,
            more=lambda writer: add_tokenizer(writer, tokenizer, "gpt-2", rows=264),
            name=f"tiny-{kind}",
        )
        found[path.name] = path.read_bytes()
    return found


@pytest.fixture(autouse=True)
def server(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with LoopbackHub() as hub:
        hub.add(NAME, files)
        connect(monkeypatch, hub, tmp_path / "hub", read_seconds=2)
        monkeypatch.setattr(patience, "FIRST_WAIT_SECONDS", 0.001)
        monkeypatch.setattr(nvml, "list_cards", list)
        monkeypatch.chdir(tmp_path)
        yield hub


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        code = main(list(words))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_from_the_hub_to_an_answer_and_away(cli: Cli, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = cli("pull", NAME)
    assert code == 2 and "Q4_0 (" in err and "Q8_0 (" in err and f"{NAME}:Q4_0" in err and out == ""
    code, _, err = cli("pull", f"{NAME}:Q5_K_M")
    assert code == 3 and "has no Q5_K_M; there are Q4_0 (" in err
    code, out, err = cli("fit", f"{NAME}:Q8_0", "--json")
    assert code == 0 and json.loads(out)["runs"] and "Q8_0" in out
    code, out, err = cli("pull", f"{NAME}:q8_0")
    assert (code, err) == (0, "")
    path = Path(out.strip())
    assert path.name == "tiny-Q8_0.gguf" and path.read_bytes() == files["tiny-Q8_0.gguf"]
    result = json.loads(cli("pull", f"{NAME}:Q8_0", "--json")[1].splitlines()[-1])
    assert (result["model"], result["up_to_date"], result["path"]) == (f"{NAME}:Q8_0", True, str(path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    listed = json.loads(cli("list", "--json")[1])["models"]
    assert [(one["name"], one["variant"], one["status"], one["precision"]) for one in listed] == [(f"{NAME}:Q8_0", "Q8_0", "ready", "Q8_0")]
    assert "Q8_0" in listed[0]["dense_precision"] and listed[0]["kv_precision"]["cpu"] == "F32"
    assert f"{NAME}:Q8_0" in cli("list")[1]
    code, out, _ = cli("show", f"{NAME}:Q8_0")
    assert code == 0 and "Qwen3MoeForCausalLM" in out and "tiny-Q8_0.gguf" in out
    code, out, _ = cli("verify", f"{NAME}:Q8_0")
    assert code == 0 and "all as they should be" in out
    code, out, err = cli("run", f"{NAME}:Q8_0", "Hi", "--max-tokens", "6", "--temperature", "0", "--json")
    assert code == 0, err
    assert json.loads(out)["model"] == f"{NAME}:Q8_0"
    assert cli("run", str(path), "Hi", "--max-tokens", "6", "--temperature", "0")[0] == 0
    assert json.loads(cli("list", "--json")[1])["models"][0]["last_used"] is not None
    code, out, _ = cli("rm", f"{NAME}:Q8_0", "--yes")
    assert code == 0 and f"Deleted {NAME}:Q8_0" in out and not path.exists()
    assert json.loads(cli("list", "--json")[1])["models"] == []


def test_files_that_cannot_be_run_say_why(cli: Cli, files: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(files["tiny-Q4_0.gguf"][:100_000])
    for command in (("run", "cut.gguf", "Hi"), ("show", "cut.gguf"), ("fit", "cut.gguf")):
        code, _, err = cli(*command)
        assert code == 1 and "cut.gguf is not a usable GGUF file: tensor" in err and "download it again" in err
    code, _, err = cli("verify", "cut.gguf")
    assert code == 4 and "cut.gguf" in err
    code, _, err = cli("rm", "cut.gguf")
    assert code == 2 and "is a local file" in err
    code, _, err = cli("run", "./absent.gguf", "Hi")
    assert code == 3 and "absent.gguf" in err
