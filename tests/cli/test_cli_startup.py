"""Before there is anything to do: Ctrl-C while Python still loads what the command line is made of, and what light commands load."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cached_models import put_in_cache
from loopback_hub import LoopbackHub
from loopback_models import model_files
from loopback_setup import environment

posix = pytest.mark.skipif(os.name != "posix", reason="SIGINT reaches a single process on POSIX only")

SLOW = """
import sys, time
print("loading", flush=True)
try:
    time.sleep(1.0)
except BaseException:
    print("torn", flush=True)
    raise
"""


def interrupted_import(folder: Path, module: str, arguments: list[str]) -> tuple[int, str, str]:
    """Start the command line with a stand-in for `module` that takes a second to load, and press Ctrl-C twice meanwhile."""
    (folder / f"{module}.py").write_text(SLOW, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "rimuru_cli", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(folder)},
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("Hello\n")
    process.stdin.close()
    process.stdin = None
    first = process.stdout.readline()
    assert first == "loading\n"
    for _ in range(4):
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@posix
@pytest.mark.parametrize("arguments", [["--help"], ["config"], ["run", "rimuru-demo", "Hello"]])
def test_before_the_commands_are_loaded_it_ends_the_process_quietly(arguments: list[str], tmp_path: Path) -> None:
    code, out, err = interrupted_import(tmp_path, "typer", arguments)
    assert (code, out, err) == (130, "", "")


@posix
@pytest.mark.parametrize(
    "arguments",
    [
        ["chat"],
        ["run", "rimuru-demo", "Hello"],
        ["profile-hotset", "rimuru-demo"],
        ["bench", "decode"],
        ["doctor"],
        ["run", "m", "Hello", "--json"],
    ],
)
def test_no_library_is_torn_while_it_loads(arguments: list[str], tmp_path: Path) -> None:
    code, out, err = interrupted_import(tmp_path, "torch", arguments)  # torn, torch aborts the process or blames its own import
    assert code == 130
    if "--json" in arguments:
        assert '"exit_code": 130' in out and err == ""
    else:
        assert (out, err) == ("", "Interrupted.\n")


PROBE = """
import sys
from rimuru_cli.main import main
code = main(sys.argv[1:])
print("CODE", code, *sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["list", "--all"], 0),
        (["show", "MODEL"], 0),
        (["show", "org/cached"], 0),
        (["fit", "MODEL"], 0),
        (["fit", "org/cached", "--vram", "24GiB", "--ram", "64GiB"], 0),
        (["rm", "org/cached", "--dry-run"], 0),
        (["rm", "org/cached", "--yes"], 0),
        (["rm", "org/none", "--yes"], 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_commands_of_the_library_load_neither_torch_nor_textual(arguments: list[str], code: int, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, data in model_files(extra=False).items():
        (folder / name).write_bytes(data)
    put_in_cache(tmp_path / "hf" / "hub", "org/cached", model_files())
    words = [str(folder) if word == "MODEL" else word for word in arguments]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *words],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "HF_HOME": str(tmp_path / "hf")},
    )
    told = done.stderr.splitlines()[-1].split()
    assert told[:2] == ["CODE", str(code)], done.stderr
    assert set(told[2:]).isdisjoint(["torch", "textual", "transformers", "tokenizers", "safetensors", "triton"])
    assert "typer" in told


def test_getting_and_checking_a_model_loads_neither_torch_nor_the_dashboard(tmp_path: Path) -> None:
    with LoopbackHub() as hub:
        hub.add("org/name", model_files())
        for words in (["pull", "org/name"], ["pull", "org/name"], ["verify", "org/name"]):
            done = subprocess.run(
                [sys.executable, "-c", PROBE, *words],
                env={**os.environ, **environment(hub, tmp_path)},
                capture_output=True,
                text=True,
                encoding="utf-8",
            )
            told = done.stderr.splitlines()[-1].split()
            assert told[:2] == ["CODE", "0"], done.stderr
            loaded = set(told[2:])
            assert "typer" in loaded, "the probe did not get that far"
            assert loaded.isdisjoint({"torch", "textual", "transformers", "tokenizers", "triton"}), words
            # The second pull has nothing to fetch, and `verify` nothing to ask: that much they can do without.
            assert words[0] == "pull" or loaded.isdisjoint({"httpx2", "numpy"})
