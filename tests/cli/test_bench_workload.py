"""`rimuru bench workload`: words, refusals, the JSON that others read, the picture. Simulated, and the tiny shape for real."""

from __future__ import annotations

import errno
import json
import os
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rimuru_cli.bench import gpu_only
from rimuru_cli.bench.workload import case_study, run
from rimuru_cli.bench.workload.case_study import best_of_kind, choose_limit, ratios
from rimuru_cli.commands._workload import sparkline
from rimuru_cli.engine.engine import Engine
from rimuru_cli.main import main
from rimuru_kernels.backend import Backend

Cli = Callable[..., tuple[int, str, str]]
NO_GPU = Backend("torch", "no CUDA device found")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run `rimuru bench workload` on a machine without a GPU: (exit code, stdout, stderr)."""
    for module in (gpu_only, run):
        monkeypatch.setattr(module, "select_backend", lambda: NO_GPU)

    def call(*words: str) -> tuple[int, str, str]:
        code = main(["bench", "workload", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def report(cli: Cli, *words: str) -> dict[str, Any]:
    code, out, err = cli(*words, "--json")
    assert code == 0, err
    value: dict[str, Any] = json.loads(out)
    return value


def test_the_tiny_shape_is_served_for_real(cli: Cli) -> None:
    found = report(cli, "--model-shape", "tiny", "--count", "4", "--longest", "12", "--policy", "fixed:50%", "--policy", "paced")
    assert [row["policy"] for row in found["rows"]] == ["fixed:50%", "paced"]
    assert found["simulated"] is False and "emulating" in found["device"]
    for row in found["rows"]:
        assert row["completed"] == 4 and row["throughput"] > 0 and row["ttft_ms"]["p99"] > 0


def test_simulated_rows_hold_all_figures(cli: Cli) -> None:
    found = report(
        cli,
        "--simulate",
        "--count",
        "12",
        "--rate",
        "4",
        "--longest",
        "80",
        "--policy",
        "static",
        "--policy",
        "elastic:eol=20",
        "--policy",
        "elastic",
    )
    assert found["requests"] == 12 and found["simulated"] is True
    for row in found["rows"]:
        for name in ("throughput", "steps", "peak_concurrency", "preemptions", "hit_rate", "link_bytes", "seconds"):
            assert isinstance(row[name], int | float), name
        for name in ("ttft_ms", "tpot_ms", "itl_ms"):
            assert set(row[name]) == {"mean", "p50", "p95", "p99"}
        curves = row["curves"]
        assert {"seconds", "step", "running", "expert_bytes", "kv_bytes", "free_bytes", "tokens"} <= set(curves)
        assert len({len(series) for series in curves.values()}) == 1
        assert curves["tokens"][-1] == found["answer_tokens"]


def test_the_case_study_prints_the_kinds_side_by_side(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_study, "SHARES", (0.1, 0.5))
    monkeypatch.setattr(case_study, "_SWEEP", 2)
    picture = tmp_path / "curves.svg"
    found = report(cli, "--case-study", "--simulate", "--model-shape", "tiny", "--count", "12", "--limits", "--svg", str(picture))
    assert {"static", "fixed", "elastic", "paced"} == set(found["policies"])
    for row in found["policies"].values():
        assert {"steps", "peak_concurrency", "throughput"} <= set(row)
    rates = [row["throughput"] for row in found["rows"] if row["kind"] == "fixed"]
    assert len(rates) == 2 and found["policies"]["fixed"]["throughput"] == max(rates)
    assert found["limits"]["elastic"]["rows"][-1]["eol"] is None
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_a_loaded_card_serves_more_at_once_in_fewer_steps(cli: Cli) -> None:
    """The order that the paper reports, on its own shape, with fewer and shorter requests and less memory than the case study has."""
    words = (
        "--simulate",
        "--count",
        "300",
        "--longest",
        "160",
        "--vram",
        "29.8GiB",
        "--policy",
        "static",
        "--policy",
        "fixed:10%",
        "--policy",
        "elastic",
        "--policy",
        "paced",
    )
    rows = {row["kind"]: row for row in report(cli, *words)["rows"]}
    steps, peak = ({kind: row[name] for kind, row in rows.items()} for name in ("steps", "peak_concurrency"))
    assert steps["static"] > steps["fixed"] > steps["elastic"]
    assert peak["static"] < peak["fixed"] < peak["elastic"]
    assert rows["paced"]["throughput"] >= 0.98 * max(row["throughput"] for row in rows.values())


def test_one_user_is_as_well_off_under_every_elastic_policy(cli: Cli) -> None:
    words = (
        "--simulate",
        "--count",
        "4",
        "--rate",
        "0.001",
        "--longest",
        "200",
        "--policy",
        "static",
        "--policy",
        "elastic",
        "--policy",
        "paced",
    )
    rows = report(cli, *words)["rows"]
    assert max(row["peak_concurrency"] for row in rows) == 1
    best = min(row["tpot_ms"]["mean"] for row in rows)
    assert all(row["tpot_ms"]["mean"] <= 1.03 * best for row in rows)


def test_people_see_a_table_and_curves(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = cli("--simulate", "--count", "5", "--policy", "static", "--policy", "paced")
    assert code == 0
    assert "policy" in out and "TTFT p50" in out and ("█" in out or "@" in out)


def test_requests_from_a_file(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "längen.jsonl"
    path.write_text('{"arrival": 3, "prompt_tokens": 9, "answer_tokens": 2}\n' * 3, encoding="utf-8")
    found = report(cli, "--simulate", "--requests", str(path), "--policy", "static")
    assert (found["prompt_tokens"], found["answer_tokens"]) == (27, 6)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--simulate", "--policy", "greedy"), 2, "no memory policy"),
        (("--simulate", "--policy", "fixed:0%"), 2, "between 0% and 100%"),
        (("--simulate", "--policy", "fixed:x%"), 2, "no share"),
        (("--simulate", "--policy", "static:eol=3"), 2, "does not change static"),
        (("--simulate", "--policy", "paced:eol=61"), 2, "only 60 experts"),
        (("--simulate", "--model-shape", "gpt-2"), 2, "no shape"),
        (("--simulate", "--rate", "0"), 2, "above 0"),
        (("--simulate", "--rate", "nan"), 2, "above 0"),
        (("--simulate", "--rate", "1e-300", "--count", "3"), 2, "only after 30 years"),
        (("--simulate", "--requests", "other.jsonl"), 2, "Line 1 of other.jsonl has no prompt_tokens"),
        (("--simulate", "--arrivals", "sometimes"), 2, "one of poisson"),
        (("--simulate", "--arrivals", "bursty"), 2, "need a rate"),
        (("--simulate", "--requests", "long.jsonl"), 2, "positions"),
        (("--simulate", "--vram", "4GiB"), 6, "at least"),
        (("--simulate", "--case-study", "--rate", "3"), 2, "own requests"),
        (("--simulate", "--limits"), 2, "belongs to --case-study"),
        (("--simulate", "--requests", "nowhere.jsonl"), 3, "no file"),
        (("--simulate", "--requests", "."), 2, "is a folder"),
        (("--simulate", "--requests", "long.jsonl", "--longest", "8"), 2, "keeps within 8"),
        (("--simulate", "--requests", "timed.jsonl", "--rate", "3"), 2, "a rate means nothing"),
        (("--simulate", "--routing", "odd"), 2, "one of recorded"),
        (("--routing", "uniform"), 2, "belongs to --simulate"),
        (("--simulate", "--svg", "."), 2, "it is a folder"),
        (("--simulate", "--svg", "nowhere/x.svg"), 2, "does not exist"),
        (("--count", "3"), 6, "needs a CUDA device"),
    ],
)
def test_what_cannot_be_is_refused_in_words(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("long.jsonl").write_text('{"prompt_tokens": 9000, "answer_tokens": 1}', encoding="utf-8")
    Path("timed.jsonl").write_text('{"prompt_tokens": 9, "answer_tokens": 1, "arrival": 2}', encoding="utf-8")
    Path("other.jsonl").write_text('{"input": 9, "answer_tokens": 1}', encoding="utf-8")
    found, out, err = cli(*words)
    assert (found, out) == (code, "") and said in " ".join(err.split())


def test_a_policy_that_does_not_fit_is_a_row_that_says_so(cli: Cli) -> None:
    found = report(
        cli, "--simulate", "--model-shape", "qwen3-30b-a3b", "--vram", "24GiB", "--count", "3", "--policy", "static", "--policy", "paced"
    )
    static, paced = found["rows"]
    assert "at least" in static["error"] and paced["completed"] == 3


def row(kind: str, throughput: float, eol: int | None = None, **more: Any) -> dict[str, Any]:
    return {"policy": kind, "kind": kind, "throughput": throughput, "steps": 10, "peak_concurrency": 4, "eol": eol, "curves": {}, **more}


def test_the_best_of_each_kind_is_the_fastest_that_fits() -> None:
    rows = [row("fixed", 3.0), row("fixed", 5.0, share=0.2), row("fixed", 9.0, error="too small"), row("elastic", 6.0)]
    rows.append(row("fixed", 7.0, plain=False))
    best = best_of_kind(rows)
    assert best["fixed"]["share"] == 0.2 and set(best) == {"fixed", "elastic"}
    assert ratios(best) == {"elastic_steps_of_fixed": 1.0, "elastic_peak_concurrency_of_fixed": 1.0, "elastic_throughput_of_fixed": 1.2}


def test_of_limits_as_good_the_one_that_offloads_most_is_chosen() -> None:
    assert choose_limit([row("paced", 9.0, 10), row("paced", 9.95, 20), row("paced", 10.0, 30), row("paced", 9.99, None)]) is None
    assert choose_limit([row("elastic", 10.0, 10), row("elastic", 9.95, 20), row("elastic", 9.0, 30), row("elastic", 5.0, None)]) == 20
    assert choose_limit([row("elastic", 99.0, 10, error="too small"), row("elastic", 1.0, 20)]) == 20


def test_a_sparkline_keeps_peaks_and_fills_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rimuru_cli.commands._workload.shows_blocks", lambda: True)
    assert sparkline([0, 1, 2, 3], [8, 4, 8, 0], 4, 8, 4) == "█▄█"
    assert sparkline([0, 0.1, 0.2, 4], [1, 8, 1, 4], 4, 8, 4) == "█▄▄▄"
    assert sparkline([], [], 0, 0, 10) == ""


def test_a_disk_without_room_for_the_picture_costs_the_picture_only(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *args: Any, **kwargs: Any) -> int:
        self.write_bytes(b"<svg")
        raise OSError(errno.ENOSPC, "No space left on device")

    picture = tmp_path / "curves.svg"
    picture.write_text("an older picture", encoding="utf-8")
    monkeypatch.setattr(Path, "write_text", full)
    code, out, err = cli("--simulate", "--count", "3", "--longest", "40", "--policy", "static", "--svg", str(picture))
    assert code == 5 and "static" in out and "space" in err
    assert [path.name for path in tmp_path.iterdir()] == ["curves.svg"] and picture.read_bytes() == b"an older picture"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_links_and_pipes_stay_what_they_are(cli: Cli, tmp_path: Path) -> None:
    words = ("--simulate", "--count", "2", "--longest", "20", "--policy", "static", "--svg")
    link, target, pipe = tmp_path / "link.svg", tmp_path / "target.svg", tmp_path / "pipe"
    target.write_text("old", encoding="utf-8")
    link.symlink_to(target)
    assert cli(*words, str(link))[0] == 0
    assert link.is_symlink() and target.read_text(encoding="utf-8").startswith("<svg")
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text(encoding="utf-8")))
    reader.start()
    assert cli(*words, str(pipe))[0] == 0
    reader.join()
    assert pipe.is_fifo() and read[0].startswith("<svg")


def test_ctrl_c_in_the_middle_ends_with_130_and_gives_everything_back(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Engine] = []
    close = Engine.close

    def tell(engine: Engine) -> None:
        close(engine)
        closed.append(engine)

    class Impatient(run.SimulatedClock):
        def advance(self, seconds: float) -> None:
            super().advance(seconds)
            if self.now() > 0.2:
                raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "close", tell)
    monkeypatch.setattr(run, "SimulatedClock", Impatient)
    code, out, err = cli("--simulate", "--count", "30", "--policy", "elastic", "--policy", "static")
    assert (code, out) == (130, "") and "Traceback" not in err
    assert len(closed) == 1 and closed[0].snapshot().resident_experts == 0


@pytest.mark.parametrize("columns", ["1", "20", "500"])
def test_any_width_of_a_terminal_will_do(cli: Cli, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = cli("--simulate", "--count", "3", "--longest", "40", "--policy", "static", "--policy", "fixed:10%")
    assert code == 0 and "fixed:10%" in out


def test_variants_stand_side_by_side_in_one_run(cli: Cli) -> None:
    names = ["paced", "paced:no-profile", "paced:no-live", "paced:no-hysteresis", "paced:eol=20", "fixed:10%:no-live", "static:paced"]
    words = [word for name in names for word in ("--policy", name)]
    rows = report(cli, "--simulate", "--routing", "uniform", "--count", "8", "--longest", "60", *words)["rows"]
    assert [row["policy"] for row in rows] == names and [row["plain"] for row in rows] == [True] + [False] * 6


def test_a_model_with_recurrent_layers_is_simulated(cli: Cli) -> None:
    words = ("--simulate", "--model-shape", "qwen3.5-35b-a3b", "--vram", "24GiB", "--count", "12", "--longest", "60")
    static, fixed, elastic = report(cli, *words, "--policy", "static", "--policy", "fixed:80%", "--policy", "elastic")["rows"]
    assert "at least" in static["error"]
    for one in (fixed, elastic):
        assert one["completed"] == 12 and max(one["curves"]["states_bytes"]) > 0


def test_one_request_of_one_token_was_there_too(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"prompt_tokens": 1, "answer_tokens": 1}', encoding="utf-8")
    (row,) = report(cli, "--simulate", "--requests", str(path), "--policy", "static")["rows"]
    assert (row["completed"], row["peak_concurrency"], row["steps"], row["tpot_ms"]) == (1, 1, 1, {})
    code, out, _ = cli("--simulate", "--requests", str(path), "--policy", "static")
    assert code == 0 and "static" in out


def test_a_small_hybrid_is_served_for_real(cli: Cli) -> None:
    words = ("--model-shape", "tiny-hybrid", "--count", "3", "--longest", "8", "--policy", "paced")
    (row,) = report(cli, *words)["rows"]
    assert row["completed"] == 3 and max(row["curves"]["states_bytes"]) > 0
