"""Ctrl-C before there is anything to interrupt: while Python still loads what the command line is made of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="SIGINT reaches a single process on POSIX only")

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


@pytest.mark.parametrize("arguments", [["--help"], ["config"], ["run", "rimuru-demo", "Hello"]])
def test_before_the_commands_are_loaded_it_ends_the_process_quietly(arguments: list[str], tmp_path: Path) -> None:
    code, out, err = interrupted_import(tmp_path, "typer", arguments)
    assert (code, out, err) == (130, "", "")


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
