"""Processes that are killed, interrupted and run beside each other; huggingface_hub as it is, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub, etag_of
from loopback_models import model_files, wanted
from loopback_setup import assert_pulled, environment

FILES = model_files(config={"intermediate_size": 1024})
TOTAL = sum(len(data) for data in wanted(FILES).values())


@pytest.fixture
def server() -> Iterator[LoopbackHub]:
    with LoopbackHub(store=True) as hub:
        hub.add("org/name", FILES)
        yield hub


def command(server: LoopbackHub, home: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rimuru_cli", *words],
        env={**os.environ, **environment(server, home)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def parts(home: Path) -> dict[str, int]:
    """Checksum -> bytes of unfinished files."""
    return {path.name.removesuffix(".incomplete"): path.stat().st_size for path in (home / "hf").rglob("*.incomplete")}


def wait_until(process: subprocess.Popen[str], happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert process.poll() is None and time.monotonic() < deadline, "it ended, or nothing came"
        time.sleep(0.01)


def all_written(server: LoopbackHub, home: Path) -> bool:
    """Whether the hub has sent all that it may, and the last of it has been written."""
    before = parts(home)
    time.sleep(0.1)
    return server.allowance == 0 and bool(before) and parts(home) == before


def test_huggingface_hub_as_it_is_uses_what_was_pulled_and_the_reverse(server: LoopbackHub, tmp_path: Path) -> None:
    code, out, err = finish(command(server, tmp_path, "pull", "org/name"))
    assert (code, err) == (0, "")
    assert_pulled(Path(out.strip()), FILES)
    probe = """
import sys
from huggingface_hub import hf_hub_download, snapshot_download
print(snapshot_download("org/name", local_files_only=True))
for name in sys.argv[1:]:
    hf_hub_download("org/name", name, local_files_only=True)
"""
    env = {**os.environ, **environment(server, tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", probe, *wanted(FILES)], env=env, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout == out
    other = tmp_path / "other"
    fetch = "from huggingface_hub import snapshot_download; print(snapshot_download('org/name'))"
    env = {**os.environ, **environment(server, other)}
    done = subprocess.run([sys.executable, "-c", fetch], env=env, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    server.log.clear()
    assert finish(command(server, other, "pull", "org/name"))[:2] == (0, done.stdout)
    assert server.sent() == 0


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_killed_again_and_again(server: LoopbackHub, tmp_path: Path) -> None:
    names = {etag_of(data): name for name, data in FILES.items()}
    for allowance in (TOTAL // 3, 1, 40_000, TOTAL // 4, 333_333):
        server.allow(allowance)
        before = parts(tmp_path)
        process = command(server, tmp_path, "pull", "org/name")
        wait_until(process, lambda: all_written(server, tmp_path))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.communicate()
        assert sum(parts(tmp_path).values()) <= sum(before.values()) + allowance
        assert not list((tmp_path / "hf" / "hub" / "models--org--name" / "snapshots").iterdir()), "nothing unfinished can be loaded"
    left = parts(tmp_path)
    assert left
    server.log.clear()
    server.allow(None)
    code, out, _ = finish(command(server, tmp_path, "pull", "org/name"))
    assert code == 0
    assert_pulled(Path(out.strip()), FILES)
    for etag, size in left.items():
        assert [request.start for request in server.bodies(names[etag])] == [size] * (size < len(FILES[names[etag]])), (
            "from where it stopped"
        )
    assert server.sent() <= TOTAL - sum(left.values()), "not a byte twice"
    assert parts(tmp_path) == {}


def test_two_pulls_at_once(server: LoopbackHub, tmp_path: Path) -> None:
    server.allow(TOTAL // 2)
    first = command(server, tmp_path, "pull", "org/name")
    wait_until(first, lambda: all_written(server, tmp_path))
    second = command(server, tmp_path, "pull", "org/name", "--json")
    assert second.stdout is not None
    told = [json.loads(second.stdout.readline()) for _ in range(2)]  # its plan, and that it has begun
    server.allow(None)
    results = [finish(second), finish(first)]
    assert [code for code, _, _ in results] == [0, 0], results
    assert_pulled(Path(results[1][1].strip()), FILES)
    told += [json.loads(line) for line in results[0][1].splitlines()]
    assert told[0]["event"] == "plan" and told[0]["present_bytes"] > 100_000
    assert told[-1]["event"] == "result" and told[-1]["path"] == results[1][1].strip()
    progress = [event for event in told if event["event"] == "progress"]
    assert progress[-1]["done_bytes"] == TOTAL and all(event["done_bytes"] <= TOTAL for event in progress)
    assert server.sent() == TOTAL, "what one of them fetched, the other did not"
    assert parts(tmp_path) == {}


@pytest.mark.skipif(os.name != "posix", reason="SIGINT reaches a single process on POSIX only")
@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(server: LoopbackHub, tmp_path: Path, way: signal.Signals) -> None:
    server.allow(TOTAL // 2)
    process = command(server, tmp_path, "pull", "org/name")
    wait_until(process, lambda: all_written(server, tmp_path))
    kept = parts(tmp_path)
    process.send_signal(way)
    code, out, err = finish(process)
    assert (code, out) == (128 + way, ""), err
    assert "Traceback" not in err and "Exception" not in err
    if way == signal.SIGINT:
        assert err.endswith("Interrupted.\n") and "the same command goes on from there" in err
    assert parts(tmp_path) == kept


def test_a_pipe_that_stays_open_is_not_waited_for(server: LoopbackHub, tmp_path: Path) -> None:
    server.add("org/odd", model_files(config={"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    process = command(server, tmp_path, "pull", "org/odd")  # stdin is a pipe that nobody closes
    assert process.wait(timeout=60) == 1
    assert process.stderr is not None and "--yes downloads it anyway" in process.stderr.read()
    process.communicate()
    assert not (tmp_path / "hf" / "hub" / "models--org--odd").exists()


def test_the_variables_of_huggingface_hub_are_honoured(server: LoopbackHub, tmp_path: Path) -> None:
    env = {**os.environ, **environment(server, tmp_path), "HF_HUB_CACHE": str(tmp_path / "elsewhere")}
    words = [sys.executable, "-m", "rimuru_cli", "pull", "org/name"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0 and Path(done.stdout.strip()).is_relative_to(tmp_path / "elsewhere")
    done = subprocess.run(
        words, env={**env, "HF_HUB_CACHE": str(tmp_path / "third"), "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 1 and "HF_HUB_OFFLINE" in done.stderr
