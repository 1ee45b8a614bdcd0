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
        blocks: token blocks in order; they cover at least `computed` tokens.
        keys, values: of each layer, the blocks' pages [block_tokens, num_kv_heads, head_dim] in order.
        computed: tokens whose keys and values are stored.
        limit: most tokens this sequence may reach (context limit or prompt + max_tokens).
    """

    request: Request
    tokens: list[int]
    limit: int
    blocks: list[TokenBlock] = field(default_factory=list)
    keys: list[list[Tensor]] = field(default_factory=list)
    values: list[list[Tensor]] = field(default_factory=list)
    computed: int = 0

    @property
    def pending(self) -> int:
        """Tokens still to be computed before the next one can be sampled."""
        return len(self.tokens) - self.computed

    def append_blocks(self, blocks: Items[TokenBlock]) -> None:
        """Continue with these blocks."""
        self.blocks += blocks
        for block in blocks:
            if not self.keys:
                self.keys, self.values = [[] for _ in block.keys], [[] for _ in block.values]
            for pages, page in zip(self.keys, block.keys, strict=True):
                pages.append(page)
            for pages, page in zip(self.values, block.values, strict=True):
                pages.append(page)

    def drop_blocks(self) -> None:
        """Forget all blocks, and with them everything computed."""
        self.blocks, self.keys, self.values = [], [], []
        self.computed = 0
