"""Fixtures of the model tests: the reference implementation (imported once), and runs of our models in plain memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from rimuru_models.interfaces import ForwardContext
from rimuru_models.loader import load_model
from rimuru_models.readers import open_reader
from rimuru_models.resident import ResidentExperts, ResidentKVCache, ResidentStates

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices: a second thread only waits for the first, and far longer when the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def transformers_module() -> ModuleType:
    """transformers, imported with the checkout off sys.path: it would take our kernels/ folder for the package `kernels`."""
    before = list(sys.path)
    sys.path[:] = [entry for entry in before if Path(entry or ".").resolve() != REPOSITORY]
    try:
        import transformers

        for name in ("MixtralForCausalLM", "OlmoeForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"):
            assert getattr(transformers, name)
        for name in ("Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "GraniteMoeHybridForCausalLM"):
            assert getattr(transformers, name)
    finally:
        sys.path[:] = before
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@pytest.fixture
def reference_model(transformers_module: ModuleType) -> Callable[[Path], Any]:
    """Folder -> the reference's model in float32 with eager attention and eager experts."""

    def load(folder: Path) -> Any:
        model = transformers_module.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        model.set_experts_implementation("eager")
        return model.eval()

    return load


class ResidentRun:
    """One of our models with everything in plain memory, fed token by token or chunk by chunk."""

    def __init__(self, folder: Path, num_sequences: int = 1, dtype: torch.dtype = torch.float32) -> None:
        with open_reader(folder) as reader:
            self.config = reader.config
            self.model = load_model(reader, dtype)
            self.experts = ResidentExperts(reader, dtype)
        self.kv = ResidentKVCache(self.config, num_sequences)
        self.states = ResidentStates(self.config, num_sequences, dtype) if self.config.recurrent else None

    @torch.inference_mode()
    def step(self, *tokens: Tensor) -> Tensor:
        """Next tokens of each sequence -> logits of all their rows."""
        rows = [len(part) for part in tokens]
        context = ForwardContext(self.kv.positions(rows), self.kv, self.experts, recurrent=self.states)
        self.kv.begin_step(rows)
        if self.states is not None:
            self.states.begin_step(rows)
        return self.model.logits(self.model.forward(torch.cat(tokens), context))

    def run(self, tokens: Tensor, splits: Sequence[int]) -> Tensor:
        """All tokens of one sequence in steps of the given sizes -> logits of all rows."""
        assert sum(splits) == len(tokens)
        return torch.cat([self.step(part) for part in tokens.split(list(splits))])


@pytest.fixture
def resident_run() -> type[ResidentRun]:
    """The class above, so that test files need not import from conftest."""
    return ResidentRun
