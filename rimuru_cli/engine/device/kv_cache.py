"""The model's key/value cache on a device: block tables live there, rows of running sequences keep their place in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rimuru_cli.engine.kv_blocks import KVBlocks, TokenBlock
from rimuru_cli.engine.scheduler import ScheduledRows
from rimuru_kernels.paged_attention import paged_attention_decode, paged_attention_prefill, store_kv_entries
from rimuru_kernels.paged_attention.layout import KVLayout
from rimuru_kernels.rotary import rotary_store


class DeviceKVCache:
    """Satisfies the model's `KVCache` and `ProjectedAttention` over page entries.

    Rows of a step are ordered: sequences with one row first (decode), then the others (prefill).

    Attributes:
        tables: int32 [attention layers, max_sequences, max_blocks], page entries; row s belongs to the s-th sequence of the step.
        seq_lens: int32 [max_sequences], tokens of each sequence including the step's.
        tokens, positions, token_seqs: int32 [max_tokens], of each row: token id, position, and row of the tables.
        cu_seqlens: int32 [max_sequences + 1], bounds of the prefill sequences' rows, counted from the first prefill row.
    """

    def __init__(
        self,
        blocks: KVBlocks,
        pool: Tensor,
        layout: KVLayout,
        *,
        attention_layers: Sequence[int],
        max_sequences: int,
        max_tokens: int,
        context: int,
    ) -> None:
        device = pool.device
        self._places = {layer: place for place, layer in enumerate(attention_layers)}
        self._pool = pool
        self._layout = layout
        self._blocks = blocks
        max_blocks = blocks.blocks_for(context) + 1
        self.tables = torch.zeros(blocks.num_layers, max_sequences, max_blocks, dtype=torch.int32, device=device)
        # All small inputs of a step travel in one copy from page-locked memory.
        sizes = (max_sequences, max_sequences + 1, max_tokens, max_tokens, max_tokens)
        self._inputs = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.seq_lens, self.cu_seqlens, self.tokens, self.positions, self.token_seqs = self._inputs.split(sizes)  # type: ignore[no-untyped-call]
        staging = torch.zeros(sum(sizes), dtype=torch.int32)
        self._staging = staging.pin_memory() if pool.is_cuda else staging
        # Written through numpy: an assignment costs a tenth of torch's, and the device waits meanwhile.
        self._staged = np.split(self._staging.numpy(), np.cumsum(sizes)[:-1])
        self._copied = torch.cuda.Event() if pool.is_cuda else None  # type: ignore[no-untyped-call]
        # The last block that each row of the tables holds, and how many: blocks are a path in a tree, so the last one tells them all.
        self._rows: list[tuple[TokenBlock | None, int]] = [(None, 0)] * max_sequences
        self._moves = blocks.moves
        self._decode_rows = 0
        self._num_rows = 0
        self._num_sequences = 0

    @property
    def outdated(self) -> bool:
        """Whether blocks have other pages than the tables say; `begin_step` mends that."""
        return self._moves != self._blocks.moves

    def begin_step(self, plan: Sequence[ScheduledRows], tokens: Sequence[int]) -> None:
        """Bring the tables and inputs up to date for the scheduled rows (decode rows first); `tokens` are the rows' token ids."""
        if self.outdated:
            self._rows, self._moves = [(None, 0)] * len(self._rows), self._blocks.moves
        positions: list[int] = []
        owners: list[int] = []
        bounds = [0]
        for row, rows in enumerate(plan):
            sequence = rows.sequence
            self._update_row(row, sequence.blocks)
            positions += range(sequence.computed, sequence.computed + rows.count)
            owners += [row] * rows.count
            bounds.append(len(positions))
        decode = sum(1 for rows in plan if rows.count == 1)
        self._decode_rows, self._num_rows, self._num_sequences = decode, len(positions), len(plan)
        lengths = [rows.sequence.computed + rows.count for rows in plan]
        if self._copied is not None:
            self._copied.synchronize()  # the last step's copy has read the staging memory
        for target, values in zip(self._staged, (lengths, [b - decode for b in bounds[decode:]], tokens, positions, owners), strict=True):
            target[: len(values)] = values
        self._inputs.copy_(self._staging, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def holds(self, plan: Sequence[ScheduledRows]) -> bool:
        """Whether the tables are those of these sequences as they are now: no block more, none moved."""
        rows = zip(self._rows, (rows.sequence.blocks for rows in plan), strict=False)
        return self._moves == self._blocks.moves and all(last is blocks[-1] and count == len(blocks) for (last, count), blocks in rows)

    def advance(self, tokens: Tensor) -> None:
        """From a decode step to the next of the same sequences, on the device: `tokens` [rows] are what each of them said.

        The blocks of the next position must be there already.
        """
        rows = self._num_rows
        self.tokens[:rows].copy_(tokens)
        self.positions[:rows].add_(1)
        self.seq_lens[:rows].add_(1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, sliding_window: int | None) -> Tensor:
        """Store k, v [T, G, D] and return causal attention [T, H, D] of q over each row's own sequence."""
        table, rows = self.tables[self._places[layer]], self._num_rows
        store_kv_entries(
            k.contiguous(), v.contiguous(), self._pool, table, self.positions[:rows], self._layout, token_seqs=self.token_seqs[:rows]
        )
        return self._attend(table, q, scale, sliding_window)

    def attend_projection(
        self,
        layer: int,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """Head norms, rotary and storing in one launch, then as `attend`; see `ProjectedAttention`."""
        table, rows = self.tables[self._places[layer]], self._num_rows
        q = rotary_store(
            qkv,
            cos,
            sin,
            self._pool,
            table,
            self.positions[:rows],
            self._layout,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            token_seqs=self.token_seqs[:rows],
        )
        return self._attend(table, q, scale, sliding_window)

    def _attend(self, table: Tensor, q: Tensor, scale: float, sliding_window: int | None) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decode, sequences = self._decode_rows, self._num_sequences
        if decode:
            paged_attention_decode(
                q[:decode],
                self._pool,
                table[:decode],
                self.seq_lens[:decode],
                self._layout,
                scale=scale,
                sliding_window=sliding_window,
                out=out[:decode],
            )
        if decode < sequences:
            paged_attention_prefill(
                q[decode:],
                self._pool,
                table[decode:sequences],
                self.cu_seqlens[: sequences - decode + 1],
                self.seq_lens[decode:sequences],
                self._layout,
                scale=scale,
                sliding_window=sliding_window,
                out=out[decode:],
            )
        return out

    def _update_row(self, row: int, blocks: list[TokenBlock]) -> None:
        last, count = self._rows[row]
        if count > len(blocks) or (count and blocks[count - 1] is not last):
            count = 0
        if count < len(blocks):
            new = torch.tensor([block.pages for block in blocks[count:]], dtype=torch.int32).t().contiguous()
            self.tables[:, row, count : len(blocks)] = new.to(self.tables.device)
        self._rows[row] = (blocks[-1], len(blocks))
