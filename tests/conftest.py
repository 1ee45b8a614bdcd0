"""What every test gets: a home of its own, no network, fixed seeds, and one thread per process when several run side by side."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if os.environ.get("PYTEST_XDIST_WORKER"):
    # Before torch is imported, so that it and every child process keep to one thread.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")
if not any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/dxg")):
    # Without a GPU Triton's kernels are interpreted; triton reads this once, when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it once, when it is imported
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture(autouse=True)
def isolated_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Points every place that rimuru or Hugging Face would write to at a fresh folder, and clears the user's own settings."""
    home = tmp_path_factory.mktemp("home")
    for name in list(os.environ):
        if name.startswith("RIMURU_"):
            monkeypatch.delenv(name)
    for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RIMURU_HOME", str(home / "rimuru"))
    monkeypatch.setenv("HF_HOME", str(home / "huggingface"))
    for kind in ("CONFIG", "DATA", "CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(home / kind.lower()))
    yield home


@pytest.fixture(autouse=True)
def seeds() -> None:
    """The same random numbers in every run. Torch is only touched by tests that imported it."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
