"""The backend and the reason that is shown for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rimuru_kernels.backend import select_backend


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    select_backend.cache_clear()
    yield
    select_backend.cache_clear()


@pytest.mark.parametrize(
    ("available", "reason"),
    [(False, "no CUDA device found"), (True, "CUDA device present, but this version computes on the CPU")],
)
def test_the_reason_fits_the_machine(available: bool, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert select_backend() == ("torch", reason)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not available)
    assert select_backend() == ("torch", reason), "decided once"
