"""One forward pass over the scheduled rows: the paged key/value cache as the model sees it, and the batch around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rimuru_cli.engine.experts.executor import PooledExperts
from rimuru_cli.engine.scheduler import ScheduledRows
from rimuru_kernels.paged_attention import paged_attention, store_kv
from rimuru_models.interfaces import CausalLM, ForwardContext


@dataclass(frozen=True)
class _Span:
    """Rows start .. stop - 1 of the batch: positions first .. first + (stop - start) - 1 of one sequence."""

    start: int
    stop: int
    first: int
    keys: list[list[Tensor]]
    values: list[list[Tensor]]


class PagedKVCache:
    """The model's `KVCache`: keys and values go into the pages of each row's sequence and are read from there."""

    def __init__(self) -> None:
        self._spans: list[_Span] = []

    def begin_step(self, plan: Sequence[ScheduledRows]) -> None:
        """Point at the pages of the scheduled sequences."""
        self._spans = []
        start = 0
        for rows in plan:
            sequence = rows.sequence
            self._spans.append(_Span(start, start + rows.count, sequence.computed, sequence.keys, sequence.values))
            start += rows.count

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, sliding_window: int | None) -> Tensor:
        """Store k, v [T, G, D] and return causal attention [T, H, D] of q over each row's own sequence."""
        parts = []
        for span in self._spans:
            keys, values = span.keys[layer], span.values[layer]
            rows = slice(span.start, span.stop)
            store_kv(k[rows], v[rows], keys, values, span.first)
            num_tokens = span.first + span.stop - span.start
            parts.append(paged_attention(q[rows], keys, values, num_tokens, scale=scale, sliding_window=sliding_window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class ModelRunner:
    """Runs the model over a plan and returns the logits that are sampled from."""

    def __init__(self, model: CausalLM, experts: PooledExperts) -> None:
        self._model = model
        self._experts = experts
        self._cache = PagedKVCache()

    def forward(self, plan: Sequence[ScheduledRows]) -> Tensor | None:
        """Logits float32 [number of sampling rows, vocab] in plan order, or None if no row is sampled from."""
        tokens: list[int] = []
        positions: list[int] = []
        sampled: list[int] = []
        for rows in plan:
            sequence = rows.sequence
            end = sequence.computed + rows.count
            tokens += sequence.tokens[sequence.computed : end]
            positions += range(sequence.computed, end)
            if rows.samples:
                sampled.append(len(tokens) - 1)
        self._cache.begin_step(plan)
        self._experts.begin_step(len(tokens))
        try:
            context = ForwardContext(positions=torch.tensor(positions), kv=self._cache, experts=self._experts)
            hidden = self._model.forward(torch.tensor(tokens), context)
        finally:
            self._experts.end_step()
        if not sampled:
            return None
        if len(sampled) < len(tokens):
            hidden = hidden[torch.tensor(sampled)]
        return self._model.logits(hidden)
