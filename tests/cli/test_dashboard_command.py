"""`rimuru dashboard` without its window: one snapshot, recordings, who is watched, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import GREEDY, load_engine
from synthetic_engine import SyntheticEngine
from tiny_checkpoints import write_tiny_checkpoint
from tiny_tokenizer import write_tiny_tokenizer

from rimuru_cli import main as cli
from rimuru_cli.chat import loading
from rimuru_cli.commands import _window
from rimuru_cli.commands import dashboard as command
from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.telemetry.discovery import running_engines
from rimuru_cli.engine.telemetry.live import LiveSource
from rimuru_cli.engine.telemetry.publish import Publisher
from rimuru_cli.engine.telemetry.record import Recorder
from rimuru_cli.engine.telemetry.replay import ReplaySource
from rimuru_cli.hub.paths import runtime_dir
from rimuru_cli.output import Output
from rimuru_cli.settings import resolve


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("dashboard") / "tiny", "qwen3_moe", vocab_size=320)
    write_tiny_tokenizer(folder)
    return folder


@contextmanager
def engine_running(checkpoint: Path, role: Any = "chat") -> Iterator[Engine]:
    with load_engine(checkpoint, 0.3, EngineConfig(device="cpu", context=256)) as engine:
        engine.publish(Publisher(runtime_dir(), role))
        for _ in engine.generate([5, 6, 7, 8], GREEDY):
            pass
        yield engine


def dashboard(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.main(["dashboard", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = dashboard("--once", capsys=capsys)
    assert (code, out) == (3, "") and "running" in err and "rimuru chat" in err
    code, out, err = dashboard("--once", "--json", capsys=capsys)
    assert code == 3 and json.loads(out)["error"]["exit_code"] == 3


def test_one_snapshot_as_json(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with engine_running(checkpoint) as engine:
        code, out, err = dashboard("--once", "--json", capsys=capsys)
        snapshot = engine.snapshot()
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["engine"]["pid"] == os.getpid() and report["engine"]["role"] == "chat"
    assert report["counters"]["step"] == snapshot.step
    assert report["counters"]["hit_rate"] == snapshot.hit_rate
    assert report["bytes_by_kind"]["kv"] == snapshot.bytes_by_kind["kv"] > 0
    assert sum(report["bytes_by_kind"].values()) == sum(report["pages"]["size"]) == report["engine"]["pool_bytes"]
    assert set(report["pages"]["kind"]) >= {"expert", "kv"} and len(set(map(len, report["pages"].values()))) == 1
    assert sum(map(sum, report["experts"]["resident"])) == snapshot.resident_experts
    assert None in report["pages"]["score"], "what has no score is null, not NaN"


def test_one_snapshot_in_words(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with engine_running(checkpoint, "bench"):
        code, out, _ = dashboard("--once", capsys=capsys)
    assert code == 0
    for words in ("bench", "KV f32", f"process {os.getpid()}", "expert", "kv", "resident", "tokens of context", "t/s"):
        assert words in out
    assert max(map(len, out.splitlines())) < 200


def test_the_engine_that_is_named(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with engine_running(checkpoint):
        code, out, _ = dashboard("--once", "--json", "--engine", str(os.getpid()), capsys=capsys)
        assert code == 0 and json.loads(out)["engine"]["pid"] == os.getpid()
        code, out, err = dashboard("--once", "--engine", "1", capsys=capsys)
        assert (code, out) == (3, "") and str(os.getpid()) in err
    assert dashboard("--once", "--engine", str(os.getpid()), capsys=capsys)[0] == 3


def test_states_of_a_hybrid_that_were_not_kept_are_said() -> None:
    frame = SyntheticEngine(600, layers=8, experts=16, top_k=2, hybrid=True).next("long context")
    lines = "\n".join(command.snapshot_lines(frame))
    assert "\nssm " in lines and "\nconv " in lines and "not kept" not in lines
    frame = replace(frame, counters=replace(frame.counters, states_not_kept=3))
    assert "3 states not kept" in "\n".join(command.snapshot_lines(frame))


@pytest.mark.parametrize("words", [["--replay", "~nobody-of-this-name/x", "--once"], ["--record", "~nobody-of-this-name/x"]])
def test_a_home_that_is_not_there_is_no_bug(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = dashboard(*words, capsys=capsys)
    assert code == 2 and "nobody-of-this-name" in err and "bug" not in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--demo", "--replay", "x"], "exclude"),
        (["--demo", "--engine", "5"], "exclude"),
        (["--record", "x", "--demo"], "recorded"),
        (["--record", "x", "--once"], "recorded"),
        (["--json"], "--once"),
        ([], "terminal"),
        (["--replay", "nowhere", "--once"], "no recording"),
        (["--engine", "0"], "--engine"),
        (["--fps", "0"], "--fps"),
        (["--fps", "nan"], "--fps"),
    ],
)
def test_what_makes_no_sense_is_said(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = dashboard(*words, capsys=capsys)
    assert code == 2 and says in (out + err)
    assert not Path("x").exists()


def test_a_recording_without_a_window(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "seen"
    with ExitStack() as stack:
        engine = stack.enter_context(engine_running(checkpoint))

        def talk() -> None:
            end = time.monotonic() + 30
            while time.monotonic() < end and (not file.exists() or file.stat().st_size < 500):
                for _ in engine.generate([5, 6, 7], GREEDY):
                    time.sleep(0.01)
            stack.close()

        thread = threading.Thread(target=talk)
        thread.start()
        code, out, err = dashboard("--record", str(file), "--fps", "20", capsys=capsys)
        thread.join()
    assert (code, out) == (0, "") and "frames" in err
    code, out, _ = dashboard("--replay", str(file), "--once", "--json", capsys=capsys)
    assert code == 0 and json.loads(out)["engine"]["pid"] == os.getpid()
    code, _, err = dashboard("--record", str(file), capsys=capsys)
    assert code == 2 and "already" in err


def test_a_damaged_recording_plays_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = SyntheticEngine(200, layers=4, experts=16, top_k=2)
    recorder = Recorder(tmp_path / "seen")
    for _ in range(50):
        engine.next("prefill")
        recorder(engine.head(True), engine.tables())
    recorder.close()
    data = (tmp_path / "seen").read_bytes()
    (tmp_path / "seen").write_bytes(data[: len(data) - 300])
    code, out, err = dashboard("--replay", str(tmp_path / "seen"), "--once", "--json", capsys=capsys)
    assert code == 0 and json.loads(out)["counters"]["step"] > 0 and "damaged" in err


def test_the_demonstration_needs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = dashboard("--demo", "--once", "--json", capsys=capsys)
    report = json.loads(out)
    assert (code, err) == (0, "") and report["engine"]["model"] == "rimuru-demo"


def test_the_window_gets_the_source_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from rimuru_cli.tui import app

    opened: list[tuple[Any, float]] = []

    def run_dashboard(source: Any, *, fps: float) -> int:
        opened.append((source, fps))
        return 7

    monkeypatch.setattr(app, "run_dashboard", run_dashboard)
    monkeypatch.setattr(_window, "is_terminal", lambda stream: True)
    monkeypatch.setenv("TERM", "xterm")
    assert cli.main(["dashboard"]) == 7
    assert cli.main(["dashboard", "--demo", "--fps", "5"]) == 7
    assert [(type(source), fps) for source, fps in opened] == [(LiveSource, 10.0), (ReplaySource, 5.0)]


@pytest.mark.parametrize(
    ("terminals", "term", "says"), [(("stdin", "stdout"), "xterm", "stderr is none"), (("stdin", "stdout", "stderr"), "dumb", "TERM=dumb")]
)
@pytest.mark.parametrize("words", [["dashboard", "--demo"], ["chat", "--tui"]])
def test_what_nobody_would_see_is_not_drawn(
    words: list[str],
    terminals: tuple[str, ...],
    term: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(_window, "is_terminal", lambda stream: any(stream is getattr(sys, name) for name in terminals))
    monkeypatch.setenv("TERM", term)
    assert cli.main(words) == 2
    assert says in capsys.readouterr().err


def test_chat_and_run_let_dashboards_look_on(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, listed in (({}, 1), ({"dashboard": False}, 0), ({"dashboard": "off"}, 0)):
        with loading.opened_session(
            loading.load_model, str(checkpoint), resolve({"memory": "4GiB", **words}), Output(json=True), chat=False, role="run"
        ):
            engines = running_engines(runtime_dir())
            assert len(engines) == listed
            assert not engines or (engines[0].role, engines[0].model) == ("run", "tiny")
        assert running_engines(runtime_dir()) == []


def test_a_home_that_cannot_be_written_costs_a_notice(checkpoint: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.mkdir()
    (home / "run").write_text("in the way", encoding="utf-8")
    with loading.opened_session(loading.load_model, str(checkpoint), resolve({"memory": "4GiB"}), Output(), chat=False) as session:
        assert sum("dashboard" in notice for notice in session.notices) == 1
    assert "dashboard cannot look on" in capsys.readouterr().err


def test_looking_needs_no_torch_and_no_window_library() -> None:
    script = (
        "import sys; from rimuru_cli.main import main; code = main(['dashboard', '--once']); "
        "print(code, [name for name in ('torch', 'textual', 'huggingface_hub') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "3 []\n"
