"""A request while it runs: its token blocks and how far it has been computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from rimuru_cli.engine.kv_blocks import KVBlocks, TokenBlock
from rimuru_cli.engine.request import Request
from rimuru_cli.engine.state_blocks import StateBlock


@dataclass(eq=False)
class Sequence:
    """A scheduled request.

    Attributes:
        tokens: prompt and generated tokens.
        limit: most tokens this sequence may reach (context limit or prompt + max_tokens).
        blocks: token blocks in order; they cover at least `computed` tokens.
        computed: tokens whose keys and values are stored.
        states: states after `computed` tokens while it runs, in a model with recurrent layers; else None.
        keep_at: lengths at which its states are to be kept, ascending; keeping: where, for lengths that are about to be computed.
    """

    request: Request
    tokens: list[int]
    limit: int
    blocks: list[TokenBlock] = field(default_factory=list)
    computed: int = 0
    states: StateBlock | None = None
    keep_at: list[int] = field(default_factory=list)
    keeping: dict[int, StateBlock] = field(default_factory=dict)
    _rows: Tensor | None = field(default=None, repr=False)
    _filed: int = field(default=0, repr=False)  # blocks whose rows are known
    _moves: int = field(default=0, repr=False)  # `KVBlocks.moves` at that time

    @property
    def pending(self) -> int:
        """Tokens still to be computed before the next one can be sampled."""
        return len(self.tokens) - self.computed

    def rows_in(self, blocks: KVBlocks) -> Tensor:
        """Where the keys and values of the blocks lie, for gathering on the CPU: int64 [num_layers, 2 or 1, n], see `KVBlocks.rows_of`;
        what follows the blocks' own rows is undefined. Each call works out only what is new since the last one."""
        if self._moves != blocks.moves:
            self._filed, self._moves = 0, blocks.moves
        new = self.blocks[self._filed :]
        if new:
            rows = blocks.rows_of(new)
            layers, halves, count = rows.shape
            used = self._filed * (count // len(new))
            if self._rows is None or used + count > self._rows.shape[2]:
                # Grown by doubling, so that a long answer does not copy the table at every block.
                grown = rows.new_empty(layers, halves, max(used + count, 2 * used))
                if self._rows is not None:
                    grown[:, :, :used] = self._rows[:, :, :used]
                self._rows = grown
            self._rows[:, :, used : used + count] = rows
            self._filed = len(self.blocks)
        assert self._rows is not None, "a scheduled sequence has blocks"
        return self._rows

    def drop_blocks(self) -> None:
        """Forget all blocks, and with them everything computed."""
        self.blocks, self._rows, self._filed = [], None, 0
        self.computed = 0
