"""The backend and the reason that is shown for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from rimuru_kernels.backend import select_backend


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    select_backend.cache_clear()
    yield
    select_backend.cache_clear()


def _machine(monkeypatch: pytest.MonkeyPatch, *, cuda: bool = True, capability: tuple[int, int] = (8, 9), triton: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if triton else None)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, cuda=False)
    assert select_backend() == ("torch", "no CUDA device found")


def test_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch)
    assert select_backend() == ("triton", "Some GPU, compute capability 8.9")


def test_with_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, capability=(7, 5))
    assert select_backend() == ("torch", "Some GPU has compute capability 7.5, and the kernels need 8.0")


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, triton=False)
    assert select_backend() == ("torch", "Some GPU is here, but the package triton is not installed")


def test_it_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch)
    select_backend()
    _machine(monkeypatch, cuda=False)
    assert select_backend().name == "triton"
