"""One forward pass over the scheduled rows: the paged key/value cache as the model sees it, and the batch around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rimuru_cli.engine.experts.executor import PooledExperts
from rimuru_cli.engine.kv_blocks import KVBlocks, TokenBlock
from rimuru_cli.engine.recurrent_state import PagedStates
from rimuru_cli.engine.sampler import Meanwhile
from rimuru_cli.engine.scheduler import ScheduledRows
from rimuru_cli.engine.state_blocks import StateBlocks
from rimuru_kernels.paged_attention import paged_attention
from rimuru_models.interfaces import CausalLM, ForwardContext


@dataclass(frozen=True)
class _Span:
    """Rows start .. stop - 1 of the batch: positions first .. first + (stop - start) - 1 of one sequence.

    Attributes:
        written: the blocks in which these positions lie.
        offset: place of the first of them in `written[0]`.
        kv_rows: `Sequence.rows_in`.
    """

    start: int
    stop: int
    first: int
    written: list[TokenBlock]
    offset: int
    kv_rows: Tensor


class PagedKVCache:
    """The model's `KVCache`: keys and values go into the pages of each row's sequence and are read from there."""

    def __init__(self, blocks: KVBlocks, attention_layers: Sequence[int]) -> None:
        self._blocks = blocks
        self._places = {layer: place for place, layer in enumerate(attention_layers)}
        self._view = blocks.view
        self._spans: list[_Span] = []

    def begin_step(self, plan: Sequence[ScheduledRows]) -> None:
        """Point at the pages of the scheduled sequences."""
        self._spans = []
        start = 0
        for rows in plan:
            sequence, first = rows.sequence, rows.sequence.computed
            block, offset = divmod(first, self._view.block_tokens)
            written = sequence.blocks[block : (first + rows.count - 1) // self._view.block_tokens + 1]
            self._spans.append(_Span(start, start + rows.count, first, written, offset, sequence.rows_in(self._blocks)))
            start += rows.count

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, sliding_window: int | None) -> Tensor:
        """Store k, v [T, G, D] and return causal attention [T, H, D] of q over each row's own sequence."""
        view, size, place = self._view, self._view.block_tokens, self._places[layer]
        parts = []
        for span in self._spans:
            rows = slice(span.start, span.stop)
            pages = [block.pages[place] for block in span.written]
            view.store(k[rows], v[rows], pages, span.offset)
            # Copied together in one gather: a tensor for every page would cost more than the attention itself.
            end = span.first + span.stop - span.start
            oldest = 0 if sliding_window is None else max(0, span.first - sliding_window + 1) // size
            used = slice(oldest * view.rows_per_half, -(-end // size) * view.rows_per_half)
            keys, values = view.gather(span.kv_rows[place, :, used])
            parts.append(paged_attention(q[rows], [keys], [values], end - oldest * size, scale=scale, sliding_window=sliding_window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class ModelRunner:
    """Runs the model over a plan and returns the logits that are sampled from.

    Attributes:
        launch_ahead: nothing; see `DeviceRunner.launch_ahead`. Here a step is over when it returns, and there is nobody to wait for.
    """

    launch_ahead: Meanwhile | None = None

    def __init__(self, model: CausalLM, experts: PooledExperts, blocks: KVBlocks, states: StateBlocks | None = None) -> None:
        self._model = model
        self._experts = experts
        self._cache = PagedKVCache(blocks, model.config.attention_layers)
        self._states = PagedStates(states) if states is not None else None

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
        if self._states is not None:
            self._states.begin_step(plan)
        self._experts.begin_step(len(tokens))
        try:
            context = ForwardContext(positions=torch.tensor(positions), kv=self._cache, experts=self._experts, recurrent=self._states)
            hidden = self._model.forward(torch.tensor(tokens), context)
        finally:
            self._experts.end_step()
        if not sampled:
            return None
        if len(sampled) < len(tokens):
            hidden = hidden[torch.tensor(sampled)]
        return self._model.logits(hidden)
