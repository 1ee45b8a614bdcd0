"""States kept for texts that may come again: at the end of each turn, near the end of each prompt, and every few thousand tokens.

Keys and values of a beginning can be taken over token by token, but a state belongs to exactly one length of a text. A bookmark is a
state together with the token blocks before it, which it holds, so that none of them is given up while it can be resumed from. The one used
least recently goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from rimuru_cli.engine.kv_blocks import KVBlocks, Match, TokenBlock
from rimuru_cli.engine.state_blocks import StateBlock, StateBlocks

TAIL = 8
"""Tokens before the end of a prompt at which a state is kept at the latest: the words that open an answer are often not the same next time
(a model's thoughts are left out of what it reads later), and an answer asked for again must compute its last token again."""

INTERVAL = 2048
"""A long prompt leaves a state at every multiple of so many tokens."""


@dataclass(eq=False, slots=True)
class Bookmark:
    """A state that can be resumed from.

    Attributes:
        states: after `length` tokens.
        blocks: tree blocks that hold these tokens, the last one perhaps in part; each counts this bookmark as a user.
        length: tokens.
    """

    states: StateBlock
    blocks: list[TokenBlock]
    length: int


def places_to_keep(first: int, last: int, parted: int, block_tokens: int, interval: int) -> list[int]:
    """Lengths at which a prompt should leave states, ascending: whole blocks only, since the prompt goes on writing behind them.

    Args:
        first: tokens already computed.
        last: tokens of the prompt.
        parted: where another text took another way (0: nowhere); it may do so again.
        block_tokens: tokens of a block.
        interval: distance on the way.
    """
    step = max(1, interval // block_tokens) * block_tokens
    wanted = {parted // block_tokens * block_tokens, max(0, last - TAIL) // block_tokens * block_tokens}
    wanted.update(range(first // step * step + step, last, step))
    return sorted(place for place in wanted if first < place < last)


class Bookmarks:
    """All bookmarks of an engine.

    Attributes:
        pinned: one that is about to be resumed from and must stay, or None.
    """

    def __init__(self, states: StateBlocks, blocks: KVBlocks) -> None:
        self._states = states
        self._blocks = blocks
        self._kept: OrderedDict[Bookmark, None] = OrderedDict()  # least recently used first
        self._behind: dict[TokenBlock | None, list[Bookmark]] = {}  # by their last whole block
        self.pinned: Bookmark | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def all(self) -> list[Bookmark]:
        """Least recently used first."""
        return list(self._kept)

    def best(self, match: Match, tokens: Sequence[int]) -> Bookmark | None:
        """The longest bookmark of a beginning of `tokens`; `match` is what the tree holds of them."""
        size = self._blocks.block_tokens
        for whole in range(len(match.blocks), -1, -1):
            rest = tokens[whole * size : (whole + 1) * size]
            fitting = [c for c in self._behind.get(match.blocks[whole - 1] if whole else None, ()) if self._fits(c, rest)]
            if fitting:
                return max(fitting, key=lambda bookmark: bookmark.length)
        return None

    def _fits(self, bookmark: Bookmark, rest: Sequence[int]) -> bool:
        count = bookmark.length % self._blocks.block_tokens
        if not count:
            return True
        own = bookmark.blocks[-1].tokens
        assert own is not None, "a bookmark's blocks lie in the tree"
        return len(rest) >= count and own[:count] == tuple(rest[:count])

    def used(self, bookmark: Bookmark) -> None:
        """It was resumed from: it goes last now."""
        self._kept.move_to_end(bookmark)

    def keep(self, states: StateBlock, blocks: Sequence[TokenBlock], length: int) -> None:
        """Keep states after `length` tokens, which lie in these blocks of the tree. The states now belong to the bookmark."""
        size = self._blocks.block_tokens
        assert 0 < length <= len(blocks) * size < length + size, "the blocks hold just these tokens"
        last = blocks[length // size - 1] if length >= size else None
        same = [c for c in self._behind.get(last, ()) if c.length == length and c.blocks[-1] is blocks[-1]]
        if same:
            self.used(same[0])
            self._states.free(states)
            return
        for block in blocks:
            self._blocks.hold(block)
        bookmark = Bookmark(states, list(blocks), length)
        self._kept[bookmark] = None
        self._behind.setdefault(last, []).append(bookmark)

    def evict(self) -> bool:
        """Give up the one used least recently that is not pinned; False if there is none."""
        for bookmark in self._kept:
            if bookmark is not self.pinned:
                self._drop(bookmark)
                return True
        return False

    def forget_all(self) -> None:
        """Give up all of them."""
        for bookmark in list(self._kept):
            self._drop(bookmark)

    def _drop(self, bookmark: Bookmark) -> None:
        del self._kept[bookmark]
        size = self._blocks.block_tokens
        last = bookmark.blocks[bookmark.length // size - 1] if bookmark.length >= size else None
        self._behind[last].remove(bookmark)
        if not self._behind[last]:
            del self._behind[last]
        self._states.free(bookmark.states)
        self._blocks.release(bookmark.blocks)
