"""Token blocks and their tree: sharing, reuse of partly filled blocks, eviction."""

from __future__ import annotations

import random

import pytest
import torch

from rimuru_cli.engine.kv_blocks import KVBlocks, TokenBlock
from rimuru_cli.engine.memory.allocator import OutOfPages
from rimuru_cli.engine.memory.geometry import PageKind, PoolGeometry
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.memory.views import KVView

LAYERS, SIZE = 3, 4


@pytest.fixture
def pool() -> PagePool:
    geometry = PoolGeometry.from_bytes(expert_page_bytes=4096, kv_page_bytes=SIZE * 2 * 2 * 8 * 4)
    return PagePool(geometry, 64 * 4096, poison=True)


@pytest.fixture
def blocks(pool: PagePool) -> KVBlocks:
    return KVBlocks(pool, KVView(pool, 2, 8, SIZE, torch.float32), LAYERS)


def _store(blocks: KVBlocks, tokens: list[int]) -> list[TokenBlock]:
    """A sequence that computed `tokens`, ended, and stays in the tree. Keys are the token ids, so contents can be checked."""
    own = blocks.allocate(blocks.blocks_for(len(tokens)))
    for position, token in enumerate(tokens):
        for layer in range(LAYERS):
            blocks.view.keys(own[position // SIZE].pages[layer])[position % SIZE] = token
            blocks.view.values(own[position // SIZE].pages[layer])[position % SIZE] = -token
    blocks.remember(own, tokens)
    blocks.release(own)
    return own


def test_a_block_is_one_page_of_every_layer(blocks: KVBlocks, pool: PagePool) -> None:
    own = blocks.allocate(2)
    assert pool.allocator.owned(PageKind.KV) == 2 * LAYERS
    assert len({page for block in own for page in block.pages}) == 2 * LAYERS
    blocks.release(own)
    assert pool.allocator.owned(PageKind.KV) == 0


def test_allocation_is_all_or_nothing(blocks: KVBlocks, pool: PagePool) -> None:
    most = pool.allocator.available(PageKind.KV) // LAYERS
    with pytest.raises(OutOfPages):
        blocks.allocate(most + 1)
    assert pool.allocator.owned(PageKind.KV) == 0
    assert len(blocks.allocate(most)) == most


def test_whole_blocks_are_shared(blocks: KVBlocks) -> None:
    own = _store(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    match = blocks.match([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert match.blocks == own and match.partial is None
    assert [b.users for b in own] == [1, 1]
    assert blocks.idle_pages == 0


def test_the_longest_beginning_counts_even_within_a_block(blocks: KVBlocks) -> None:
    own = _store(blocks, [1, 2, 3, 4, 5, 6])
    _store(blocks, [1, 2, 3, 4, 5, 9, 9, 9])
    match = blocks.match([1, 2, 3, 4, 5, 6, 7])
    assert match.blocks == own[:1]
    assert match.partial is own[1] and match.partial_tokens == 2
    assert blocks.match([1, 2, 7]).partial_tokens == 2
    assert blocks.match([8, 8]).partial is None


def test_copied_tokens_carry_their_contents(blocks: KVBlocks) -> None:
    source = _store(blocks, [5, 6, 7])[0]
    target = blocks.allocate(1)[0]
    blocks.copy_tokens(source, target, 2)
    for page in target.pages:
        assert blocks.view.keys(page)[:, 0, 0].tolist()[:2] == [5.0, 6.0]
        assert blocks.view.values(page)[:, 1, 3].tolist()[:2] == [-5.0, -6.0]
        assert blocks.view.keys(page)[2:].isnan().all()


def test_the_rows_of_blocks_are_their_tokens_in_order(blocks: KVBlocks) -> None:
    own = _store(blocks, [5, 6, 7, 8, 9])
    rows = blocks.rows_of([own[1], own[0]])
    assert rows.shape == (LAYERS, 2, 2 * blocks.view.rows_per_half)
    for keys, values in rows:
        gathered = blocks.view.gather(torch.stack((keys, values)))
        assert gathered[0][:, 1, 7].tolist()[4:] == [5.0, 6.0, 7.0, 8.0]
        assert gathered[1][0].eq(-9.0).all()


def test_the_same_text_twice_is_kept_once_and_its_continuation_is_found(blocks: KVBlocks, pool: PagePool) -> None:
    first = _store(blocks, [1, 2, 3, 4])
    second = _store(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    assert pool.allocator.owned(PageKind.KV) == 2 * LAYERS
    match = blocks.match([1, 2, 3, 4, 5, 6, 7, 8])
    assert match.blocks == [first[0], second[1]]


def test_a_block_filed_behind_others_than_its_own_counts_as_moved(blocks: KVBlocks) -> None:
    """Whoever knows a path by its last block must hear that the ones before it are others now."""
    text = list(range(SIZE * 2))
    _store(blocks, text)
    assert blocks.moves == 0
    _store(blocks, text)  # the same: nothing is filed behind anything
    assert blocks.moves == 0
    _store(blocks, [*text, 7, 8])
    assert blocks.moves == 1
    _store(blocks, [9, *text])  # another text
    assert blocks.moves == 1


def test_eviction_takes_the_oldest_and_outermost_first(blocks: KVBlocks) -> None:
    old = _store(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    new = _store(blocks, [9, 9, 9, 9])
    assert blocks.evict(1) == LAYERS
    assert blocks.match([1, 2, 3, 4, 5, 6, 7, 8]).blocks == old[:1]
    blocks.release(old[:1])  # used now, so [9, 9, 9, 9] is the older one
    assert blocks.evict(LAYERS) == LAYERS
    assert blocks.match([9, 9, 9, 9]).blocks == [] and new[0].pages == []
    assert blocks.evict(100) == LAYERS
    assert blocks.idle_pages == 0


def test_held_blocks_are_never_evicted(blocks: KVBlocks) -> None:
    _store(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    match = blocks.match([1, 2, 3, 4, 5, 6, 7, 8])
    assert blocks.evict(1000) == 0
    assert all(block.pages for block in match.blocks)


@pytest.mark.parametrize("seed", range(5))
def test_random_use_never_loses_or_leaks_a_page(seed: int, blocks: KVBlocks, pool: PagePool) -> None:
    """Sequences over a tiny alphabet (so that they share a lot) start, grow, end and are evicted at random."""
    generator = random.Random(seed)
    running: list[tuple[list[int], list[TokenBlock]]] = []
    for _ in range(400):
        action = generator.random()
        if action < 0.4 and len(running) < 5:
            tokens = [generator.randrange(2) for _ in range(generator.randint(1, 14))]
            match = blocks.match(tokens)
            held = len(match.blocks) * SIZE
            for position in range(held):
                key = blocks.view.keys(match.blocks[position // SIZE].pages[0])[position % SIZE, 0, 0]
                assert key == tokens[position], "a shared block holds another text"
            wanted = blocks.blocks_for(len(tokens)) - len(match.blocks)
            if wanted * LAYERS > pool.allocator.available(PageKind.KV):
                blocks.evict(wanted * LAYERS)
            own = match.blocks + blocks.allocate(wanted)
            for position in range(held, len(tokens)):
                blocks.view.keys(own[position // SIZE].pages[0])[position % SIZE] = tokens[position]
            running.append((tokens, own))
        elif action < 0.8 and running:
            tokens, own = running.pop(generator.randrange(len(running)))
            blocks.remember(own, tokens[: generator.randint(0, len(tokens))])
            blocks.release(own)
        else:
            blocks.evict(generator.randint(0, 12))
        in_use = {id(b): b for _, own in running for b in own}
        held_pages = sum(len(b.pages) for b in in_use.values())
        assert held_pages + blocks.idle_pages == pool.allocator.owned(PageKind.KV)
        pool.allocator.check_integrity()
    for _, own in running:
        blocks.release(own)
    blocks.evict(10_000)
    assert pool.allocator.owned(PageKind.KV) == 0


def test_moved_blocks_keep_their_contents_in_every_place_that_knows_them(blocks: KVBlocks, pool: PagePool) -> None:
    """A block shared by two sequences and the tree moves once, and all of them see it."""
    own = _store(blocks, [1, 2, 3, 4, 5, 6])
    match = blocks.match([1, 2, 3, 4, 9])
    assert match.blocks == own[:1]
    before, moves = [list(block.pages) for block in own], blocks.moves
    blocks.move([before[0][1], before[1][0], before[1][2]])
    assert blocks.moves == moves + 1
    assert own[0].pages[1] != before[0][1] and (own[0].pages[0], own[0].pages[2]) == (before[0][0], before[0][2])
    assert [own[1].pages[1]] == [before[1][1]] and own[1].pages[0] != before[1][0]
    for index, block in enumerate(own):
        assert blocks.table.pages[block.slot].tolist() == block.pages
        for page in block.pages:
            first = index * SIZE + 1
            assert blocks.view.keys(page)[: 2 if index else 4, 0, 0].tolist() == [float(t) for t in range(first, 7)][: 2 if index else 4]
    assert pool.allocator.owned(PageKind.KV) == 2 * LAYERS
    pool.allocator.check_integrity()
    blocks.release(match.blocks)


def test_a_move_without_room_moves_nothing(blocks: KVBlocks, pool: PagePool) -> None:
    own = blocks.allocate(pool.allocator.available(PageKind.KV) // LAYERS)
    spare = pool.allocate(PageKind.KV, pool.allocator.available(PageKind.KV))
    before = [list(block.pages) for block in own]
    with pytest.raises(OutOfPages):
        blocks.move(before[0])
    assert [block.pages for block in own] == before and blocks.moves == 0
    pool.free(spare)


@pytest.mark.parametrize("per_huge", [1, 3, 16])
@pytest.mark.parametrize("seed", range(4))
def test_gathering_leaves_no_more_larger_pages_than_needed(seed: int, per_huge: int) -> None:
    """Also where huge pages hold several of them: the gaps may lie beside each other, and there may be none in any other huge page."""
    ssm = None if per_huge == 1 else 4096 * per_huge // (per_huge - 1) // 256 * 256 if per_huge != 3 else 4096 * 3
    geometry = PoolGeometry.from_bytes(4096, SIZE * 2 * 2 * 8 * 4, ssm)
    pool = PagePool(geometry, 48 * 4096, poison=True)
    blocks = KVBlocks(pool, KVView(pool, 2, 8, SIZE, torch.float32), LAYERS)
    generator = random.Random(seed)
    kept, others = [], []
    for _ in range(8):
        text = [generator.randrange(1000) for _ in range(generator.randint(1, 20))]
        kept.append((text, _store(blocks, text)))
        others.append(blocks.allocate(generator.randint(1, 5)))
    for own in others:
        blocks.release(own)
    allocator = pool.allocator
    experts = pool.allocate(PageKind.EXPERT, allocator.available(PageKind.EXPERT))  # no page is there to move to but what has gaps
    freed = blocks.gather()
    assert freed == allocator.available(PageKind.EXPERT) > 0
    per_parent = allocator.geometry.layout(PageKind.KV).per_parent
    assert allocator.gaps(PageKind.KV) < per_parent, "gaps of a whole larger page are left"
    allocator.check_integrity()
    for text, own in kept:
        for position, token in enumerate(text):
            for page in own[position // SIZE].pages:
                assert blocks.view.keys(page)[position % SIZE, 0, 0] == token
    assert blocks.gather() == 0
    pool.free(experts)
