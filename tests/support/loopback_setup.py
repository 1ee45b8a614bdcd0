"""Points huggingface_hub, as it is imported in this process, at a loopback hub and a cache of the test's own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub
from loopback_models import wanted


def connect(monkeypatch: pytest.MonkeyPatch, hub: LoopbackHub, cache: Path, *, read_seconds: int = 10) -> None:
    """What HF_ENDPOINT, HF_HUB_CACHE, HF_HUB_OFFLINE=0 and HF_HUB_DOWNLOAD_TIMEOUT do before huggingface_hub is imported."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", read_seconds)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))


def environment(hub: LoopbackHub, home: Path) -> dict[str, str]:
    """The same for a process of its own."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home / "hf"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "RIMURU_HOME": str(home / "rimuru"),
    }


def assert_pulled(folder: Path, files: Mapping[str, bytes]) -> None:
    """The folder holds exactly the files that `pull` takes, byte for byte."""
    expected = wanted(files)
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert sorted(found) == sorted(expected)
    for name, data in expected.items():
        assert hashlib.sha256(found[name]).digest() == hashlib.sha256(data).digest(), name
