"""`rimuru list`, `show`, `rm` and `fit` as a person meets them: words, streams, exit codes."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from cached_models import files_of, put_in_cache
from huggingface_hub import constants
from loopback_hub import LoopbackHub
from loopback_models import CONFIG, model_files
from quantised import KINDS, foreign_imports, write_quantised_checkpoint

from rimuru_cli import output
from rimuru_cli.commands import _fit, _library
from rimuru_cli.commands._library import age
from rimuru_cli.fit import nvml
from rimuru_cli.hub.usage import record_use
from rimuru_cli.main import main
from rimuru_cli.output import Output

GIB = 1 << 30
Cli = Callable[..., tuple[int, str, str]]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder, work = tmp_path / "hf" / "hub", tmp_path / "here"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(nvml, "list_cards", list)
    monkeypatch.delenv("TERM", raising=False)
    return folder


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run rimuru: (exit code, stdout, stderr). `typed`: what a person at a terminal types; None: nobody is there."""

    def run(*arguments: str, typed: str | None = None) -> tuple[int, str, str]:
        if typed is None:
            monkeypatch.setattr(sys, "stdin", io.StringIO())
            code = main(arguments)
            captured = capsys.readouterr()
            return code, captured.out, captured.err
        out, err = Terminal(), Terminal()
        with monkeypatch.context() as streams:
            streams.setattr(sys, "stdin", Terminal(typed))
            streams.setattr(sys, "stdout", out)
            streams.setattr(sys, "stderr", err)
            code = main(arguments)
        return code, out.getvalue(), err.getvalue()

    return run


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with LoopbackHub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server


def in_folder(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_an_empty_library_says_what_to_type_next(cli: Cli, cache: Path) -> None:
    code, out, err = cli("list")
    assert (code, out) == (0, "No models yet.\n")
    assert "rimuru chat" in err and "rimuru pull" in err and str(cache) in err
    code, out, err = cli("list", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"models": [], "not_shown": 0, "cache": str(cache)}


def test_list_shows_what_runs_and_counts_the_rest(cli: Cli, cache: Path) -> None:
    put_in_cache(cache, "org/small", model_files(extra=False))
    put_in_cache(cache, "org/bert", {"config.json": json.dumps(CONFIG | {"architectures": ["BertModel"]}).encode()})
    code, out, err = cli("list")
    assert code == 0
    assert "org/small" in out and "org/bert" not in out
    assert all(word in out for word in ("F32", "Mixtral", "ready", "no", "just now"))
    assert "1 more model that rimuru cannot run: rimuru list --all" in err
    code, out, err = cli("list", "--all")
    assert "org/bert" in out and "unusable: the architecture BertModel is not supported" in out
    assert "list --all" not in err


def test_list_as_json(cli: Cli, cache: Path) -> None:
    snapshot = put_in_cache(cache, "org/small", model_files(extra=False))
    value = json.loads(cli("list", "--json")[1])
    (model,) = value["models"]
    assert (model["name"], model["path"], model["revision"], model["refs"]) == ("org/small", str(snapshot), snapshot.name, ["main"])
    assert (model["usable"], model["status"], model["hotset_profile"], model["why_not"]) == (True, "ready", False, None)
    assert model["size_bytes"] == sum(map(len, model_files(extra=False).values()))
    assert (model["precision"], model["architecture"], model["experts"], model["top_k"]) == ("F32", "MixtralForCausalLM", 4, 2)
    assert datetime.fromisoformat(model["last_used"]).tzinfo is not None


@pytest.mark.parametrize(("dense_too", "words"), [(True, "int4"), (False, "experts int4, dense F32")])
def test_list_names_the_precision_of_experts_dense_part_and_kv(dense_too: bool, words: str, cli: Cli, tmp_path: Path) -> None:
    with foreign_imports():
        folder, _ = write_quantised_checkpoint(
            tmp_path, "qwen3_moe", KINDS["int4"], moe_intermediate_size=64, keep=lambda name: not dense_too and ".experts." not in name
        )
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    record_use(folder)
    _, out, err = cli("list")
    assert f"  {words}  " in out
    assert "(KV) are F32 on a CPU" in err and "--kv q8" in err
    (model,) = json.loads(cli("list", "--json")[1])["models"]
    assert (model["precision"], model["dense_precision"]) == ("int4", "int4" if dense_too else "F32")
    assert model["kv_precision"] == {"cpu": "F32", "gpu": "BF16" if dense_too else "F32"}


def test_an_incomplete_model_is_listed_with_what_to_type(cli: Cli, cache: Path) -> None:
    files = model_files(extra=False)
    del files["model-00002-of-00003.safetensors"]
    put_in_cache(cache, "org/begun", files)
    (cache / "models--org--begun" / "blobs" / "x.incomplete").write_bytes(b"x" * 2048)
    _, out, err = cli("list")
    assert "incomplete: it lacks model-00002-of-00003.safetensors; 2.0 KiB of an unfinished download" in out
    assert "rimuru pull org/begun goes on with it" in err


@pytest.mark.parametrize("columns", [20, 60, 100, 400])
def test_a_narrow_terminal_gets_less(cli: Cli, cache: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    put_in_cache(cache, "org/a-rather-long-name", model_files())
    monkeypatch.setattr(_library, "terminal_columns", lambda stream: columns)
    out = cli("list", typed="")[1]
    assert "org/a-rather-long-name" in out and "ready" in out
    if columns > 30:
        assert max(map(len, out.splitlines())) <= columns
    assert ("hotset" in out) == (columns > 80)


def test_names_cannot_smuggle_escape_codes(cli: Cli, cache: Path) -> None:
    config = CONFIG | {"architectures": ["Evil\x1b[31mModel"]}
    put_in_cache(cache, "org/evil", model_files(extra=False) | {"config.json": json.dumps(config).encode()})
    out = cli("list", "--all", typed="")[1]
    assert "org/evil" in out and "\x1b" not in out


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "just now"),
        (59, "just now"),
        (61, "1 min ago"),
        (3599, "59 min ago"),
        (3600, "1 h ago"),
        (86399, "23 h ago"),
        (86400, "1 day ago"),
        (10 * 86400, "10 days ago"),
    ],
)
def test_ages(seconds: int, words: str) -> None:
    now = datetime(2026, 6, 1, tzinfo=UTC)
    assert age(now - timedelta(seconds=seconds), now) == words


def test_ages_of_long_ago() -> None:
    assert age(None) == "-"
    assert age(datetime(2020, 1, 2, 12, tzinfo=UTC)) == "2020-01-02"


def test_show_a_cached_model(cli: Cli, cache: Path) -> None:
    snapshot = put_in_cache(cache, "org/small", model_files(extra=False))
    code, out, _ = cli("show", "org/small")
    assert code == 0
    for words in (
        "MixtralForCausalLM",
        "Apache-2.0",
        "4 a layer, 2 a token",
        "experts",
        "P_e, expert page",
        "KV cache a token",
        str(snapshot),
    ):
        assert words in out
    assert "hotset profile: none" in out and "model-00001-of-00003.safetensors" in out
    assert "P_s" not in out and "hotset" in out
    shard = hashlib.sha256(model_files()["model-00001-of-00003.safetensors"]).hexdigest()
    assert shard in out
    on_screen = cli("show", "org/small", typed="")[1]
    assert shard[:12] in on_screen and shard not in on_screen
    facts = json.loads(cli("show", "org/small", "--json")[1])
    assert shard in [file["sha256"] for file in facts["files"]]
    assert facts["bytes"] == sum(facts["bytes_by_part"].values())
    assert facts["pages"]["cpu"]["P_e"] == 32 * 48 * 4 == facts["pages"]["gpu"]["P_e"]
    assert facts["pages"]["cpu"]["kv_bytes_per_token"] == 2 * 2 * 16 * 4


def test_show_and_fit_before_a_download(cli: Cli, hub: LoopbackHub, cache: Path) -> None:
    hub.add("org/far", model_files())
    facts = json.loads(cli("show", "org/far", "--json")[1])
    assert (facts["place"], facts["path"], facts["architecture"]) == ("hub", None, "MixtralForCausalLM")
    code, out, err = cli("fit", "org/far")
    assert code == 0 and "runs on the CPU" in out and "rimuru pull org/far" in err
    assert not cache.exists()


@pytest.mark.parametrize("command", ["show", "fit"])
@pytest.mark.parametrize("name", ["./nothing", "org/nothing", "nothing"])
def test_what_is_not_here_is_not_found(cli: Cli, command: str, name: str) -> None:
    code, out, err = cli(command, name)
    assert (code, out) == (3, "") and err.startswith("error: ") and "hint:" in err
    assert json.loads(cli(command, name, "--json")[1])["error"]["exit_code"] == 3


def test_rm_asks_and_takes_no_for_an_answer(cli: Cli, cache: Path) -> None:
    put_in_cache(cache, "org/small", model_files())
    for typed in ("n\n", "\n", "", "yess\n", "maybe\n"):
        code, out, err = cli("rm", "org/small", typed=typed)
        assert (code, out) == (1, "")
        assert "Delete? [y/N]" in err and "Would free" in err and "Nothing was deleted." in err
    assert files_of(cache)
    code, out, _ = cli("rm", "org/small", typed="Y\n")
    assert code == 0 and "Deleted org/small" in out and "Freed" in out
    assert files_of(cache) == set()


def test_rm_refuses_where_nobody_can_be_asked(cli: Cli, cache: Path) -> None:
    put_in_cache(cache, "org/small", model_files())
    code, out, err = cli("rm", "org/small")
    assert (code, out) == (2, "") and "--yes" in err and "frees" in err
    code, out, _ = cli("rm", "org/small", "--json")
    assert code == 2 and json.loads(out)["error"]["hint"] == "add --yes to delete it"
    assert files_of(cache)


def test_rm_yes_and_dry_run(cli: Cli, cache: Path) -> None:
    main_one = put_in_cache(cache, "org/small", model_files(seed=1, shards=1))
    tagged = put_in_cache(cache, "org/small", model_files(seed=2, shards=1), ref="v2")
    before = files_of(cache)
    code, out, _ = cli("rm", "org/small@v2", "--dry-run")
    assert code == 0 and "Would delete org/small@v2" in out and "stay: other revisions or models share these files" in out
    assert files_of(cache) == before
    value = json.loads(cli("rm", "org/small@v2", "--yes", "--json")[1])
    assert value["deleted"] is True and value["folders"] == [str(tagged)]
    assert value["freed_bytes"] > 0 and value["kept_bytes"] > 0
    assert not tagged.exists() and main_one.exists()


def test_rm_leaves_local_folders_alone(cli: Cli, tmp_path: Path) -> None:
    folder = in_folder(tmp_path / "mine", model_files(extra=False))
    code, _, err = cli("rm", str(folder), "--yes")
    assert code == 2 and "delete it by hand" in err and folder.exists()


def test_fit_a_local_folder(cli: Cli, tmp_path: Path) -> None:
    folder = in_folder(tmp_path / "Größe", model_files(extra=False))
    code, out, err = cli("fit", str(folder))
    assert (code, err) == (0, "")
    for words in (
        "Größe: Mixtral",
        "runs on the CPU",
        "100 %",
        "tokens/s",
        "131,072",
        "Largest context: 256 tokens",
        "Assumed:",
        "█ experts",
    ):
        assert words in out
    assert "\x1b" not in out


def test_fit_that_does_not_is_exit_code_six(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = in_folder(tmp_path / "m", model_files(extra=False))
    code, out, _ = cli("fit", str(folder), "--vram", "100MiB")
    assert code == 6 and "does not run here" in out and "hint: Give at least --vram" in out and "why:" in out
    code, out, _ = cli("fit", str(folder), "--vram", "100MiB", "--json")
    value = json.loads(out)
    assert code == 6 and value["runs"] is False and "needs at least" in value["problem"]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=GIB, available=1 << 20))
    code, out, _ = cli("fit", str(folder))
    assert code == 6 and "No GPU is used: no NVIDIA driver answers here" in out


def test_fit_as_json_for_an_imagined_machine(cli: Cli, tmp_path: Path) -> None:
    folder = in_folder(tmp_path / "m", model_files(extra=False))
    code, out, err = cli("fit", str(folder), "--vram", "12GiB", "--ram", "32GiB", "--link", "25", "--json")
    value = json.loads(out)
    assert (code, err, value["runs"], value["device"]) == (0, "", True, "gpu")
    gpu = value["machine"]["gpu"]
    assert (gpu["vram_cap_bytes"], gpu["link_gb_per_s"], value["machine"]["ram_bytes"]) == (12 * GIB, 25, 32 * GIB)
    assert [row["context"] for row in value["contexts"]] == [0, 8192, 32768, 131072]
    assert value["contexts"][0]["resident_share"] == 1.0
    assert [row["limit"] for row in value["contexts"]] == [None, "model", "model", "model"]
    assert value["largest_context"] == 256 == value["model_context"]
    assert value["precision"] == "F32" and value["stored_bytes"] > 0
    for row in (value["contexts"][0], value["prompts"][0]):
        low, high = (rate for key, rate in row.items() if "tokens_per_s" in key)
        assert low is None or 0 < low <= high


@pytest.mark.parametrize("flags", [["--vram", "much"], ["--link", "25"], ["--ram", "0"], ["--vram", "10%"]])
def test_flags_that_make_no_sense(cli: Cli, tmp_path: Path, flags: list[str]) -> None:
    folder = in_folder(tmp_path / "m", model_files(extra=False))
    code, out, err = cli("fit", str(folder), *flags)
    assert (code, out) == (2, "") and flags[0] in err


def test_the_chart_has_colours_only_on_a_terminal_and_letters_where_blocks_cannot_be(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = in_folder(tmp_path / "m", model_files(extra=False))
    monkeypatch.setenv("TERM", "xterm")
    out = cli("fit", str(folder), typed="")[1]
    assert "\x1b[" in out and "▓" in out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in cli("fit", str(folder), typed="")[1]
    monkeypatch.setenv("TERM", "dumb")
    out = cli("fit", str(folder), typed="")[1]
    assert "\x1b" not in out and "= weights and workspace" in out
    assert not set("▓█▒░") & set(out)


@pytest.mark.parametrize("columns", [1, 20, 80, 500])
def test_the_chart_at_any_width(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    folder = in_folder(tmp_path / "m", model_files(extra=False))
    monkeypatch.setattr(_fit, "terminal_columns", lambda stream: columns)
    code, out, _ = cli("fit", str(folder))
    bars = [line for line in out.splitlines() if line.strip().startswith("0  ") and set("▓█▒░") & set(line)]
    assert code == 0 and len(bars) == 1
    assert 8 <= sum(letter in "▓█▒░" for letter in bars[0]) <= 64


@pytest.mark.parametrize(
    ("encoding", "term", "blocks"),
    [("UTF-8", None, True), ("utf8", "xterm", True), ("ANSI_X3.4-1968", None, False), ("UTF-8", "dumb", False)],
)
def test_blocks_are_for_terminals_that_can_show_them(
    monkeypatch: pytest.MonkeyPatch, encoding: str, term: str | None, blocks: bool
) -> None:
    monkeypatch.setattr(output.locale, "getencoding", lambda: encoding)
    monkeypatch.setattr(output.sys, "platform", "linux")
    if term is not None:
        monkeypatch.setenv("TERM", term)
    assert output.shows_blocks() is blocks
    monkeypatch.setattr(output.sys, "platform", "win32")
    assert output.shows_blocks() is (term != "dumb")


def test_styles_are_ours_and_escape_codes_of_others_are_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Output()
    out.styled_line(("a\x1b[31m", "green"), ("b", None))
    assert capsys.readouterr().out == "a\x1b[31mb\n", "in a pipe bytes matter"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    out.styled_line(("a\x1b[31m", "green"), ("b", None))
    assert terminal.getvalue() == "\x1b[32ma\ufffd[31m\x1b[0mb\n"


def test_ranges_in_words() -> None:
    def words(low: float | None, high: float | None) -> str:
        return _fit.rate_range({"tokens_per_s_low": low, "tokens_per_s_high": high})

    assert words(None, None) == "-"
    assert words(7.83, 24.9) == "7.8 to 25"
    assert words(103.4, 2951.0) == "103 to 2,951"
    assert words(0.049, 0.051) == "0.049 to 0.051"
    assert words(12.01, 12.02) == "12"


def test_doctor_keeps_what_it_measured(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from rimuru_cli.bench import doctor, link
    from rimuru_cli.fit.measured import load_rates

    def report(**anything: Any) -> dict[str, Any]:
        best = dict.fromkeys(("host_to_device", "device_to_host", "host_to_device_pageable", "copy_on_device")) | {"host_read": 33.0}
        return {"bench": "link", "device": None, "rows": [], "best": best, "notices": []}

    monkeypatch.setattr(doctor, "run_link_bench", report)
    assert link.HOST_READ
    assert cli("doctor", "--quick")[0] == 0
    assert load_rates() is None
    assert cli("doctor")[0] == 0
    rates = load_rates()
    assert rates is not None and rates.ram_gb_per_s == 33.0
    folder = in_folder(Path.cwd() / "m", model_files(extra=False))
    assert json.loads(cli("fit", str(folder), "--json")[1])["machine"]["ram_gb_per_s"] == 33.0


def test_interrupting_the_question_is_130(cli: Cli, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_cache(cache, "org/small", model_files())

    class Interrupted(Terminal):
        def readline(self, size: int = -1) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(sys, "stdin", Interrupted())
    assert main(["rm", "org/small"]) == 130
    assert files_of(cache)


def test_a_cache_that_cannot_be_read_is_empty(cli: Cli, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where a folder should be", encoding="utf-8")
    assert cli("list")[:2] == (0, "No models yet.\n")
    assert cli("rm", "org/small")[0] == 3
