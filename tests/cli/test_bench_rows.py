"""`rimuru bench pp tg` and `bench kernels`: words, refusals, rows. The tiny shape is measured for real, the GPU is made up."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import write_tiny_checkpoint

from rimuru_cli.bench import gpu_only, kernel_reports, token_rows
from rimuru_cli.main import main
from rimuru_kernels.backend import Backend
from rimuru_models.weights import CheckpointReader

Cli = Callable[..., tuple[int, str, str]]
TINY = ("--model-shape", "tiny", "--random-weights")
NO_GPU, A_GPU = Backend("torch", "no CUDA device found"), Backend("triton", "a card")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run `rimuru bench` on a machine without a GPU: (exit code, stdout, stderr)."""
    for module in (gpu_only, token_rows):
        monkeypatch.setattr(module, "select_backend", lambda: NO_GPU)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["bench", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def write_trace(path: Path, *, layers: int = 3, prompt: int = 2, generated: int = 4, top_k: int = 2, experts: int = 32) -> Path:
    lines = ["# a comment", "phase,step,layer,experts,weights"]
    for phase, count in ((0, prompt), (1, generated)):
        for step in range(count):
            for layer in range(layers):
                chosen = [(step + layer + 5 * place) % experts for place in range(top_k)]
                lines.append(f"{phase},{step},{layer},{' '.join(map(str, chosen))},{' '.join(['0.5'] * top_k)}")
    text = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def test_rows_of_the_tiny_shape(cli: Cli, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "route.csv.gz")
    code, out, err = cli("pp", "tg", *TINY, "--vram", "600MiB", "--routing-trace", str(trace), "-p", "8", "-n", "3", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    rows = report["rows"]
    assert all({"model", "size", "params", "backend", "test", "t/s"} <= set(row) and row["t/s"] > 0 for row in rows)
    assert {row["test"] for row in rows} == {"pp8", "tg3"} and {row["vram_cap"] for row in rows} == {600 << 20}
    generated = [row for row in rows if row["test"] == "tg3"]
    assert len(generated) == 2 and sorted(row["top_k"] for row in generated) == [2, 8]
    assert all(0 <= row["hit_rate"] <= 1 for row in generated)
    assert (report["trace"], report["dtype"]) == (str(trace), "float32")


def test_several_sequences_are_rows_of_their_own(cli: Cli) -> None:
    code, out, _ = cli("tg", *TINY, "--vram", "600MiB", "-n", "3", "--sequences", "1", "--sequences", "3", "--json")
    assert code == 0
    rows = json.loads(out)["rows"]
    assert [(row["test"], row["sequences"], row["routing"]) for row in rows] == [("tg3", 1, "uniform"), ("tg3", 3, "uniform")]
    assert all(row["t/s"] > 0 for row in rows)


def test_a_hybrid_shape_with_a_made_up_routing(cli: Cli) -> None:
    words = ("--model-shape", "tiny-hybrid", "--random-weights", "--routing-trace", "synthetic", "-p", "8", "-n", "3", "--json")
    code, out, err = cli("pp", "tg", *words)
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert [(row["test"], row.get("routing")) for row in report["rows"]] == [("pp8", None), ("tg3", "uniform"), ("tg3", "synthetic")]
    assert report["trace"] == "synthetic" and all(row["t/s"] > 0 for row in report["rows"])
    code, _, err = cli("pp", *words[:-1])
    assert code == 2 and "replayed by tg" in err


def test_a_cache_of_8_bits(cli: Cli) -> None:
    code, out, err = cli("pp", "tg", *TINY, "--kv", "q8", "-p", "8", "-n", "3", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["kv"] == "q8" and {row["model"] for row in report["rows"]} == {"tiny, kv q8"}
    code, _, err = cli("pp", *TINY, "--kv", "q4")
    assert code == 2 and "q8" in err


def test_the_table_for_people(cli: Cli) -> None:
    code, out, err = cli("pp", *TINY, "--prompt", "4")
    header, _, row = out.splitlines()
    assert code == 0 and "pp4" in row and "no cap" in row and "1.03 M" in row and "random" in err
    assert header.split()[:4] == ["model", "size", "params", "backend"] and header.split()[-1] == "t/s" and "hit rate" in header


def fake_bench(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A measurement that only notes what it was asked for."""
    asked: dict[str, Any] = {}

    def bench(tests: list[str], **words: Any) -> dict[str, Any]:
        asked.update(words, tests=tests)
        return {"bench": "tokens", "rows": []}

    monkeypatch.setattr(token_rows, "run_tokens_bench", bench)
    return asked


@pytest.mark.parametrize(
    ("words", "tests"), [(("pp",), ["pp"]), (("tg",), ["tg"]), (("pp", "tg"), ["pp", "tg"]), (("tg", "pp", "tg"), ["pp", "tg"])]
)
def test_names_of_tests(cli: Cli, words: tuple[str, ...], tests: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_bench(monkeypatch)
    assert cli(*words, *TINY, "--json")[0] == 0
    assert (asked["tests"], asked["prompts"], asked["vram"]) == (tests, [512], [None])  # 4096 and one more do not fit


def test_ceilings_and_sizes_may_be_repeated(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_bench(monkeypatch)
    monkeypatch.setattr(token_rows, "memory_facts", lambda: {"ram_bytes": 8 << 30, "ram_free_bytes": 8 << 30})
    assert cli("pp", *TINY, "--vram", "2GiB", "--vram", "50%", "--vram", "none", "-p", "7", "--prompt", "9", "--json")[0] == 0
    assert (asked["vram"], asked["prompts"]) == ([2 << 30, 4 << 30, None], [7, 9])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("pp",), 2, "--random-weights"),
        (("pp", "xx", *TINY), 2, "'xx'"),
        (("pp", "--model-shape", "huge", "--random-weights"), 2, "qwen3-30b-a3b"),
        (("pp", *TINY, "--vram", "lots"), 2, "8GiB"),
        (("pp", *TINY, "--prompt", "4096"), 2, "4096"),
        (("tg", *TINY, "--tokens", "4090"), 2, "tokens"),
        (("pp", *TINY, "--routing-trace", "x.csv"), 2, "replayed by tg"),
        (("tg", *TINY, "--routing-trace", "no-such-file.csv"), 3, "no-such-file.csv"),
        (("tg", *TINY, "--vram", "1MiB"), 6, "at least"),
        (("pp", "tg", "--random-weights", "--vram", "24GiB"), 6, "no CUDA device found"),
        (("kernels",), 6, "no CUDA device found"),
        (("kernels", "--op", "moe", "--op", "fetch"), 6, "no CUDA device found"),
        (("kernels", "--op", "dequant"), 2, "moe, attention, fetch, recurrent, packed-moe"),
        (("kernels", "--op", "recurrent"), 6, "no CUDA device found"),
    ],
)
def test_refusals(cli: Cli, words: tuple[str, ...], code: int, said: str) -> None:
    refused, out, err = cli(*words)
    assert (refused, out) == (code, "") and err.startswith("error: ") and said in err
    refused, out, err = cli(*words, "--json")
    assert refused == code and err == "" and json.loads(out)["error"]["exit_code"] == code


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"\xff\xfe", b"phase,step,layer,experts,weights\n0,0,0,x,0.5\n"])
@pytest.mark.parametrize("name", ["route.csv", "route.csv.gz"])
def test_a_file_that_is_no_recording(cli: Cli, content: bytes, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    code, _, err = cli("tg", *TINY, "--routing-trace", str(tmp_path / name))
    assert code == 2 and name in err


def test_a_recording_of_another_shape(cli: Cli, tmp_path: Path) -> None:
    for name, words in {"layers": {"layers": 2}, "experts": {"experts": 64, "top_k": 8}, "prompt": {"prompt": 0}}.items():
        trace = write_trace(tmp_path / f"{name}.csv", **words)
        code, _, err = cli("tg", *TINY, "--routing-trace", str(trace))
        assert code == 2 and name in err, name


def test_too_little_memory_is_said_before_weights_are_made(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_bench(monkeypatch)
    monkeypatch.setattr(token_rows, "memory_facts", lambda: {"ram_bytes": 1 << 20, "ram_free_bytes": 1 << 20})
    code, _, err = cli("pp", *TINY)
    assert code == 6 and "main memory" in err and asked == {}


MOE = {
    "shape": "Some-MoE",
    "tokens": 1,
    "us": {"contiguous": 10.0, "pages in order": 10.2, "pages shuffled": 10.4, "torch._grouped_mm": 30.0},
    "overhead_percent": {"pages in order": 2.0, "pages shuffled": 4.0},
    "floor_us": 8.0,
}


def test_kernel_reports_in_order(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_only, "select_backend", lambda: A_GPU)
    monkeypatch.setattr(
        kernel_reports,
        "OPS",
        {"moe": lambda: {"rows": [MOE]}, "attention": lambda: {"decode": [{"context": 1024, "us": 5.0}]}, "fetch": lambda: {"fetch": []}},
    )
    assert list(json.loads(cli("kernels", "--json")[1])) == ["bench", "moe", "attention", "fetch"]
    assert list(json.loads(cli("kernels", "--json", "--op", "fetch", "--op", "moe")[1])) == ["bench", "fetch", "moe"]
    _, out, err = cli("kernels")
    line = next(line for line in out.splitlines() if line.startswith("Some-MoE"))
    assert line.split()[:6] == ["Some-MoE", "1", "10.3", "10.0", "30.0", "8.0"] and " 3.0 " in line
    assert "1024" in out and "moe" in err and "attention" in err


def test_every_kernel_benchmark_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    from rimuru_cli.bench import kernels, kernels_attention, kernels_fetch, kernels_packed, kernels_recurrent

    monkeypatch.setattr(kernels, "run_kernel_bench", lambda op: {"op": op})
    monkeypatch.setattr(kernels_attention, "run_attention_bench", lambda: {"op": "attention"})
    monkeypatch.setattr(kernels_fetch, "run_fetch_bench", lambda: {"op": "fetch"})
    monkeypatch.setattr(kernels_recurrent, "run_recurrent_bench", lambda: {"op": "recurrent"})
    monkeypatch.setattr(kernels_packed, "run_packed_bench", lambda: {"op": "packed-moe"})
    assert {name: run()["op"] for name, run in kernel_reports.OPS.items()} == {
        "moe": "fused_moe",
        "attention": "attention",
        "fetch": "fetch",
        "recurrent": "recurrent",
        "packed-moe": "packed-moe",
    }


def test_one_conversation_grows_to_the_longest_context(cli: Cli) -> None:
    code, out, err = cli("elastic", "--model-shape", "tiny", "--json")
    assert code == 0, err
    report = json.loads(out)
    contexts = [row["context"] for row in report["rows"]]
    assert contexts == sorted(contexts) and len(contexts) == 5 and contexts[-1] > 0.9 * report["context_limit"]
    assert all(after["reused"] > 0.4 * after["context"] for after in report["rows"][1:]), "every turn reuses the turns before it"
    assert report["rows"][-1]["bytes_by_kind"]["kv"] > report["rows"][0]["bytes_by_kind"]["kv"] * 8
    last = report["rows"][-1]
    assert last["handed_over_bytes"] > 0 and last["waited_ms"] > 0 and last["resident_experts"] < report["rows"][0]["resident_experts"]
    moved = report["ceiling"]
    assert moved["same_text"] and moved["first_difference"] is None and moved["tokens"] == 96
    lowered, raised = moved["lowered"], moved["raised"]
    assert lowered["pool_bytes"] < lowered["pool_before"] == raised["pool_bytes"] and lowered["retired_experts"] > 0
    assert lowered["returned_bytes"] == raised["taken_bytes"] == lowered["pool_before"] - lowered["pool_bytes"]
    assert [row["part"] for row in moved["parts"]][2:] == ["before the ceiling moved", "after it was lowered", "after it was raised"]


def test_answers_that_differ_are_a_failure(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    report = {
        "bench": "elastic",
        "context_limit": 100,
        "rows": [],
        "ceiling": {"same_text": False, "first_difference": 3, "tokens": 9, "parts": []},
    }
    monkeypatch.setattr(token_rows, "run_elastic_rows", lambda *args, **kwargs: report)
    code, _, err = cli("elastic", "--model-shape", "tiny")
    assert code == 4 and "DIFFER from token 3" in err and "differs from the undisturbed one" in err


def test_loading_is_compared_with_plain_reading(cli: Cli, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", "qwen3_moe")
    code, out, err = cli("load", str(folder), "--json")
    assert code == 0, err
    report = json.loads(out)
    with CheckpointReader(folder) as reader:
        experts = 4 * 8 * sum(part.numel() * part.element_size() for part in reader.expert(0, 0))
    assert [(row["what"], row["bytes"]) for row in report["rows"]] == [("plain read", experts), ("load experts", experts)]
    assert report["share"] > 0 and report["device"] is None
    code, out, err = cli("load", str(folder), "--most", "100KiB", "--cold", "--json")
    assert code == 0 and json.loads(out)["rows"][0]["bytes"] == 100 << 10 and json.loads(out)["rows"][1]["bytes"] <= 100 << 10
    assert cli("load", str(folder), "--most", "50%")[0] == 2
    code, out, err = cli("load", str(folder))
    assert code == 0 and "of plain reading" in err and "load experts" in out


def test_growing_an_unknown_shape(cli: Cli) -> None:
    assert cli("elastic", "--model-shape", "huge")[0] == 2
    assert cli("elastic")[0] == 6
