"""`rimuru pull` and `rimuru verify` as a person or a script meets them, in this process."""

from __future__ import annotations

import errno
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from loopback_hub import GOOD_TOKEN, Fault, LoopbackHub
from loopback_models import model_files, wanted
from loopback_setup import assert_pulled, connect

from rimuru_cli.commands import _pulling
from rimuru_cli.hub import download_plan, patience
from rimuru_cli.hub.download import Status
from rimuru_cli.hub.fit import FitVerdict
from rimuru_cli.main import main

FILES = model_files()
SHARD = "model-00001-of-00003.safetensors"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with LoopbackHub(store=True) as hub:
        hub.add("org/name", FILES)
        connect(monkeypatch, hub, tmp_path / "hub", read_seconds=2)
        monkeypatch.setattr(patience, "FIRST_WAIT_SECONDS", 0.001)
        monkeypatch.chdir(tmp_path)
        yield hub


@pytest.fixture(autouse=True)
def fits(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = FitVerdict(True, "cpu", "runs on the CPU", None, None, {"runs": True})
    monkeypatch.setattr(_pulling, "fits_here", lambda name, config, index=None: verdict)


def does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = FitVerdict(False, None, "does not run", "org/name needs 99 GiB of memory.", "Try a smaller model.", {"runs": False})
    monkeypatch.setattr(_pulling, "fits_here", lambda name, config, index=None: verdict)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def events(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_a_pipe_gets_the_folder_and_nothing_else(server: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "pull", "org/name")
    assert (code, err) == (0, "")
    folder = Path(out.removesuffix("\n"))
    assert_pulled(folder, FILES)
    assert run(capsys, "pull", "org/name") == (0, out, "")
    assert run(capsys, "pull", f"org/name@{folder.name}") == (0, out, "")


def test_json_is_one_object_a_line(server: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "pull", "org/name", "--json")
    assert (code, err) == (0, "")
    told = events(out)
    total = sum(len(data) for data in wanted(FILES).values())
    plan, result = told[0], told[-1]
    assert (
        plan["event"] == "plan" and plan["total_bytes"] == total == plan["missing_bytes"] and plan["architecture"] == "MixtralForCausalLM"
    )
    assert plan["fit"] == {"runs": True} and plan["objections"] == []
    progress = [event for event in told if event["event"] == "progress"]
    assert progress[-1]["done_bytes"] == progress[-1]["total_bytes"] == total
    assert {event["name"] for event in told if event["event"] == "file"} == set(wanted(FILES))
    assert result["event"] == "result" and result["downloaded_bytes"] == total and not result["up_to_date"]
    assert_pulled(Path(result["path"]), FILES)
    assert {file["name"]: file["num_bytes"] for file in result["files"]} == {name: len(data) for name, data in wanted(FILES).items()}
    again = events(run(capsys, "pull", "org/name", "--json")[1])[-1]
    assert again["up_to_date"] and again["downloaded_bytes"] == 0 and again["path"] == result["path"]


def test_json_errors_are_lines_too(server: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    server.lasting["tokenizer.json"] = Fault("corrupt", at=0)
    code, out, _ = run(capsys, "pull", "org/name", "--json")
    told = events(out)
    assert code == 4 and told[0]["event"] == "plan" and told[-1]["error"]["exit_code"] == 4
    assert "tokenizer.json" in told[-1]["error"]["message"]


@pytest.mark.parametrize(
    ("state", "token", "code", "words"),
    [
        ({"gated": True}, None, 3, "is gated"),
        ({"gated": True}, "hf_of_somebody", 3, "no access"),
        ({"private": True}, None, 3, "or it is private"),
        ({"disabled": True}, None, 3, "disabled"),
        ({}, "hf_expired", 3, "does not accept your token"),
    ],
)
def test_closed_doors(
    server: LoopbackHub,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    state: dict[str, bool],
    token: str | None,
    code: int,
    words: str,
) -> None:
    vars(server.repositories["org/name"]).update(state)
    monkeypatch.setenv("RIMURU_DEBUG", "1")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    found, out, err = run(capsys, "pull", "org/name")
    assert (found, out) == (code, "") and words in err and "hint:" in err
    assert token is None or token not in err, "not even with a traceback"


def test_what_is_not_there(server: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    for name, code in (("org/nothing", 3), ("org/name@v9", 3), ("nothing", 3), ("./nothing", 3), ("a b", 2), ("", 2), ("org/name@", 2)):
        assert run(capsys, "pull", name)[0] == code, name
    assert run(capsys, "pull")[0] == 2
    code, _, err = run(capsys, "pull", "https://huggingface.co/org/name/tree/main")
    assert code == 2 and "did you mean org/name@main?" in err


def test_pickles_are_refused(server: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    server.add("org/pickle", {"config.json": b"{}", "pytorch_model.bin": b"x" * 300})
    code, _, err = run(capsys, "pull", "org/pickle", "--yes")
    assert code == 1 and "can run any code" in err
    assert not any(request.file for request in server.log)


def test_offline(server: LoopbackHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, out, err = run(capsys, "pull", "org/name")
    assert (code, out) == (1, "") and "HF_HUB_OFFLINE is set" in err and "unset" in err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    _, folder, _ = run(capsys, "pull", "org/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, out, err = run(capsys, "pull", "org/name")
    assert (code, out) == (0, folder) and "there may be a newer version" in err


def test_no_network(server: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    _, folder, _ = run(capsys, "pull", "org/name")
    server.close()
    code, out, err = run(capsys, "pull", "org/name")
    assert (code, out) == (0, folder) and "cannot be reached" in err
    code, out, err = run(capsys, "pull", "org/other")
    assert (code, out) == (1, "") and "cannot be reached" in err and "HF_ENDPOINT" in err


def test_rate_limited(server: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    server.lasting_api = Fault("status", status=429, headers={"Retry-After": "7200"})
    code, _, err = run(capsys, "pull", "org/name")
    assert code == 1 and "limits how often" in err and "2.0 h" in err and "auth login" in err


def test_no_space(server: LoopbackHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil._ntuple_diskusage(10**9, 10**9, 1000)  # type: ignore[attr-defined]
    monkeypatch.setattr(download_plan.shutil, "disk_usage", lambda path: usage)
    code, _, err = run(capsys, "pull", "org/name", "--yes")
    missing = sum(len(data) for data in wanted(FILES).values()) - 1000
    assert code == 5 and f"({missing} bytes) are missing" in err and "HF_HOME" in err


def test_a_renamed_model(server: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    server.add("org/old", {}, renamed_to="org/name")
    code, out, err = run(capsys, "pull", "org/old")
    assert code == 0 and "models--org--name" in out and "org/old is now called org/name" in err
    assert events(run(capsys, "pull", "org/old", "--json")[1])[-1]["model"] == "org/name"


def test_without_a_terminal_nobody_is_asked(
    server: LoopbackHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    does_not_fit(monkeypatch)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    code, out, err = run(capsys, "pull", "org/name")
    assert (code, out) == (6, "") and "needs 99 GiB of memory. Nothing was downloaded." in err
    assert "hint:  Try a smaller model; --yes downloads it anyway" in err
    code, out, _ = run(capsys, "pull", "org/name", "--json")
    assert code == 6 and events(out)[-1]["error"]["exit_code"] == 6
    assert not any(request.file == "tokenizer.json" for request in server.log)
    code, out, err = run(capsys, "pull", "org/name", "--yes")
    assert code == 0 and "warning: org/name needs 99 GiB" in err
    assert run(capsys, "pull", "org/name")[0] == 0, "once it is here nothing speaks against it"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("YES\n", 0), ("n\n", 6), ("\n", 6), ("", 6)])
def test_on_a_terminal_a_person_is_asked(
    server: LoopbackHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    does_not_fit(monkeypatch)
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    assert main(["pull", "org/name"]) == code
    text = screen.getvalue()
    assert "warning: org/name needs 99 GiB of memory." in text and "anyway? [y/N]" in text
    assert ("Nothing was downloaded." in text) == (code == 6)


def test_what_a_person_sees(server: LoopbackHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["pull", "org/name"]) == 0
    text = screen.getvalue()
    assert "10 files, 195.1 KiB" in text and "runs on the CPU" in text and "architecture: MixtralForCausalLM" in text
    assert "195.1 KiB downloaded and checked." in text and "Next: rimuru chat org/name" in text
    assert "\x1b" not in text
    screen.truncate(0)
    assert main(["pull", "org/name"]) == 0
    assert "Everything is here and up to date." in screen.getvalue()


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 200])
def test_the_bar_fits_every_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from rimuru_cli import output

    monkeypatch.setattr(output, "terminal_columns", lambda stream: columns)
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    subject = _pulling.Screen(output.Output())
    status = Status(12_345_678_901, 61_066_575_872, 10**9, 3, 28, 47_400_000.0, 1028.0, 0, 0, None)
    with subject.watching():
        subject.status(status)
    line = screen.getvalue().split("\r")[1]
    assert len(line.rstrip()) < columns
    assert "20 %" in line or "11.5 GiB of 56.9 GiB" in line
    if columns >= 60:
        assert "45.2 MiB/s  17:08 left" in line


def test_rate_and_time_in_words() -> None:
    def words(rate: float | None, eta: float | None) -> str:
        return _pulling.pace(Status(0, 1, 0, 0, 1, rate, eta, 0, 0, None))

    assert words(None, None) == "-"
    assert words(2048.0, 59.6) == "2.0 KiB/s  1:00 left"
    assert words(2048.0, 3725.0) == "2.0 KiB/s  1:02:05 left"


def test_folders_and_the_demonstration_model_are_here_already(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rimuru_cli.hub import embedded

    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    assert run(capsys, "pull", str(folder)) == (0, f"{folder}\n", "")
    monkeypatch.setattr(embedded, "ensure", lambda progress: folder)
    assert run(capsys, "pull", "rimuru-demo") == (0, f"{folder}\n", "")
    assert events(run(capsys, "pull", "rimuru-demo", "--json")[1])[-1]["up_to_date"]


def test_verify(server: LoopbackHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(run(capsys, "pull", "org/name")[1].strip())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, out, err = run(capsys, "verify", "org/name")
    assert (code, err) == (0, "") and "10 files, 195.1 KiB, all as they should be" in out
    blob = (folder / SHARD).resolve()
    blob.write_bytes(bytes([blob.read_bytes()[0] ^ 1]) + blob.read_bytes()[1:])
    code, out, err = run(capsys, "verify", "org/name")
    assert code == 4 and f"{SHARD} (damaged)" in err and "rimuru pull org/name" in err and out == ""
    code, out, err = run(capsys, "verify", "org/name", "--json")
    report = json.loads(out)
    assert (code, err) == (4, "") and not report["ok"] and report["error"]["exit_code"] == 4
    assert [file["name"] for file in report["files"] if file["state"] == "damaged"] == [SHARD]
    assert run(capsys, "run", "org/name", "Hello")[0] == 3, "what is known to be damaged is not loaded"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    server.log.clear()
    assert run(capsys, "pull", "org/name")[0] == 0
    assert {request.file for request in server.bodies()} == {SHARD}
    code, out, _ = run(capsys, "verify", f"org/name@{folder.name}", "--json")
    assert code == 0 and json.loads(out)["ok"] and json.loads(out)["against"] == "manifest"


def test_verify_says_what_it_cannot_know(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, data in model_files(shards=1, extra=False).items():
        (tmp_path / name).write_bytes(data)
    code, out, err = run(capsys, "verify", str(tmp_path))
    assert code == 0 and "its headers are sound" in out and "warning: no checksum is known for" in err


def test_a_private_model_with_its_token(server: LoopbackHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    server.repositories["org/name"].private = True
    monkeypatch.setenv("HF_TOKEN", GOOD_TOKEN)
    code, out, err = run(capsys, "pull", "org/name", "--json")
    assert code == 0 and GOOD_TOKEN not in out + err


def test_offline_what_another_tool_downloaded_is_there(
    server: LoopbackHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import snapshot_download

    folder = snapshot_download("org/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, out, err = run(capsys, "pull", "org/name")
    assert (code, out) == (0, folder + "\n") and "HF_HUB_OFFLINE is set" in err and "rimuru verify org/name" in err
    told = events(run(capsys, "pull", "org/name", "--json")[1])
    assert [event["event"] for event in told] == ["notice", "result"] and told[-1]["commit"] == Path(folder).name
    (Path(folder) / SHARD).unlink()
    code, out, err = run(capsys, "pull", "org/name")
    assert (code, out) == (1, "") and "HF_HUB_OFFLINE is set" in err, "not all of it is there"


def test_what_cannot_run_is_not_what_to_type_next(
    server: LoopbackHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    does_not_fit(monkeypatch)
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    assert main(["pull", "org/name", "--yes"]) == 0
    assert "downloaded and checked" in screen.getvalue() and "Next:" not in screen.getvalue()


def test_what_another_tool_deleted_is_looked_at_anew_before_it_is_fetched_again(
    server: LoopbackHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(capsys, "pull", "org/name")[0] == 0
    shutil.rmtree(tmp_path / "hub" / "models--org--name")
    does_not_fit(monkeypatch)
    server.log.clear()
    code, out, err = run(capsys, "pull", "org/name")
    assert (code, out) == (6, "") and "needs 99 GiB of memory. Nothing was downloaded." in err
    assert not any(request.file == "tokenizer.json" for request in server.log)
    assert run(capsys, "pull", "org/name", "--yes")[0] == 0


def test_what_another_tool_downloaded_into_a_cache_that_only_it_may_write(
    server: LoopbackHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import snapshot_download

    from rimuru_cli.hub.repository_cache import RepositoryCache

    def refuse(self: RepositoryCache) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "hub" / ".locks"))

    folder = snapshot_download("org/name")
    monkeypatch.setattr(RepositoryCache, "prepare", refuse)
    code, out, err = run(capsys, "pull", "org/name")
    assert (code, out) == (0, folder + "\n") and "cannot be used: Permission denied" in err and "rimuru verify org/name" in err
    (Path(folder) / SHARD).unlink()
    code, out, err = run(capsys, "pull", "org/name")
    assert (code, out) == (1, "") and "cannot be used: Permission denied" in err, "not all of it is there"
