"""One pass over a calibration text, layer by layer: each layer's experts are quantised as soon as its inputs are known.

The pass goes on with the quantised experts, so that later layers make up for what earlier ones lost. Experts are in memory a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from rimuru_kernels.silu_and_mul import silu_and_mul
from rimuru_models.errors import CheckpointError
from rimuru_models.interfaces import ForwardContext
from rimuru_models.loader import load_model
from rimuru_models.quantization.scheme import DAMAGED
from rimuru_models.quantizer.feedback import feedback_factor, quantize_with_feedback
from rimuru_models.quantizer.groups import dequantize_groups, quantize_groups
from rimuru_models.quantizer.layout import Recipe
from rimuru_models.resident import ResidentKVCache, ResidentStates
from rimuru_models.weights import CheckpointReader

_AT_ONCE = 1 << 24  # weights that are worked on together
_FEW_TOKENS = 64  # an expert that sees fewer of the text's tokens is judged by all of them
_DAMPING_WIDE, _DAMPING_DOWN = 0.02, 0.05

Matrix = tuple[Tensor, Tensor]
"""Codes int8 [N, K] and scales [N, groups]."""


class Store(Protocol):
    """Where quantised experts of one layer go, and come from where they are there already."""

    def finished(self, layer: int) -> bool:
        """Whether the layer's experts were stored before."""
        ...

    def read(self, layer: int, expert: int) -> tuple[Matrix, Matrix, Matrix]:
        """gate, up and down of an expert that was."""
        ...

    def write(self, layer: int, expert: int, matrices: tuple[Matrix, Matrix, Matrix]) -> None:
        """Store the next expert of a layer, in order."""
        ...


def quantize_plainly(reader: CheckpointReader, recipe: Recipe, store: Store, done: Callable[[], None]) -> None:
    """Quantise all experts one by one, each weight by itself; `done` is called after each expert."""
    for layer in reader.config.moe_layers:
        if store.finished(layer):
            continue
        for expert, tensors in enumerate(reader.experts(layer)):
            with _saying_which(reader, layer, (expert,)):
                gate, up, down = (quantize_groups(weights, recipe.bits, recipe.group, reader.expert_dtype) for weights in tensors)
            store.write(layer, expert, (gate, up, down))
            done()
        reader.let_go()  # what was read stays in the system's cache, and does not count as ours


def quantize_with_text(reader: CheckpointReader, recipe: Recipe, store: Store, tokens: Sequence[int], done: Callable[[], None]) -> None:
    """Quantise all experts with feedback for the inputs that a text gives them.

    Args:
        tokens: of the text, up to a few thousand; within the model's context.
        done: called after each expert.
    """
    config = reader.config
    with torch.inference_mode():
        model = load_model(reader, torch.float32)
        states = ResidentStates(config) if config.recurrent is not None else None
        if states is not None:
            states.begin_step([len(tokens)])
        experts = _CalibratedExperts(reader, recipe, store, done)
        context = ForwardContext(torch.arange(len(tokens)), ResidentKVCache(config), experts, recurrent=states)
        model.forward(torch.tensor(tokens), context)


@contextmanager
def _saying_which(reader: CheckpointReader, layer: int, experts: Iterable[int]) -> Iterator[None]:
    """Name the weights that cannot be quantised: the arithmetic does not know whose they are."""
    try:
        yield
    except CheckpointError as error:
        for expert in experts:
            for part, weights in zip(("gate", "up", "down"), reader.expert(layer, expert), strict=True):
                if not bool(weights.isfinite().all()):
                    where = f"{reader.index.model_dir}: the {part} projection of expert {expert} in layer {layer}"
                    raise CheckpointError(
                        f"{where} has a weight that is not a finite number, so it cannot be quantised.", hint=DAMAGED
                    ) from error
        raise


class _CalibratedExperts:
    """Satisfies `interfaces.ExpertProvider`; each layer is computed once."""

    def __init__(self, reader: CheckpointReader, recipe: Recipe, store: Store, done: Callable[[], None]) -> None:
        self._reader, self._recipe, self._store, self._done = reader, recipe, store, done

    def forward(self, layer: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """See `interfaces.ExpertProvider.forward`."""
        config = self._reader.config
        if not bool(x.isfinite().all()):
            raise CheckpointError(f"In layer {layer} the model computes numbers that are not finite; its weights must be damaged.")
        finished = self._store.finished(layer)
        factor = None if finished else feedback_factor((x.t() @ x).unsqueeze(0), _DAMPING_WIDE)
        count = max(1, _AT_ONCE // (2 * config.expert_intermediate * config.hidden_size))
        total = torch.zeros_like(x)
        for first in range(0, config.num_experts, count):
            chosen = range(first, min(first + count, config.num_experts))
            if factor is None:
                found = [self._store.read(layer, expert) for expert in chosen]
            else:
                with _saying_which(self._reader, layer, chosen):
                    found = self._quantized(layer, chosen, x, topk_ids, factor)
            for expert, (gate, up, down) in zip(chosen, found, strict=True):
                if factor is not None:
                    self._store.write(layer, expert, (gate, up, down))
                    self._done()
                token, slot = torch.where(topk_ids == expert)
                if len(token):
                    wide = torch.cat([dequantize_groups(*gate), dequantize_groups(*up)])
                    y = linear(silu_and_mul(linear(x[token], wide)), dequantize_groups(*down))
                    total.index_add_(0, token, y * topk_weights[token, slot, None])
        self._reader.let_go()
        return total

    def _quantized(self, layer: int, chosen: range, x: Tensor, ids: Tensor, factor: Tensor) -> list[tuple[Matrix, Matrix, Matrix]]:
        """Some experts of one layer: gate and up for the inputs of the whole layer, down for what the rounded gate and up make of them."""
        reader, recipe, dtype = self._reader, self._recipe, self._reader.expert_dtype
        width, hidden = reader.config.expert_intermediate, reader.config.hidden_size
        tensors = [reader.expert(layer, expert) for expert in chosen]
        wide = torch.cat([torch.cat([gate, up]) for gate, up, _ in tensors]).float().unsqueeze(0)
        found = quantize_with_feedback(wide, factor, recipe.bits, recipe.group, dtype)
        codes, scales = (part.view(len(chosen), 2 * width, part.shape[-1]) for part in found)
        grams = torch.empty(len(chosen), width, width)
        for place, expert in enumerate(chosen):
            used = (ids == expert).any(-1)
            rows = x[used] if int(used.sum()) >= _FEW_TOKENS else x
            inner = silu_and_mul(linear(rows, dequantize_groups(codes[place], scales[place])))
            torch.mm(inner.t(), inner, out=grams[place])
        down = torch.stack([tensor.down for tensor in tensors]).float()
        assert down.shape[1:] == (hidden, width)
        down_codes, down_scales = quantize_with_feedback(down, feedback_factor(grams, _DAMPING_DOWN), recipe.bits, recipe.group, dtype)
        return [
            (
                (codes[place, :width], scales[place, :width]),
                (codes[place, width:], scales[place, width:]),
                (down_codes[place], down_scales[place]),
            )
            for place in range(len(chosen))
        ]
