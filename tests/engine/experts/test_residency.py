"""The resident set: who comes, who goes, what is in the pages, and when it shows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tiny_checkpoints import write_tiny_checkpoint
from torch import Tensor

from rimuru_cli.engine.experts.host_store import HostStore
from rimuru_cli.engine.experts.ranking import ExpertRanking
from rimuru_cli.engine.experts.residency import Residency, _ordered
from rimuru_cli.engine.experts.streaming import ExpertStream, LoadingBuffers
from rimuru_cli.engine.experts.transfer import Loader
from rimuru_cli.engine.memory.geometry import PageKind, PoolGeometry
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.memory.views import ExpertView
from rimuru_models.weights import CheckpointReader

F, D, LAYERS, EXPERTS = 48, 64, 4, 8


@dataclass
class Room:
    """Everything around a residency of a tiny model (qwen3_moe: 4 layers of 8 experts)."""

    pool: PagePool
    view: ExpertView
    host: HostStore
    ranking: ExpertRanking
    loader: Loader
    residency: Residency


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckpointReader]:
    with CheckpointReader(write_tiny_checkpoint(tmp_path_factory.mktemp("residency") / "m", "qwen3_moe")) as reader:
        yield reader


def _room(reader: CheckpointReader, experts: int, *, floor: int = 1, tiles: int = 1) -> Room:
    geometry = PoolGeometry.from_bytes(expert_page_bytes=F * D * 4 // tiles, kv_page_bytes=1024, tiles=tiles)
    pool = PagePool(geometry, experts * 3 * F * D * 4, poison=True)
    view, host, ranking, loader = ExpertView(pool, F, D, torch.float32), HostStore(reader), ExpertRanking(LAYERS, EXPERTS), Loader()
    residency = Residency(pool, view, host, ranking, loader, floor=floor, pages_per_expert=3 * tiles)
    return Room(pool, view, host, ranking, loader, residency)


def _holds(room: Room, layer: int, expert: int) -> bool:
    tiles = room.residency.tiles(layer, expert)
    if tiles is None:
        return False
    wanted = room.host.expert(layer, expert)
    return all(torch.equal(torch.cat(parts), whole) for parts, whole in zip(tiles, wanted, strict=True))


@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_a_filled_expert_is_in_its_pages(reader: CheckpointReader, tiles: int) -> None:
    room = _room(reader, 5, tiles=tiles)
    room.residency.fill(2, 7)
    assert _holds(room, 2, 7) and not _holds(room, 2, 6)
    assert room.pool.allocator.owned(PageKind.EXPERT) == 3 * tiles
    room.residency.check_integrity()


def test_the_best_ranked_come_and_the_worst_ranked_go(reader: CheckpointReader) -> None:
    room = _room(reader, 6)
    room.ranking.scores[:] = torch.arange(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS).double().numpy()
    assert room.residency.expand(4) == 4
    room.residency.commit(wait=True)
    assert [tuple(map(int, p)) for p in zip(*room.residency.resident.nonzero(), strict=True)] == [(3, 4), (3, 5), (3, 6), (3, 7)]
    assert room.residency.shrink(2) == 2
    assert room.residency.tiles(3, 4) is None and room.residency.tiles(3, 5) is None
    assert _holds(room, 3, 6) and _holds(room, 3, 7)
    room.residency.check_integrity()


def test_where_nothing_is_known_layers_take_turns(reader: CheckpointReader) -> None:
    room = _room(reader, 8)
    room.residency.expand(8)
    room.residency.commit(wait=True)
    assert room.residency.counts == [2, 2, 2, 2]


def test_the_floor_is_never_retired(reader: CheckpointReader) -> None:
    room = _room(reader, 8, floor=2)
    room.residency.expand(8)
    assert room.residency.shrinkable == 0
    assert room.residency.shrink(5) == 0
    assert room.residency.num_resident == 8


def test_expansion_stops_where_the_pool_ends(reader: CheckpointReader) -> None:
    room = _room(reader, 2)
    assert room.residency.expand(10) == 2
    assert room.residency.expand(1) == 0


def test_an_expert_shows_only_after_its_copy_completed(reader: CheckpointReader) -> None:
    room = _room(reader, 4)
    gate = threading.Event()
    room.loader.submit(lambda: gate.wait(timeout=30) and None)
    assert room.residency.expand(2) == 2
    room.residency.commit()
    assert not room.residency.resident.any() and (room.residency.entries == -1).all()
    assert room.residency.num_resident == 2
    room.residency.check_integrity()
    gate.set()
    room.residency.commit(wait=True)
    assert room.residency.resident.sum() == 2
    room.residency.check_integrity()


def test_copies_that_have_not_begun_are_called_back_without_waiting(reader: CheckpointReader) -> None:
    """Handing pages over must not wait for experts that would go at once."""
    room = _room(reader, 6, floor=0)
    room.residency.fill(0, 0)
    gate = threading.Event()
    room.loader.submit(lambda: gate.wait(timeout=30) and None)
    assert room.residency.expand(4) == 4
    assert room.residency.shrink(3) == 3, "this would wait for the gate"
    assert room.residency.num_resident == 2 and room.residency.resident.sum() == 1
    assert room.pool.allocator.owned(PageKind.EXPERT) == 6
    room.residency.check_integrity()
    gate.set()
    assert room.residency.shrink(1) == 1
    assert room.residency.num_resident == 1
    room.residency.check_integrity()
    room.residency.close()
    assert room.pool.allocator.owned(PageKind.EXPERT) == 0
    room.loader.close()


def test_the_floor_is_kept_when_copies_are_called_back(reader: CheckpointReader) -> None:
    room = _room(reader, 8, floor=1)
    gate = threading.Event()
    room.loader.submit(lambda: gate.wait(timeout=30) and None)
    assert room.residency.expand(6) == 6
    assert room.residency._recall(6) == 2
    assert min(room.residency.counts) == 1
    gate.set()
    room.residency.close()
    room.loader.close()


def test_an_expert_that_is_being_loaded_is_not_offered_pages_again(reader: CheckpointReader) -> None:
    room = _room(reader, 4)
    room.residency.fill(0, 1)
    room.ranking.scores[0] = [9, 1, 0, 0, 0, 0, 0, 0]
    gate = threading.Event()
    room.loader.submit(lambda: gate.wait(timeout=30) and None)
    room.residency.expand(1)
    room.residency.offer(0, [0], 1.3)
    assert room.residency.swaps == 0
    gate.set()
    room.residency.commit(wait=True)
    room.residency.check_integrity()
    assert _holds(room, 0, 0) and _holds(room, 0, 1)


def test_a_missed_expert_takes_the_pages_of_one_it_clearly_outranks(reader: CheckpointReader) -> None:
    room = _room(reader, 4)
    for expert in (0, 1):
        room.residency.fill(0, expert)
    room.ranking.scores[0] = [5, 2, 2.5, 2.7, 0, 0, 0, 0]
    room.residency.offer(0, [2], 1.3)
    assert room.residency.swaps == 0, "2.5 does not outrank 2 by 1.3"
    room.residency.offer(0, [3, 4], 1.3)
    assert room.residency.swaps == 1 and room.residency.counts[0] == 2
    assert _holds(room, 0, 3) and _holds(room, 0, 0) and room.residency.tiles(0, 1) is None
    room.residency.check_integrity()


def test_matrices_follow_every_move(reader: CheckpointReader) -> None:
    room = _room(reader, 3, floor=0)
    for layer, expert in ((0, 3), (1, 5)):
        room.residency.fill(layer, expert)
        matrices = room.residency.matrices[layer][expert]
        whole = room.host.expert(layer, expert)
        assert matrices is not None and torch.equal(matrices[0], torch.cat((whole.gate, whole.up))) and torch.equal(matrices[1], whole.down)
    room.residency.shrink(1)
    assert sum(m is not None for row in room.residency.matrices for m in row) == 1


def test_tiled_experts_have_no_matrices(reader: CheckpointReader) -> None:
    room = _room(reader, 3, tiles=2)
    room.residency.fill(0, 0)
    assert room.residency.matrices[0][0] is None and _holds(room, 0, 0)


def test_closing_gives_every_page_back(reader: CheckpointReader) -> None:
    room = _room(reader, 5)
    room.residency.fill(0, 0)
    room.residency.expand(3)
    room.residency.close()
    assert room.pool.allocator.owned(PageKind.EXPERT) == 0
    room.loader.close()


@pytest.mark.parametrize("capacity", [1, 2, 3, 8])
def test_a_stream_brings_every_absent_expert_of_every_layer(reader: CheckpointReader, capacity: int) -> None:
    room = _room(reader, 2 * capacity)
    buffers = LoadingBuffers(room.pool, room.view, capacity=capacity, pages_per_expert=3)
    absent = [[0, 1, 2, 3, 4], [], [7], [2, 5, 6]]
    stream = ExpertStream(buffers, room.host, room.loader, absent)
    for layer in range(LAYERS):
        seen = []
        for expert, (gate, up, down) in stream.take(layer):
            whole = room.host.expert(layer, expert)
            assert torch.equal(gate[0], whole.gate) and torch.equal(up[0], whole.up) and torch.equal(down[0], whole.down)
            seen.append(expert)
        assert seen == absent[layer]
    stream.close()
    buffers.close()
    assert room.pool.allocator.owned(PageKind.EXPERT) == 0


def test_a_stream_that_is_left_early_leaves_the_buffers_usable(reader: CheckpointReader) -> None:
    room = _room(reader, 2)
    buffers = LoadingBuffers(room.pool, room.view, capacity=1, pages_per_expert=3)
    first = ExpertStream(buffers, room.host, room.loader, [[0, 1, 2], [3], [], []])
    next(first.take(0))
    first.close()
    second = ExpertStream(buffers, room.host, room.loader, [[4], [], [], []])
    ((expert, tiles),) = second.take(0)
    assert expert == 4 and torch.equal(tiles[0][0], room.host.expert(0, 4).gate)
    second.close()


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("ties", [1, 3, 1000])
def test_the_order_is_that_of_a_full_sort(descending: bool, ties: int) -> None:
    """The first ones are found without sorting everything; equals go round the layers."""
    generator = np.random.default_rng(ties)
    scores = np.floor(generator.random((48, 64)) * (10**6 // ties)) if ties < 1000 else np.zeros((48, 64))
    mask = generator.random((48, 64)) < 0.7
    everything = [(layer, expert) for expert in range(64) for layer in range(48) if mask[layer, expert]]
    wanted = sorted(everything, key=lambda pair: -scores[pair])
    assert list(_ordered(scores, mask, descending=descending)) == (wanted if descending else wanted[::-1])


def test_an_exchange_that_fails_costs_an_expert_and_no_page(reader: CheckpointReader, monkeypatch: pytest.MonkeyPatch) -> None:
    room = _room(reader, 3)
    for expert in range(3):
        room.residency.fill(0, expert)
    room.ranking.scores[0, 5] = 1.0

    def fail(*args: object) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="gone"):
        patch.setattr(room.view, "write", fail)
        room.residency.offer(0, [5], 1.3)
    room.residency.check_integrity()
    assert room.residency.counts[0] == 2 and room.pool.allocator.owned(PageKind.EXPERT) == 6
    assert room.residency.expand(1) == 1
    room.residency.commit(wait=True)
    assert _holds(room, 0, 5)


class _LayerPages:
    """A view and a host tier of experts that have two pages in layer 0, three in layer 1 and five in layer 2."""

    num_layers, num_experts, expert_bytes, bytes_read, brought = 3, 4, 1, 0, 0

    def __init__(self) -> None:
        self.copied: dict[tuple[int, int], list[int]] = {}

    def expert(self, entries: list[int], layer: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        assert len(entries) == (2, 3, 5)[layer]
        return [], [], []

    def matrices(self, entries: list[int]) -> None:
        return None

    def copy_to(self, view: object, layer: int, expert: int, pages: list[int]) -> None:
        self.copied[layer, expert] = list(pages)


def test_experts_of_layers_with_different_numbers_of_pages() -> None:
    pool = PagePool(PoolGeometry.from_bytes(1024, 1024), 26 * 1024)
    tier, ranking, loader = _LayerPages(), ExpertRanking(3, 4), Loader()
    ranking.scores[:] = np.arange(12).reshape(3, 4)
    residency = Residency(pool, tier, tier, ranking, loader, floor=1, pages_per_expert=5, layer_pages=(2, 3, 5))
    chosen = residency.first_choice(1)
    # The floors take 2 + 3 + 5 pages; of the 15 others that may be taken, layer 2 takes 5, 5 and 5.
    assert chosen == [(0, 3), (1, 3), (2, 3), (2, 2), (2, 1), (2, 0)]
    for pair in chosen[:5]:
        residency.fill(*pair)
    assert residency.owned_pages == 2 + 3 + 3 * 5 == pool.allocator.owned(PageKind.EXPERT)
    assert residency.shrinkable == 2 and residency.shrinkable_pages == 10 and residency.mean_pages == 10 / 3
    residency.check_integrity()
    ranking.scores[0, 0] = 20
    assert residency.expand(5) == 1  # two of six pages; the next in the ranking would take five
    residency.commit(wait=True)
    residency.check_integrity()
    assert residency.owned_pages == pool.allocator.owned(PageKind.EXPERT)
    assert (residency.entries[0, 0, :2] >= 0).all() and (residency.entries[0, 0, 2:] == -1).all()
    moved = tier.copied[0, 0]
    ranking.scores[0, 1] = 100
    residency.offer(0, [1], 1.0)
    assert tier.copied[0, 1] == [int(page) for page in residency.entries[0, 1, :2]] and len(moved) == 2
    assert residency.shrink(1) == 1
    residency.check_integrity()
    assert residency.picture(step=0, wait=True).loading.shape == (0, 7)
    residency.close()
    assert pool.allocator.owned(PageKind.EXPERT) == 0
    loader.close()
