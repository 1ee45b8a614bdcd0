"""Views: shapes, dtypes and places of what lies in a page, and that the kinds never see each other's bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rimuru_cli.engine.memory.geometry import ENTRY_BYTES, PageKind, PoolGeometry
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.memory.views import DOWN, GATE, UP, ConvView, ExpertView, KVView, SSMView

F, D = 24, 32  # an expert page of 3072 bytes in float32
HEADS, HEAD_DIM, BLOCK = 2, 12, 4  # a KV page of 768 bytes
STATE = (2, 16, 16)  # 2048 bytes: huge pages of 2 experts or 3 states
CHANNELS, ROWS = 100, 3  # a conv row of 400 bytes, rounded up to 512


def make_pool(num_huge: int = 4, *, tiles: int = 1) -> PagePool:
    geometry = PoolGeometry.from_bytes(
        F * D * 4 // tiles, BLOCK * 2 * HEADS * HEAD_DIM * 4, STATE[0] * STATE[1] * STATE[2] * 4, CHANNELS * 4, tiles=tiles
    )
    return PagePool(geometry, num_huge * geometry.huge_page_bytes + 100, poison=True)


def random_expert(seed: int, f: int = F, d: int = D) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator) for shape in ((f, d), (f, d), (d, f)))  # type: ignore[return-value]


def assert_lies_at(view: Tensor, pool: PagePool, entry: int, skip_bytes: int = 0) -> None:
    assert view.data_ptr() == pool.data.data_ptr() + entry * ENTRY_BYTES + skip_bytes


def test_expert_round_trip() -> None:
    pool = make_pool()
    view = ExpertView(pool, F, D, torch.float32)
    scattered = pool.allocate(PageKind.EXPERT, 8)
    experts = [[scattered[i] for i in places] for places in ((5, 0, 3), (1, 7, 2))]
    for seed, entries in enumerate(experts):
        view.write(entries, *random_expert(seed))
    for seed, entries in enumerate(experts):
        gate, up, down = random_expert(seed)
        (got_gate,), (got_up,), (got_down,) = view.expert(entries)
        assert torch.equal(got_gate, gate) and torch.equal(got_up, up) and torch.equal(got_down, down)
        for projection, entry in zip((GATE, UP, DOWN), entries, strict=True):
            tile = view.tiles_of(projection, entry)
            assert tile.is_contiguous() and tile.dtype is torch.float32
            assert_lies_at(tile, pool, entry)
    assert bool(pool.bytes_of(scattered[4], F * D * 4).eq(0xFF).all()), "the page between was not touched"


def test_matrices_of_pages_that_follow_each_other() -> None:
    pool = make_pool()
    view = ExpertView(pool, F, D, torch.float32)
    pages = pool.allocate(PageKind.EXPERT, 6)
    gate, up, down = random_expert(0)
    view.write(pages[:3], gate, up, down)
    matrices = view.matrices(pages[:3])
    assert matrices is not None
    assert torch.equal(matrices[0], torch.cat((gate, up))) and torch.equal(matrices[1], down)
    assert view.matrices([pages[0], pages[4], pages[1]]) is None, "gate and up do not follow each other"


def test_expert_tiles_round_trip() -> None:
    pool = make_pool(tiles=4)
    view = ExpertView(pool, F, D, torch.float32)
    entries = pool.allocate(PageKind.EXPERT, 13)[::-1][:12]
    assert view.matrices(entries) is None
    gate, up, down = random_expert(5)
    view.write(entries, gate, up, down)
    gates, ups, downs = view.expert(entries)
    assert [tuple(tile.shape) for tile in (gates[0], ups[0], downs[0])] == [(F // 4, D), (F // 4, D), (D // 4, F)]
    assert torch.equal(torch.cat(gates), gate) and torch.equal(torch.cat(ups), up) and torch.equal(torch.cat(downs), down)
    assert torch.equal(view.tiles_of(DOWN, entries[9]), down[8:16])


def test_large_experts_are_written_in_pieces_and_whole() -> None:
    f, d = 130, 257  # more elements than one piece
    pool = PagePool(PoolGeometry.from_bytes(f * d * 4, 768), 4 * 4 * f * d)
    view = ExpertView(pool, f, d, torch.float32)
    entries = pool.allocate(PageKind.EXPERT, 3)
    parts = random_expert(1, f, d)
    view.write(entries, *parts)
    assert all(torch.equal(got, part) for (got,), part in zip(view.expert(entries), parts, strict=True))


def test_expert_write_converts_and_checks() -> None:
    pool = PagePool(PoolGeometry.from_bytes(F * D * 2, 768), 4 * F * D * 2)
    view = ExpertView(pool, F, D, torch.bfloat16)
    entries = pool.allocate(PageKind.EXPERT, 3)
    gate, up, down = random_expert(0)
    view.write(entries, gate, up, down)
    assert torch.equal(view.expert(entries)[2][0], down.bfloat16())
    with pytest.raises(ValueError, match="gate, up and down"):
        view.write(entries, gate, up, down.T)
    with pytest.raises(AssertionError, match="3 pages"):
        view.expert(entries[:2])


def test_kv_keys_then_values() -> None:
    pool = make_pool()
    view = KVView(pool, HEADS, HEAD_DIM, BLOCK, torch.float32)
    first, second = pool.allocate(PageKind.KV, 2)
    shape = (BLOCK, HEADS, HEAD_DIM)
    view.keys(first).copy_(torch.arange(96.0).view(shape))
    view.values(first).copy_(torch.arange(96.0, 192.0).view(shape))
    assert tuple(view.keys(first).shape) == tuple(view.values(first).shape) == shape
    assert torch.equal(pool.bytes_of(first, 768).view(torch.float32), torch.arange(192.0)), "K and V fill the page in this order"
    assert_lies_at(view.values(first), pool, first, 96 * 4)
    assert bool(view.keys(second).isnan().all())


def test_ssm_state() -> None:
    pool = make_pool()
    view = SSMView(pool, STATE)
    pages = pool.allocate(PageKind.SSM, 3)
    state = torch.arange(512.0).view(STATE)
    view.state(pages[1]).copy_(state)
    assert torch.equal(view.state(pages[1]), state) and view.state(pages[1]).is_contiguous()
    assert_lies_at(view.state(pages[1]), pool, pages[1])
    assert bool(view.state(pages[0]).isnan().all()) and bool(view.state(pages[2]).isnan().all())


def test_conv_rows() -> None:
    pool = make_pool()
    view = ConvView(pool, CHANNELS, ROWS, torch.float32)
    runs = pool.allocate_runs(PageKind.CONV, 3, ROWS)
    state = torch.arange(300.0).view(ROWS, CHANNELS)
    view.rows(runs[1]).copy_(state)
    assert torch.equal(view.rows(runs[1]), state)
    for row, entry in enumerate(runs[1]):
        assert_lies_at(view.rows(runs[1])[row], pool, entry)
        assert bool(pool.bytes_of(entry, 512)[400:].eq(0xFF).all()), "the rounding behind a row is not written"
    assert bool(view.rows(runs[0]).isnan().all()) and bool(view.rows(runs[2]).isnan().all())
    for broken in ([runs[0][0], runs[1][0], runs[0][2]], runs[0][:2], runs[0][::-1]):
        with pytest.raises(AssertionError, match="follow each other"):
            view.rows(broken)


def test_one_page_lives_many_lives() -> None:
    """The same bytes hold experts, then KV, then states, then conv rows, then experts, with nothing of the old content left in sight."""
    pool = make_pool(num_huge=1)
    experts, kv = ExpertView(pool, F, D, torch.float32), KVView(pool, HEADS, HEAD_DIM, BLOCK, torch.float32)
    ssm, conv = SSMView(pool, STATE), ConvView(pool, CHANNELS, ROWS, torch.float32)
    for _ in range(2):
        pages = pool.allocate(PageKind.EXPERT, 2)
        for number, page in enumerate(pages):
            experts.tiles_of(GATE, page).fill_(number)
        assert [float(experts.tiles_of(GATE, page).mean()) for page in pages] == [0, 1]
        pool.free(pages)

        pages = pool.allocate(PageKind.KV, 8)
        assert all(bool(kv.keys(page).isnan().all()) for page in pages)
        for number, page in enumerate(pages):
            kv.keys(page).fill_(number)
            kv.values(page).fill_(-number)
        assert [float(kv.keys(page).mean()) for page in pages] == list(range(8))
        assert [float(kv.values(page).mean()) for page in pages] == [-number for number in range(8)]
        pool.free(pages)

        pages = pool.allocate(PageKind.SSM, 3)
        for number, page in enumerate(pages):
            assert bool(ssm.state(page).isnan().all())
            ssm.state(page).fill_(number)
        assert [float(ssm.state(page).mean()) for page in pages] == [0, 1, 2]
        pool.free(pages)

        runs = pool.allocate_runs(PageKind.CONV, pool.allocator.available(PageKind.CONV) // ROWS, ROWS)
        for number, run in enumerate(runs):
            conv.rows(run).fill_(number)
        assert [float(conv.rows(run).mean()) for run in runs] == list(range(len(runs)))
        pool.free([page for run in runs for page in run])
    pool.allocator.check_integrity()


@pytest.mark.parametrize(
    ("expert_bytes", "heads", "head_dim", "block", "rows_per_half"),
    [
        pytest.param(6144, 2, 12, 4, 1, id="half pages fill the pool"),
        pytest.param(3072 + 256, 2, 12, 4, 3, id="a tail after the pages of each parent"),
        pytest.param(4096, 2, 10, 3, 15, id="pages rounded up to an entry"),
    ],
)
def test_keys_and_values_of_scattered_pages_are_gathered(
    expert_bytes: int, heads: int, head_dim: int, block: int, rows_per_half: int
) -> None:
    geometry = PoolGeometry.from_bytes(expert_bytes, block * 2 * heads * head_dim * 4)
    pool = PagePool(geometry, 6 * expert_bytes, poison=True)
    view = KVView(pool, heads, head_dim, block, torch.float32)
    pages = pool.allocate(PageKind.KV, pool.allocator.available(PageKind.KV))[::-2]
    for page in pages:
        view.keys(page).copy_(torch.randn(block, heads, head_dim))
        view.values(page).copy_(torch.randn(block, heads, head_dim))
    assert view.rows_per_half == rows_per_half
    keys, values = view.rows_of(pages)
    gathered = view.gather(torch.stack((keys, values)))
    assert torch.equal(gathered[0], torch.cat([view.keys(page) for page in pages]))
    assert torch.equal(gathered[1], torch.cat([view.values(page) for page in pages]))


def test_kinds_side_by_side_keep_to_their_bytes() -> None:
    pool = make_pool(num_huge=3)
    experts, kv = ExpertView(pool, F, D, torch.float32), KVView(pool, HEADS, HEAD_DIM, BLOCK, torch.float32)
    ssm, conv = SSMView(pool, STATE), ConvView(pool, CHANNELS, ROWS, torch.float32)
    expert_pages, kv_pages = pool.allocate(PageKind.EXPERT, 1), pool.allocate(PageKind.KV, 4)
    states, runs = pool.allocate(PageKind.SSM, 3), pool.allocate_runs(PageKind.CONV, 1, ROWS)
    views = [experts.tiles_of(GATE, expert_pages[0]), *map(kv.keys, kv_pages), *map(kv.values, kv_pages), *map(ssm.state, states)]
    views += [conv.rows(run) for run in runs]
    for number, view in enumerate(views):
        view.fill_(number)
    assert [view.unique().tolist() for view in views] == [[number] for number in range(len(views))]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda pool: ExpertView(pool, F + 8, D, torch.float32), id="expert shape"),
        pytest.param(lambda pool: ExpertView(pool, F, D, torch.bfloat16), id="expert dtype"),
        pytest.param(lambda pool: KVView(pool, HEADS, HEAD_DIM, BLOCK + 1, torch.float32), id="block"),
        pytest.param(lambda pool: SSMView(pool, (2, 16, 8)), id="state"),
        pytest.param(lambda pool: ConvView(pool, CHANNELS - 1, ROWS, torch.float32), id="channels"),
    ],
)
def test_views_that_do_not_fit_the_geometry(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="page of this pool"):
        make(make_pool())


def test_view_refuses_absent_entries() -> None:
    pool = make_pool()
    with pytest.raises(AssertionError, match="not in the pool"):
        ExpertView(pool, F, D, torch.float32).tiles_of(GATE, -1)
