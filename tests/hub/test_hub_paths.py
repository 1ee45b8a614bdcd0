from __future__ import annotations

from pathlib import Path

import pytest

from rimuru_cli.hub import paths

FOLDERS = (paths.cache_dir, paths.data_dir, paths.config_dir)


def test_everything_is_below_rimuru_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RIMURU_HOME", str(tmp_path / "home"))
    found = [folder() for folder in FOLDERS]
    assert len(set(found)) == 3
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
        assert "rimuru" in folder().parts[-2:]
