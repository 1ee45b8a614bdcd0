"""Whether all tables of an engine agree with one another."""

from __future__ import annotations

from collections.abc import Sequence

from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_cli.engine.parts import Parts
from rimuru_cli.engine.sequence import Sequence as TokenSequence


def check_tables(parts: Parts, sequences: Sequence[TokenSequence]) -> None:
    """Allocator, resident experts, loading buffers, token blocks and states agree; raises AssertionError otherwise.

    Args:
        sequences: all that run or wait.
    """
    allocator, residency, recurrent = parts.pool.allocator, parts.residency, parts.recurrent
    allocator.check_integrity()
    residency.check_integrity()
    parts.blocks.check_integrity()
    held = {id(b): b for s in sequences for b in s.blocks}
    if recurrent is not None:
        held |= {id(b): b for bookmark in recurrent.bookmarks.all() for b in bookmark.blocks}
        known = [s.states for s in sequences if s.states is not None]
        known += [states for s in sequences for states in s.keeping.values()]
        recurrent.check_integrity(known, allocator)
    kv_pages = sum(len(b.pages) for b in held.values()) + parts.blocks.idle_pages
    owned = allocator.owned(PageKind.KV)
    assert kv_pages == owned, f"{kv_pages} KV pages are known, {owned} are owned"
    ours = residency.owned_pages + parts.buffers.num_pages
    owned = allocator.owned(PageKind.EXPERT)
    assert ours == owned, f"{ours} expert pages are known, {owned} are owned"
