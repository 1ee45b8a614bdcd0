"""Token blocks: the KV pages of a few tokens over all layers, shared between sequences with a common beginning.

A block holds `block_tokens` tokens: one KV page per attention layer, taken and freed together. Blocks form a tree: a full block's
children continue it. When a sequence ends, its blocks stay in the tree (without users) until their pages are wanted elsewhere, so the next
turn of a chat finds everything that was computed before. A block that was left partly filled is found too; its tokens are
copied into a fresh block, because two continuations cannot write into one page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rimuru_cli.engine.block_table import BlockTable
from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.memory.quantized_kv import KVPages

Tokens = tuple[int, ...]


@dataclass(eq=False, slots=True)
class TokenBlock:
    """KV pages of up to `block_tokens` consecutive tokens over all layers.

    Attributes:
        pages: one entry per layer.
        users: sequences that hold this block.
        tokens: the block's token ids once it is in the tree, else None.
        parent: the block before it (None at the beginning of a text).
        children: blocks that continue this one, by their token ids.
        slot: its row in the `BlockTable`.
    """

    pages: list[int]
    users: int = 1
    tokens: Tokens | None = None
    parent: TokenBlock | None = None
    children: dict[Tokens, TokenBlock] = field(default_factory=dict)
    slot: int = -1


@dataclass
class Match:
    """What the tree holds of a text: whole blocks to share, and a block of which the first `partial_tokens` tokens fit."""

    blocks: list[TokenBlock]
    partial: TokenBlock | None
    partial_tokens: int


class KVBlocks:
    """Allocates token blocks from the pool and keeps the tree of reusable ones.

    Attributes:
        table: where all blocks lie.
        moves: how often blocks have changed their pages, a holder's blocks were exchanged for others, or a block was filed behind others
            than those it was computed behind; whoever keeps entries of blocks looks whether this has changed.
    """

    def __init__(self, pool: PagePool, view: KVPages, num_layers: int) -> None:
        self._pool = pool
        self.view = view
        self.num_layers = num_layers
        self.block_tokens = view.block_tokens
        self._roots: dict[Tokens, TokenBlock] = {}
        # Blocks of the tree without users, least recently used first.
        self._idle: OrderedDict[TokenBlock, None] = OrderedDict()
        self.table = BlockTable(num_layers)
        self.moves = 0

    @property
    def idle_pages(self) -> int:
        """Pages held only for reuse; they can be taken at any time."""
        return len(self._idle) * self.num_layers

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_tokens)

    def allocate(self, count: int) -> list[TokenBlock]:
        """Take `count` blocks, all or none.

        Raises:
            OutOfPages: if the pool has too few free KV pages; nothing was taken.
        """
        pages = self._pool.allocate(PageKind.KV, count * self.num_layers)
        blocks = [TokenBlock(pages[start : start + self.num_layers]) for start in range(0, len(pages), self.num_layers)]
        self.table.add(blocks)
        return blocks

    def rows_of(self, blocks: Sequence[TokenBlock]) -> Tensor:
        """int64 [num_layers, 2 or 1, n]: where each layer's keys and values lie, as `view.rows_of` says."""
        pages = [block.pages[layer] for layer in range(self.num_layers) for block in blocks]
        rows = self.view.rows_of(pages)
        return rows.view(rows.shape[0], self.num_layers, -1).transpose(0, 1)

    def match(self, tokens: Sequence[int]) -> Match:
        """Find the longest beginning of `tokens` in the tree and hold its whole blocks for the caller."""
        size, found, level, done = self.block_tokens, [], self._roots, 0
        while done + size <= len(tokens):
            block = level.get(tuple(tokens[done : done + size]))
            if block is None:
                break
            found.append(block)
            level, done = block.children, done + size
        rest = tokens[done : done + size]
        best, best_tokens = None, 0
        for key, block in level.items() if rest else ():
            if key[0] == rest[0] and (common := _common_prefix(key, rest)) > best_tokens:
                best, best_tokens = block, common
        for block in found:
            self.hold(block)
        return Match(found, best, best_tokens)

    def hold(self, block: TokenBlock) -> None:
        """Add a user."""
        if block.users == 0:
            self._idle.pop(block)
        block.users += 1

    def copy_tokens(self, source: TokenBlock, target: TokenBlock, count: int) -> None:
        """Copy the first `count` tokens' keys and values of `source` into `target`."""
        for old, new in zip(source.pages, target.pages, strict=True):
            self.view.copy_tokens(old, new, count)

    def remember(self, blocks: Sequence[TokenBlock], tokens: Sequence[int]) -> list[TokenBlock]:
        """Put a sequence's computed blocks into the tree; `tokens` are the ids whose keys and values are stored, in order.

        Returns:
            The blocks of the tree that hold these tokens.
        """
        size, level, parent = self.block_tokens, self._roots, None
        path: list[TokenBlock] = []
        exchanged = moved = False
        for index, block in enumerate(blocks):
            own = tuple(tokens[index * size : (index + 1) * size])
            if not own:
                break
            known = block if block.tokens is not None else level.get(own)
            if known is None:
                block.tokens, block.parent = own, parent
                level[own] = known = block
                moved = exchanged  # who knows this block, knows others before it
            # Where the same text was stored before, that block stays and ours is freed on release; what follows is filed behind it.
            exchanged = exchanged or known is not block
            level, parent = known.children, known
            path.append(known)
        self.moves += moved
        return path

    def adopt(self, blocks: list[TokenBlock], path: Sequence[TokenBlock]) -> None:
        """Exchange a holder's blocks for those of the tree, as `remember` gave them, and free its own: who goes on holding a block must
        hold the ones before it."""
        exchanged = False
        for index, known in enumerate(path):
            own = blocks[index]
            if own is not known:
                self.hold(known)
                blocks[index], exchanged = known, True
                self.release([own])
        self.moves += exchanged

    def release(self, blocks: Sequence[TokenBlock]) -> None:
        """Give up one use of each block; blocks of the tree stay for reuse, others are freed."""
        freed: list[TokenBlock] = []
        # Last block first, so that the end of a text is given up before its beginning.
        for block in reversed(blocks):
            block.users -= 1
            assert block.users >= 0, "a token block was released more often than it was held"
            if block.users:
                continue
            if block.tokens is None:
                freed.append(block)
            else:
                self._idle[block] = None
        self._free(freed)

    def evict(self, num_pages: int) -> int:
        """Free idle blocks, least recently used and outermost first, until `num_pages` pages came free; returns how many did."""
        freed: list[TokenBlock] = []
        while len(freed) * self.num_layers < num_pages and self._idle:
            # A block whose continuation is still held is held by the same sequence, so idle blocks have idle children only.
            block = next(iter(self._idle))
            while block.children:
                block = next(iter(block.children.values()))
            del self._idle[block]
            level = self._roots if block.parent is None else block.parent.children
            assert block.tokens is not None, "an idle block is always in the tree"
            del level[block.tokens]
            freed.append(block)
        self._free(freed)
        return len(freed) * self.num_layers

    def check_integrity(self) -> None:
        """Blocks without users are those kept for reuse, and nobody holds what lies behind them; raises AssertionError otherwise."""
        for block, _ in self.walk():
            assert (block.users == 0) == (block in self._idle), "a block is idle and held, or neither"
            assert block.users or not any(child.users for child in block.children.values()), "a block is held, but not the one before it"

    def walk(self) -> Iterator[tuple[TokenBlock, int]]:
        """All blocks of the tree, each with the number of blocks before it in its text."""
        level = [(block, 0) for block in self._roots.values()]
        while level:
            yield from level
            level = [(child, depth + 1) for block, depth in level for child in block.children.values()]

    def move(self, pages: Sequence[int]) -> None:
        """Move the contents of these pages to others, wherever the allocator gives some, and give these back. Only between steps.

        Raises:
            OutOfPages: the pool has too few others; nothing was moved.
        """
        if not pages:
            return
        self._moved(pages, self._pool.moved(PageKind.KV, pages))

    def _moved(self, pages: Sequence[int], targets: Sequence[int]) -> None:
        self.table.move(pages, targets)
        self.moves += 1
        self._pool.free(pages)

    def gather(self) -> int:
        """Move pages out of the emptiest larger pages into the gaps of others; returns how many larger pages came free. Only between steps.

        Conversations that ended leave gaps: their pages lie scattered over more expert pages than they would fill.
        """
        allocator, freed = self._pool.allocator, 0
        per_parent = allocator.geometry.layout(PageKind.KV).per_parent
        for _ in range(allocator.owned(PageKind.KV)):
            pages = allocator.sparsest(PageKind.KV)
            # Its own gaps are no place to move to.
            if not pages or len(pages) > allocator.gaps(PageKind.KV) - (per_parent - len(pages)):
                break
            with allocator.passing_over(pages[0]):
                targets = self._pool.moved(PageKind.KV, pages)
            self._moved(pages, targets)
            freed += 1
        return freed

    def _free(self, blocks: Sequence[TokenBlock]) -> None:
        if not blocks:
            return
        self._pool.free([page for block in blocks for page in block.pages])
        self.table.remove(blocks)
        for block in blocks:
            block.pages = []


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
