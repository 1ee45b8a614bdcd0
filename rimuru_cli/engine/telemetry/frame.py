"""One moment of one engine, as a reader sees it: who it is, its counters, and the owner of every page.

Arrays are numpy and read-only by agreement: a frame may be shared by several readers. Bytes are ints, times are seconds; moments are
seconds since 1970 (`time.time`), steps count the engine's forward passes from 1 on. "None" always means: not known, or does not exist here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

KINDS = ("free", "expert", "buffer", "kv", "ssm", "conv", "tail")
"""Names of the kind codes: `KINDS[code]`."""

FREE, EXPERT, BUFFER, KV, SSM, CONV, TAIL = range(len(KINDS))

PROJECTIONS = ("gate", "up", "down")
"""Names of an expert's projections; see `PageTable.part`."""

NOBODY = -1
"""Stands for "none" in integer columns."""

Role = Literal["chat", "run", "bench", "serve", "engine", "demo"]
HostTier = Literal["pinned", "mapped"]


@dataclass(frozen=True)
class EngineIdentity:
    """Who publishes, and how its memory is divided. Constant but for what a change of the ceiling changes.

    Attributes:
        engine_id: 16 hexadecimal digits, another one for each engine ever started.
        role: which command runs it.
        version: of rimuru.
        started: when the engine was loaded.
        device: "cpu", "cuda:0", ...; `backend_reason` says why this one (or the GPU's name).
        precision: number formats of experts, of all other matrices where they differ, and of keys and values, in words.
        moe_layers: model layers that have experts; row i of every layer x expert table is model layer `moe_layers[i]`.
        floor: experts of each MoE layer that are never retired.
        ceiling_bytes: the whole of what may be used: program, dense weights, workspace, pool.
        least_ceiling_bytes: the smallest ceiling with which this model runs.
        context_limit: most tokens one sequence can reach with this ceiling; `model_context` is the model's own limit.
        huge_page_bytes, expert_page_bytes, ssm_page_bytes, kv_page_bytes, conv_page_bytes: P_h, P_e, P_s and the third level, as distances
            from page to page in the pool; None for kinds this model has not.
        pages_per_expert: most pages of an expert: 3 x `tiles` where all layers are alike.
        tiles: row tiles that each projection is cut into, the most where they differ.
        block_tokens: tokens of a KV page.
        host_tier: "pinned" where all absent experts come from page-locked memory, else "mapped": some or all from memory-mapped files.
        host_bytes: all experts in the host tier; `host_pinned_bytes` of them page-locked.
        link_ceiling: bytes per second that the link between host tier and pool was measured to give; None: not measured.
        notices: what the person should know: fallbacks, reductions.
        layer_tiles: row tiles of gate (and of up) and of down of each MoE layer; empty: `tiles` of each everywhere.
    """

    pid: int
    engine_id: str
    role: Role
    version: str
    started: float
    model: str
    architecture: str
    device: str
    backend_reason: str
    precision: str
    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    floor: int
    ceiling_bytes: int
    least_ceiling_bytes: int
    program_bytes: int
    dense_bytes: int
    workspace_bytes: int
    pool_bytes: int
    context_limit: int
    model_context: int
    huge_page_bytes: int
    expert_page_bytes: int
    ssm_page_bytes: int | None
    kv_page_bytes: int
    conv_page_bytes: int | None
    pages_per_expert: int
    tiles: int
    block_tokens: int
    expert_bytes: int
    host_tier: HostTier
    host_bytes: int
    host_pinned_bytes: int
    link_ceiling: float | None = None
    notices: tuple[str, ...] = ()
    layer_tiles: tuple[tuple[int, ...], ...] = ()

    def tiles_of(self, row: int) -> tuple[int, int]:
        """Row tiles of gate (and of up) and of down of a MoE layer, counted among these."""
        return (self.layer_tiles[row][0], self.layer_tiles[row][1]) if self.layer_tiles else (self.tiles, self.tiles)

    @property
    def num_moe_layers(self) -> int:
        """MoE layers of the model."""
        return len(self.moe_layers)


@dataclass(frozen=True)
class Counters:
    """What has been counted up to this moment, and how fast it goes.

    Attributes:
        step: forward passes so far.
        tables_step: the step after which the experts' tables were read. On a device they are copied within a step and read after the next
            one, so that nobody waits for them; there it is a little less than `step`.
        prefill_tokens, decode_tokens: prompt tokens computed and tokens generated so far.
        prefill_rate, decode_rate: of them per second of the steps that computed them, over the last two seconds; 0.0 when idle.
        ttft: seconds from the last request's submission to its first token.
        running, waiting: sequences that are scheduled, and that wait.
        context_used: tokens of the longest sequence; between two requests, of the longest text that is kept for reuse.
        context_possible: most tokens that one sequence could reach right now, given what the others hold.
        cached_tokens: tokens whose KV is held only for reuse.
        expert_uses, expert_hits: selections of an expert by a token, and those that found it resident.
        resident_experts, total_experts: of all layers.
        swaps: residents that a better-ranked expert replaced.
        link_bytes: bytes of experts moved or read from the host tier so far; `link_rate` per second over the last two seconds.
        preemptions: sequences that had to give up their pages.
        splits, merges: of pages, so far.
        free_bytes, tail_bytes: of the pool.
        states_not_kept: as of `Snapshot`.
    """

    step: int
    tables_step: int
    prefill_tokens: int
    decode_tokens: int
    prefill_rate: float
    decode_rate: float
    ttft: float | None
    running: int
    waiting: int
    context_used: int
    context_possible: int
    cached_tokens: int
    expert_uses: int
    expert_hits: int
    resident_experts: int
    total_experts: int
    swaps: int
    link_bytes: int
    link_rate: float
    preemptions: int
    splits: int
    merges: int
    free_bytes: int
    tail_bytes: int
    states_not_kept: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of selections since the engine started that found their expert resident; None before the first.

        For the present rate use the difference of two frames.
        """
        return self.expert_hits / self.expert_uses if self.expert_uses else None


@dataclass(frozen=True)
class AdjusterRecord:
    """One decision that moved pages between experts and sequences.

    Attributes:
        number: 0, 1, 2, ... since the engine started; a frame holds the last 64 at most.
        step, time: when.
        shrunk, expanded: experts retired and admitted.
        reason: in words, as the adjuster gave it.
        required_blocks: R_b, blocks of an expert page's size that sequences lacked.
        free_blocks: F_b, such blocks that were free.
    """

    number: int
    step: int
    time: float
    shrunk: int
    expanded: int
    reason: str
    required_blocks: int
    free_blocks: int


@dataclass(frozen=True)
class CeilingAnswer:
    """What became of the last request for another ceiling.

    Attributes:
        bytes_asked: the ceiling that was asked for.
        ok: whether it is in force now.
        text: what to tell the person.
        time: when it was answered.
    """

    bytes_asked: int
    ok: bool
    text: str
    time: float


@dataclass(frozen=True, eq=False)
class PageTable:
    """Every page of the pool at the finest present split, ascending by address: the pages lie end to end and cover the whole pool.

    All arrays have one element a page.

    Attributes:
        offset: int64, bytes from the pool's beginning.
        size: int64, bytes up to the next page.
        level: uint8, 1 huge page, 2 expert or SSM page, 3 KV or conv page. Free pages stand at the level they would be taken from; a tail
            has the level of the page whose remainder it is, plus one.
        kind: uint8, index into `KINDS`. "tail" is what a split page's children do not cover, or the pool's last bytes.
        layer: int16, model layer; -1 for free, buffer and tail.
        owner: int32, expert number for experts, sequence (request) number for KV, SSM and conv; -1 nobody: free, tail, buffers, and KV
            kept only for reuse.
        part: int32. Experts: projection x tiles + tile, so `PROJECTIONS[part // tiles]` is gate, up or down. KV: position of the block's
            first token in its sequence (it holds `block_tokens` positions from there; of a block kept for reuse the last position known).
            Conv: the row. Otherwise -1.
        score: float32, the expert's decayed routing weight (comparable within a frame only); NaN where there is none.
        rank: int32, place of the expert in its layer's ranking, 0 is the best; -1 where there is none.
        loaded_step: int32, step before which this owner was first seen in this page; -1 where that is not known.
        used_step: int32, step in which the expert was last selected (or the sequence last ran), as far as seen; -1 never or not known.
    """

    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    level: NDArray[np.uint8]
    kind: NDArray[np.uint8]
    layer: NDArray[np.int16]
    owner: NDArray[np.int32]
    part: NDArray[np.int32]
    score: NDArray[np.float32]
    rank: NDArray[np.int32]
    loaded_step: NDArray[np.int32]
    used_step: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.offset)

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of each kind; they add up to the pool."""
        sums = np.bincount(self.kind, weights=self.size.astype(np.float64), minlength=len(KINDS))
        return {name: int(total) for name, total in zip(KINDS, sums, strict=True)}

    def at(self, offset: int) -> int:
        """Index of the page that covers this byte of the pool, clamped to the first and the last page."""
        return int(min(max(int(np.searchsorted(self.offset, offset, side="right")) - 1, 0), len(self.offset) - 1))


@dataclass(frozen=True, eq=False)
class ExpertTable:
    """All experts of all MoE layers: arrays [num_moe_layers, num_experts] unless said otherwise.

    Attributes:
        resident: bool.
        loading: bool, own pages already, but their bytes are still on the way.
        score: float32, decayed routing weight.
        used_step: int32, step in which it was last selected, as far as seen; -1 never.
        loaded_step: int32, step before which it was first seen resident; -1 while absent or not known.
        hits: int64, selections of this expert so far; None where the engine does not count them one by one (on a device).
        layer_uses, layer_hits: int64 [num_moe_layers], selections of each layer, and those that found their expert resident; None where not
            counted by layer.
    """

    resident: NDArray[np.bool_]
    loading: NDArray[np.bool_]
    score: NDArray[np.float32]
    used_step: NDArray[np.int32]
    loaded_step: NDArray[np.int32]
    hits: NDArray[np.int64] | None
    layer_uses: NDArray[np.int64] | None
    layer_hits: NDArray[np.int64] | None


@dataclass(frozen=True, eq=False)
class Frame:
    """Everything that is known about an engine at one moment.

    Attributes:
        number: 1, 2, 3, ... as published; equal numbers of one engine are the same frame.
        time: when it was taken.
        busy: whether the engine had work to do.
        events: the last adjuster decisions, oldest first, 64 at most.
        answer: what became of the last request for another ceiling, if there was one.
    """

    number: int
    time: float
    busy: bool
    engine: EngineIdentity
    counters: Counters
    pages: PageTable
    experts: ExpertTable
    events: tuple[AdjusterRecord, ...] = field(default=())
    answer: CeilingAnswer | None = None

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-able values: arrays as lists, NaN as None; with the bytes of each kind and the hit rate worked out."""
        pages = {name: _listed(column) for name, column in vars(self.pages).items()}
        pages["kind"] = [KINDS[code] for code in self.pages.kind]
        return {
            "number": self.number,
            "time": self.time,
            "busy": self.busy,
            "engine": asdict(self.engine),
            "counters": {**asdict(self.counters), "hit_rate": self.counters.hit_rate},
            "bytes_by_kind": self.pages.bytes_by_kind(),
            "events": [asdict(event) for event in self.events],
            "answer": None if self.answer is None else asdict(self.answer),
            "experts": {name: None if table is None else _listed(table) for name, table in vars(self.experts).items()},
            "pages": pages,
        }


def _listed(array: NDArray[Any]) -> list[Any]:
    values: list[Any] = array.tolist()
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return values
    boxed = array.astype(object)
    boxed[~np.isfinite(array)] = None
    values = boxed.tolist()
    return values
