"""A request while it runs: its token blocks and how far it has been computed."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from torch import Tensor

from rimuru_cli.engine.kv_blocks import TokenBlock
from rimuru_cli.engine.request import Request


@dataclass(eq=False)
class Sequence:
    """A scheduled request.

    Attributes:
        tokens: prompt and generated tokens.
        limit: most tokens this sequence may reach (context limit or prompt + max_tokens).
        blocks: token blocks in order; they cover at least `computed` tokens.
        rows: int64 [num_layers, 2, at least as many as the blocks have], where their keys and values lie (`KVBlocks.rows_of`); None
            without blocks.
        computed: tokens whose keys and values are stored.
    """

    request: Request
    tokens: list[int]
    limit: int
    blocks: list[TokenBlock] = field(default_factory=list)
    rows: Tensor | None = None
    computed: int = 0

    @property
    def pending(self) -> int:
        """Tokens still to be computed before the next one can be sampled."""
        return len(self.tokens) - self.computed

    def append_blocks(self, blocks: Items[TokenBlock], rows: Tensor) -> None:
        """Continue with these blocks, at least one, whose keys and values lie at `rows`."""
        layers, halves, new = rows.shape
        used = len(self.blocks) * (new // len(blocks))
        if self.rows is None or used + new > self.rows.shape[2]:
            # Grown by doubling, so that a long answer does not copy the table at every block.
            grown = rows.new_empty(layers, halves, max(used + new, 2 * used))
            if self.rows is not None:
                grown[:, :, :used] = self.rows[:, :, :used]
            self.rows = grown
        self.rows[:, :, used : used + new] = rows
        self.blocks += blocks

    def drop_blocks(self) -> None:
        """Forget all blocks, and with them everything computed."""
        self.blocks, self.rows = [], None
        self.computed = 0
