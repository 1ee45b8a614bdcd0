"""From what an engine wrote down to a frame, with what only a look at two of its moments can tell: when pages were loaded and used."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rimuru_cli.engine.memory.geometry import PageKind, PoolGeometry
from rimuru_cli.engine.telemetry.frame import (
    BUFFER,
    CONV,
    EXPERT,
    KV,
    NOBODY,
    SSM,
    AdjusterRecord,
    CeilingAnswer,
    Counters,
    EngineIdentity,
    ExpertTable,
    Frame,
    PageTable,
)
from rimuru_cli.engine.telemetry.layout import DamagedTables, PoolLayout
from rimuru_cli.engine.telemetry.tables import Ints, Tables

_USED = 1 + 1e-4  # scores of unused experts of a layer shrink by one factor; the used ones' by clearly less


@dataclass(frozen=True)
class Head:
    """Everything of a frame that is not an array; `kv_layers` are the model layers that have a KV cache."""

    number: int
    time: float
    busy: bool
    engine: EngineIdentity
    counters: Counters
    kv_layers: tuple[int, ...]
    events: tuple[AdjusterRecord, ...] = ()
    answer: CeilingAnswer | None = None


@dataclass(eq=False)
class _Seen:
    """The last moment of one engine, and what was learned up to then."""

    tables: Tables
    expert_loaded: Ints
    expert_used: Ints
    block_loaded: Ints
    block_used: Ints


def geometry_of(engine: EngineIdentity) -> PoolGeometry:
    """The page sizes of an engine's pool. Raises ValueError if they make up none."""
    return PoolGeometry.from_bytes(
        engine.expert_page_bytes, engine.kv_page_bytes, engine.ssm_page_bytes, engine.conv_page_bytes, engine.tiles
    )


class FrameAssembler:
    """Makes the frames of one reader, one after the other. Starts anew by itself when another engine's tables come."""

    def __init__(self) -> None:
        self._key: object = None
        self._layout: PoolLayout | None = None
        self._seen: _Seen | None = None

    def forget(self) -> None:
        """Start anew: the next frame need not follow the last one."""
        self._seen = None

    def frame(self, head: Head, tables: Tables) -> Frame:
        """One frame.

        Raises:
            DamagedTables: the tables do not fit one another or the pool.
        """
        engine = head.engine
        sizes = (engine.pool_bytes, engine.expert_page_bytes, engine.ssm_page_bytes, engine.kv_page_bytes, engine.conv_page_bytes)
        key = (engine.engine_id, *sizes, engine.tiles, engine.num_moe_layers, engine.num_experts)
        if key != self._key or self._layout is None:
            try:
                self._layout = PoolLayout(geometry_of(engine), engine.pool_bytes)
            except ValueError as error:
                raise DamagedTables(str(error)) from error
            self._key, self._seen = key, None
        if engine.huge_page_bytes != self._layout.geometry.huge_page_bytes:
            raise DamagedTables(f"pages of these sizes make no huge pages of {engine.huge_page_bytes} bytes")
        _check_shapes(head, tables)
        seen = self._seen = self._learn(head, tables)
        pages = _pages(head, seen, self._layout)
        resident = tables.entries[:, :, 0] >= 0
        loading = np.zeros(resident.shape, dtype=np.bool_)
        loading[tables.loading[:, 0], tables.loading[:, 1]] = True
        experts = ExpertTable(
            resident=resident,
            loading=loading,
            score=tables.scores,
            used_step=seen.expert_used,
            loaded_step=seen.expert_loaded,
            hits=tables.hits,
            layer_uses=None if tables.layers is None else tables.layers[:, 0],
            layer_hits=None if tables.layers is None else tables.layers[:, 1],
        )
        return Frame(
            number=head.number,
            time=head.time,
            busy=head.busy,
            engine=engine,
            counters=head.counters,
            pages=pages,
            experts=experts,
            events=head.events,
            answer=head.answer,
        )

    def _learn(self, head: Head, tables: Tables) -> _Seen:
        last, step = self._seen, head.counters.tables_step
        visible = tables.entries[:, :, 0] >= 0
        slots = len(tables.block_owner)
        block_loaded, block_used = np.full((2, slots), NOBODY, dtype=np.int32)
        if last is None:
            loaded, used = np.full((2, *visible.shape), NOBODY, dtype=np.int32)
        else:
            moved = visible & (tables.entries[:, :, 0] != last.tables.entries[:, :, 0])
            loaded = np.where(moved, np.int32(step), np.where(visible, last.expert_loaded, np.int32(NOBODY)))
            used = np.where(_used(last.tables, tables), np.int32(step), last.expert_used)
            both = min(slots, len(last.block_loaded))
            same = np.zeros(slots, dtype=np.bool_)
            same[:both] = tables.blocks[:both, 0] == last.tables.blocks[:both, 0]
            block_loaded[:] = head.counters.step
            block_loaded[:both][same[:both]] = last.block_loaded[:both][same[:both]]
            block_used[:both][same[:both]] = last.block_used[:both][same[:both]]
        if len(tables.running):
            block_used[np.isin(tables.block_owner, tables.running)] = head.counters.step
        return _Seen(tables, loaded, used, block_loaded, block_used)


def _used(before: Tables, now: Tables) -> NDArray[np.bool_]:
    """Which experts were selected between two moments; exact where selections are counted, otherwise told from their scores."""
    if before.hits is not None and now.hits is not None:
        return now.hits > before.hits
    grew = now.scores > 0
    ratio = np.divide(now.scores, before.scores, out=np.full(now.scores.shape, np.inf, dtype=np.float32), where=before.scores > 0)
    ratio[~grew] = np.inf
    used: NDArray[np.bool_] = grew & (ratio > ratio.min(axis=1, keepdims=True) * np.float32(_USED))
    return used


def _pages(head: Head, seen: _Seen, layout: PoolLayout) -> PageTable:
    tables, engine = seen.tables, head.engine
    kinds = layout.geometry.kinds
    rows, experts = np.nonzero(tables.entries[:, :, 0] >= 0)
    visible = tables.entries[rows, experts]
    used_blocks = np.flatnonzero(tables.blocks[:, 0] >= 0)
    kv = tables.blocks[used_blocks]
    loading = tables.loading[:, 2:]
    states = {PageKind.SSM: tables.states[tables.states[:, 0] == 0], PageKind.CONV: tables.states[tables.states[:, 0] == 1]}
    # Behind the pages of a layer whose experts have fewer than others there is nothing.
    there, coming = visible >= 0, loading >= 0
    owned = {PageKind.EXPERT: np.concatenate((visible[there], loading[coming], tables.buffers)), PageKind.KV: kv.reshape(-1)}
    for kind, found in states.items():
        if kind in kinds:
            owned[kind] = found[:, 1]
        elif len(found):
            raise DamagedTables(f"the pool has no {kind.value} pages")
    at = layout.boundaries(owned)
    count = len(at.offset)
    kind_codes = at.kind.copy()
    layers, owner, part, rank, loaded, used = (np.full(count, NOBODY, dtype=np.int32) for _ in range(6))
    score = np.full(count, np.nan, dtype=np.float32)

    expert_rows = layout.rows(PageKind.EXPERT, owned[PageKind.EXPERT], at)
    num_visible, num_loading = np.count_nonzero(there), np.count_nonzero(coming)
    kind_codes[expert_rows] = EXPERT
    kind_codes[expert_rows[num_visible + num_loading :]] = BUFFER
    both = expert_rows[: num_visible + num_loading]
    per_expert = np.concatenate((there.sum(1), coming.sum(1)))
    which = np.repeat(np.concatenate((rows, tables.loading[:, 0])), per_expert)
    expert = np.repeat(np.concatenate((experts, tables.loading[:, 1])), per_expert)
    layers[both] = np.array(engine.moe_layers, dtype=np.int32)[which]
    owner[both] = expert
    part[both] = np.concatenate((np.nonzero(there)[1], np.nonzero(coming)[1]))
    score[both] = tables.scores[which, expert]
    rank[both] = _ranks(tables.scores)[which, expert]
    loaded[both], used[both] = seen.expert_loaded[which, expert], seen.expert_used[which, expert]

    kv_rows = layout.rows(PageKind.KV, owned[PageKind.KV], at).reshape(kv.shape)
    kind_codes[kv_rows] = KV
    layers[kv_rows] = np.array(head.kv_layers, dtype=np.int32)[None, :]
    for column, values in ((owner, tables.block_owner), (part, tables.block_first), (loaded, seen.block_loaded), (used, seen.block_used)):
        column[kv_rows] = values[used_blocks][:, None]
    for kind, found in states.items():
        if len(found):
            state_rows = layout.rows(kind, found[:, 1], at)
            kind_codes[state_rows] = SSM if kind is PageKind.SSM else CONV
            layers[state_rows], owner[state_rows], part[state_rows] = found[:, 2], found[:, 3], found[:, 4]
    return PageTable(
        offset=at.offset,
        size=at.size,
        level=at.level,
        kind=kind_codes,
        layer=layers.astype(np.int16),
        owner=owner,
        part=part,
        score=score,
        rank=rank,
        loaded_step=loaded,
        used_step=used,
    )


def _ranks(scores: NDArray[np.float32]) -> Ints:
    """Place of each expert in its layer, 0 for the highest score; equal scores in expert order."""
    order = np.argsort(-scores, axis=1, kind="stable")
    ranks = np.empty(scores.shape, dtype=np.int32)
    np.put_along_axis(ranks, order, np.arange(scores.shape[1], dtype=np.int32)[None, :], axis=1)
    return ranks


def _check_shapes(head: Head, tables: Tables) -> None:
    """Everything that indexing relies on; entries themselves are checked against the pool by the layout."""
    layers, experts, pages = head.engine.num_moe_layers, head.engine.num_experts, head.engine.pages_per_expert
    slots = len(tables.blocks)
    sizes = (
        layers,
        experts,
        head.engine.num_layers,
        head.engine.top_k,
        head.engine.block_tokens,
        head.engine.pool_bytes,
        len(head.kv_layers),
    )
    if min(sizes) < 1:
        raise DamagedTables("a model or its pool has nothing in it")
    if not 0 <= min(steps := (head.counters.step, head.counters.tables_step)) <= max(steps) <= np.iinfo(np.int32).max:
        raise DamagedTables("nobody counts so many steps")
    shapes: list[tuple[str, NDArray[np.generic] | None, tuple[int, ...]]] = [
        ("entries", tables.entries, (layers, experts, pages)),
        ("scores", tables.scores, (layers, experts)),
        ("hits", tables.hits, (layers, experts)),
        ("layers", tables.layers, (layers, 2)),
        ("loading", tables.loading, (len(tables.loading), 2 + pages)),
        ("blocks", tables.blocks, (slots, len(head.kv_layers))),
        ("block_owner", tables.block_owner, (slots,)),
        ("block_first", tables.block_first, (slots,)),
        ("states", tables.states, (len(tables.states), 5)),
    ]
    for name, array, shape in shapes:
        if array is not None and array.shape != shape:
            raise DamagedTables(f"{name} has the shape {array.shape}, not {shape}")
    own = _own_columns(head.engine)
    visible = tables.entries[:, :, 0] >= 0
    if not np.array_equal(tables.entries >= 0, visible[:, :, None] & own[:, None]):
        raise DamagedTables("an expert is resident in part")
    if slots and not np.array_equal((tables.blocks >= 0).sum(axis=1), (tables.blocks[:, 0] >= 0) * len(head.kv_layers)):
        raise DamagedTables("a token block has pages in part")
    row, expert = tables.loading[:, 0], tables.loading[:, 1]
    if not ((row >= 0) & (row < layers) & (expert >= 0) & (expert < experts)).all():
        raise DamagedTables("an expert that is being loaded does not exist")
    if not np.array_equal(tables.loading[:, 2:] >= 0, own[row]):
        raise DamagedTables("an expert that is being loaded has not its pages")
    if (
        max((*head.engine.moe_layers, *head.kv_layers), default=0) > np.iinfo(np.int16).max
        or min((*head.engine.moe_layers, *head.kv_layers), default=0) < 0
    ):
        raise DamagedTables("a model has no such layers")


def _own_columns(engine: EngineIdentity) -> NDArray[np.bool_]:
    """bool [MoE layers, pages of an expert]: those that a layer's experts have."""
    tiles, pages = engine.layer_tiles, engine.pages_per_expert
    if tiles and (len(tiles) != engine.num_moe_layers or any(len(own) != 2 or min(own) < 1 for own in tiles)):
        raise DamagedTables("layers have no row tiles")
    counts = [2 * wide + down for wide, down in tiles] or [3 * engine.tiles] * engine.num_moe_layers
    if max(counts) != pages or pages < 3:
        raise DamagedTables(f"an expert of {engine.tiles} tiles has not {pages} pages")
    columns: NDArray[np.bool_] = np.arange(pages) < np.array(counts)[:, None]
    return columns
