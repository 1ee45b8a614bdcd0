"""transformers, which some figures are compared with: a development dependency, loaded only where a comparison asks for it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import rimuru_kernels
from rimuru_models.errors import UsageError
from rimuru_models.gguf import gguf_of


def check_transformers() -> None:
    """Make sure that it is installed.

    Raises:
        UsageError: it is not.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("transformers is not installed here.", hint="It is a development dependency: ./install.sh --dev")


def load_transformers(model_dir: Path, dtype: torch.dtype | str) -> Any:
    """The folder's model as transformers computes it, in evaluation mode on the CPU.

    Raises:
        UsageError: transformers is not installed; or it is a GGUF model, which is not handed to it.
    """
    check_transformers()
    if gguf_of(model_dir) is not None:
        raise UsageError("A GGUF model cannot be compared with transformers here.", hint="Name the safetensors version of the model.")
    with _checkout_hidden():
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=dtype).eval()


@contextmanager
def _checkout_hidden() -> Iterator[None]:
    """Run from a checkout, Python finds its folder kernels/, which transformers would take for the package of that name."""
    checkout = Path(rimuru_kernels.__file__).resolve().parents[1]
    before = list(sys.path)
    sys.path[:] = [entry for entry in before if Path(entry or ".").resolve() != checkout or not (checkout / "kernels").is_dir()]
    try:
        yield
    finally:
        sys.path[:] = before
