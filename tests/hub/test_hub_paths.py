from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from rimuru_cli.hub import paths

FOLDERS = (paths.cache_dir, paths.data_dir, paths.config_dir, paths.runtime_dir)


def test_everything_is_below_rimuru_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RIMURU_HOME", str(tmp_path / "home"))
    found = [folder() for folder in FOLDERS]
    assert len(set(found)) == 4
    assert all(folder.parent == tmp_path / "home" for folder in found)
    assert not (tmp_path / "home").exists()


def test_relative_home_and_tilde_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RIMURU_HOME", "here/../there")
    assert paths.cache_dir() == tmp_path / "there" / "cache"
    monkeypatch.setenv("RIMURU_HOME", "~/r")
    assert paths.data_dir() == Path.home() / "r" / "data"


@pytest.mark.parametrize("value", [None, ""])
def test_without_it_the_platforms_folders_are_used(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("RIMURU_HOME", raising=False)
    if value is not None:
        monkeypatch.setenv("RIMURU_HOME", value)
    for folder in FOLDERS:
        assert folder().is_absolute()
        assert "rimuru" in folder().parts[-2:] or folder().name.startswith("rimuru-")


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="the session's folder is a matter of POSIX")
def test_engines_meet_in_the_sessions_folder_if_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RIMURU_HOME", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert paths.runtime_dir() == tmp_path / "rimuru"
    assert not (tmp_path / "rimuru").exists()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr(paths, "_usable", lambda folder: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert paths.runtime_dir() == tmp_path / f"rimuru-{os.getuid()}"
    monkeypatch.setattr(paths, "_usable", lambda folder: folder == "/dev/shm")
    assert paths.runtime_dir() == Path(f"/dev/shm/rimuru-{os.getuid()}")
