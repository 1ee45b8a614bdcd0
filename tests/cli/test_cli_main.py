"""The command line as a whole, in this process: exit codes, streams, help, bad input. The engine is a fake."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_cli import fake_loader
from fake_engine import FakeEngine, FakeSpeech
from typer.testing import CliRunner

from rimuru_cli import __version__
from rimuru_cli.chat import loading
from rimuru_cli.main import app, main
from rimuru_cli.settings import Settings

Cli = Callable[..., tuple[int, str, str]]


class Stdin(io.TextIOWrapper):
    """Standard input with prepared bytes; a terminal if there are none."""

    def __init__(self, raw: bytes | None) -> None:
        super().__init__(io.BytesIO(raw or b""), encoding="utf-8")
        self.terminal = raw is None

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run rimuru: (exit code, stdout, stderr)."""

    def run(
        *arguments: str, stdin: bytes | None = None, engine: FakeEngine | None = None, speech: FakeSpeech | None = None
    ) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", Stdin(stdin))
        monkeypatch.setattr(loading, "load_model", fake_loader(engine or FakeEngine(), speech, ("a small model.",)))
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_version_and_help(cli: Cli) -> None:
    assert cli("--version")[:2] == (0, f"rimuru {__version__}\n")
    for flag in ("-h", "--help"):
        code, out, _ = cli(flag)
        assert code == 0 and all(word in out for word in ("chat", "run", "profile-hotset", "bench", "config", "doctor", "Talk", "Tune"))
    code, out, err = cli()
    assert (code, err) == (2, "") and "Usage" in out


@pytest.mark.parametrize(
    "command",
    "chat,run,profile-hotset,config,doctor,bench,bench allocator,bench decode,bench pp,bench tg,bench link,bench kernels".split(","),
)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_command_has_help(command: str, flag: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), flag], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0 and result.stderr == ""
    assert "Usage" in result.stdout
    if command != "bench":
        assert result.stdout.count("[default: (dynamic)]") == 0
    if command in ("chat", "run"):
        assert "--memory" in result.stdout and "--vram" in result.stdout and "org/name@revision" in result.stdout.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cht",), "chat"),
        (("run",), "MODEL"),
        (("run", "m", "x", "--nonsense"), "--nonsense"),
        (("run", "m", "x", "--temprature", "1"), "--temperature"),
        (("run", "m", "x", "--top-p", "1.5"), "--top-p"),
        (("run", "m", "x", "--max-tokens", "0"), "--max-tokens"),
        (("run", "m", "x", "--memory", "lots"), "8GiB"),
        (("chat", "m", "--vram", "0%"), "--memory"),
        (("bench", "decode", "--residency", "0"), "--residency"),
        (("profile-hotset", "m", "--split", "1"), "--split"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], words: str, cli: Cli) -> None:
    code, out, err = cli(*arguments, stdin=b"x")
    assert (code, out) == (2, "") and err.startswith("error: ") and words in err
    code, out, err = cli(*arguments, "--json", stdin=b"x")
    error = json.loads(out)["error"]
    assert code == error["exit_code"] == 2 and err == ""


def test_a_comparison_with_a_model_that_is_not_there(cli: Cli) -> None:
    code, out, err = cli("bench", "decode", "--vs", "llama")
    assert (code, out) == (3, "") and err.startswith("error: ") and "llama" in err


def test_json_after_a_double_dash_is_a_prompt(cli: Cli) -> None:
    engine = FakeEngine()
    assert cli("run", "m", "--", "--json", engine=engine)[1] == "Hello there.\n"
    assert engine.submitted[0][0] == "<user>--json\n<assistant>"


def test_run_prints_the_answer_only(cli: Cli) -> None:
    engine = FakeEngine(notices=("pool reduced",))
    code, out, err = cli("run", "m", "hi", "--system", "be kind", engine=engine)
    assert (code, out) == (0, "Hello there.\n")
    assert "note: pool reduced" in err and "note: a small model." in err and "TTFT" in err and "\x1b" not in err
    assert engine.closed and engine.submitted[0][0] == "<system>be kind\n<user>hi\n<assistant>"


@pytest.mark.parametrize("arguments", [("run", "m", "-"), ("run", "m"), ("chat",), ("chat", "m")])
def test_the_prompt_may_come_from_a_pipe(arguments: tuple[str, ...], cli: Cli) -> None:
    engine = FakeEngine()
    code, out, _ = cli(*arguments, stdin="\ufefftwo\r\nlines ü\n".encode(), engine=engine)
    assert (code, out) == (0, "Hello there.\n")
    assert engine.submitted[0][0] == "<user>two\r\nlines ü\n<assistant>"


def test_a_missing_prompt_at_a_terminal(cli: Cli) -> None:
    code, out, err = cli("run", "m")
    assert (code, out) == (2, "") and "prompt is missing" in err


@pytest.mark.parametrize("arguments", [("run", "m", "-"), ("chat",)])
def test_bad_standard_input_is_refused_before_anything_is_loaded(arguments: tuple[str, ...], cli: Cli) -> None:
    engine = FakeEngine()
    code, out, err = cli(*arguments, stdin=b"ab\xffcd", engine=engine)
    assert (code, out) == (2, "") and "byte 2" in err and "0xff" in err
    for empty in (b"", b" \n"):
        code, out, err = cli(*arguments, stdin=empty, engine=engine)
        assert (code, out) == (2, "") and "empty" in err
    assert not engine.closed, "no model was loaded"


@pytest.mark.parametrize("blank", ["", " ", " \n\t"])
def test_a_blank_prompt_is_refused_before_anything_is_loaded(blank: str, cli: Cli) -> None:
    engine = FakeEngine()
    code, out, err = cli("run", "m", blank, engine=engine)
    assert (code, out) == (2, "") and "empty" in err and not engine.closed


@pytest.mark.parametrize("arguments", [("run", "m", "hi"), ("chat",)])
def test_a_cut_answer_outside_a_talk_is_not_told_of_slash_commands(arguments: tuple[str, ...], cli: Cli) -> None:
    code, _, err = cli(*arguments, stdin=b"hi", engine=FakeEngine(context_limit=25))
    assert code == 0 and "context of 25 tokens is full" in err and "--context" in err and "/clear" not in err


def test_run_json_has_everything(cli: Cli) -> None:
    code, out, err = cli("run", "m", "hi", "--json", engine=FakeEngine(reply=lambda p: "<think>hm</think>ü!", notices=("n",)))
    result = json.loads(out)
    assert code == 0 and err == ""
    assert (result["text"], result["reasoning"], result["finish_reason"], result["model"]) == ("ü!", "hm", "stop", "fake-model")
    assert bytes(result["token_ids"]).decode() == "<think>hm</think>ü!" and result["prompt_tokens"] == len("<user>hi\n<assistant>")
    assert result["timings"]["ttft_seconds"] == 0.5 and result["expert_hit_rate"] == 0.75
    assert result["pool"]["bytes_by_kind"]["expert"] == 600 and result["notices"] == ["n", "a small model."]


def test_run_json_stream_is_a_line_an_event(cli: Cli) -> None:
    _, out, _ = cli("run", "m", "hi", "--json", "--stream", engine=FakeEngine(reply=lambda p: "<think>hm</think>a\nb"))
    events = [json.loads(line) for line in out.splitlines()]
    assert "".join(e["text"] for e in events if e["event"] == "text") == "a\nb"
    assert "".join(e["text"] for e in events if e["event"] == "reasoning") == "hm"
    assert [e["event"] for e in events].index("result") == len(events) - 1 and events[-1]["text"] == "a\nb"


def test_run_raw_uses_no_template_and_no_stream_prints_at_the_end(cli: Cli) -> None:
    engine, speech = FakeEngine(reply=lambda p: "x\n"), FakeSpeech()
    assert cli("run", "m", "Once upon", "--raw", "--no-stream", engine=engine, speech=speech)[1] == "x\n"
    assert engine.submitted[0][0] == "Once upon" and speech.rendered == []


def test_run_passes_sampling_and_stops(cli: Cli) -> None:
    engine = FakeEngine()
    flags = (
        "--temperature 0 --max-tokens 8 --seed 4 --top-k 3 --min-p 0.1 --repetition-penalty 1.1 --presence-penalty 1 --frequency-penalty -1"
    )
    code, out, _ = cli("run", "m", "hi", *flags.split(), "--stop", "lo", "--stop", "x", engine=engine)
    params = engine.submitted[0][1]
    assert (code, out) == (0, "Hel\n")
    assert (params.temperature, params.max_tokens, params.seed, params.top_k, params.top_p) == (0.0, 8, 4, 3, 0.9)
    assert (params.min_p, params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (0.1, 1.1, 1.0, -1.0)
    assert params.stop == ("lo", "x")


def test_an_empty_stop_string_is_refused(cli: Cli) -> None:
    assert cli("run", "m", "hi", "--stop", "")[0] == 2


def test_too_long_a_prompt_says_the_numbers(cli: Cli) -> None:
    for extra in ((), ("--raw",)):
        code, out, err = cli("run", "m", "x" * 90, *extra, engine=FakeEngine(context_limit=50))
        assert (code, out) == (6, "") and "50 tokens" in err and "--context" in err and "/clear" not in err
    code, out, _ = cli("run", "m", "x" * 90, "--json", engine=FakeEngine(context_limit=50))
    assert code == json.loads(out)["error"]["exit_code"] == 6


def test_a_failing_engine_is_closed_and_explained_without_traceback(cli: Cli) -> None:
    engine = FakeEngine(fail_at=4)
    code, out, err = cli("run", "m", "hi", engine=engine)
    assert (code, out) == (1, "Hel\n") and "the fake engine broke" in err and "Traceback" not in err
    assert engine.closed and not engine.has_work


def test_system_prompt_from_a_file(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    file.write_bytes("\ufeffsei nett ü\n".encode())
    engine = FakeEngine()
    assert cli("chat", "--system-file", str(file), stdin=b"x", engine=engine)[0] == 0
    assert engine.submitted[0][0].startswith("<system>sei nett ü\n")
    assert cli("chat", "--system-file", str(file), "--system", "x", stdin=b"x")[0] == 2
    assert cli("chat", "--system-file", str(tmp_path / "none"), stdin=b"x")[0] == 3
    assert cli("chat", "--system-file", str(tmp_path), stdin=b"x")[0] == 2
    file.write_bytes(b"abc\xc3")
    code, _, err = cli("chat", "--system-file", str(file), stdin=b"x")
    assert code == 2 and "byte 3" in err and "system.txt" in err


def test_thinking_flags(cli: Cli) -> None:
    speech = FakeSpeech(can_think=True)
    assert cli("run", "m", "x", "--no-think", speech=speech)[0] == 0
    assert speech.rendered[0][1] is False
    assert "do nothing" in cli("run", "m", "x", "--think")[2]


def test_settings_reach_the_loader(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str | None, Settings]] = []

    def load(name: str | None, settings: Settings, out: Any, *, chat: bool) -> loading.LoadedModel:
        seen.append((name, settings))
        return loading.LoadedModel(FakeEngine(), FakeSpeech())

    monkeypatch.setattr("rimuru_cli.chat.talk.loading", loading)
    monkeypatch.setenv("RIMURU_MODEL", "org/name")
    for arguments in (("chat", "--vram", "50%"), ("run", "m", "x", "--memory", "2GiB", "--context", "99")):
        monkeypatch.setattr(sys, "stdin", Stdin(b"x"))
        monkeypatch.setattr(loading, "load_model", load)
        assert main(arguments) == 0
    assert [name for name, _ in seen] == ["org/name", "m"]
    assert seen[0][1]["memory"].share == 0.5 and seen[1][1]["memory"].num_bytes == 2 << 30 and seen[1][1]["context"] == 99


def test_unknown_keys_in_the_settings_file_are_reported(cli: Cli, home: Path) -> None:
    (home / "config").mkdir(parents=True)
    (home / "config" / "config.toml").write_text("max_tokns = 3\nmax-tokens = 2\n", encoding="utf-8")
    code, out, err = cli("run", "m", "x")
    assert (code, out) == (0, "He\n") and "'max_tokns'" in err and "'max_tokens'" in err


def test_config_shows_origins(cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "config").mkdir(parents=True)
    file = home / "config" / "config.toml"
    file.write_text('memory = "2KiB"\nbogus = 1\n', encoding="utf-8")
    monkeypatch.setenv("RIMURU_TOP_K", "7")
    code, out, err = cli("config")
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0 and "'bogus'" in err
    assert rows["top_k"].split()[1:] == ["7", "RIMURU_TOP_K"] and rows["memory"].endswith(str(file)) and rows["seed"].endswith("default")
    code, out, _ = cli("config", "--json")
    data = json.loads(out)
    settings = {row["name"]: row for row in data["settings"]}
    assert data["path"] == str(file) and settings["memory"]["value"] == 2048 and settings["top_k"]["source"] == "variable"
    assert cli("config", "--path")[1] == f"{file}\n"
    monkeypatch.setenv("RIMURU_TOP_K", "seven")
    code, out, err = cli("config")
    assert (code, out) == (2, "") and "RIMURU_TOP_K" in err


def test_a_loader_that_fails_in_any_way_is_explained(cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from rimuru_models.errors import CheckpointError, NotFoundError

    cases = [(CheckpointError("bad.safetensors: tensor x"), 1), (NotFoundError("gone"), 3), (KeyboardInterrupt(), 130), (MemoryError(), 6)]
    for error, expected in cases:

        def load(*args: object, error: BaseException = error, **kwargs: object) -> loading.LoadedModel:
            raise error

        monkeypatch.setattr(loading, "load_model", load)
        assert main(["run", "m", "x"]) == expected
        captured = capsys.readouterr()
        assert captured.out == "" and "Traceback" not in captured.err and captured.err.strip()
        assert main(["run", "m", "x", "--json"]) == expected
        assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == expected
