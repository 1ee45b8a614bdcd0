"""Made-up engines, for tests and for trying the dashboard: real pages of a real allocator, with experts and sequences that play a part.

    SyntheticEngine(pages=20_000).play("shrink storm", 50)

Everything is drawn from one seed, so two runs give the same frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np

from rimuru_cli.engine.memory.allocator import PageAllocator
from rimuru_cli.engine.memory.geometry import ENTRY_BYTES, PageKind, PoolGeometry
from rimuru_cli.engine.telemetry.assemble import FrameAssembler, Head
from rimuru_cli.engine.telemetry.frame import AdjusterRecord, CeilingAnswer, Counters, EngineIdentity, Frame
from rimuru_cli.engine.telemetry.tables import Tables

Scenario = Literal["idle", "prefill", "decode", "long context", "shrink storm", "recovery"]
SCENARIOS: tuple[Scenario, ...] = get_args(Scenario)

_EPOCH = 1_800_000_000.0
_MIB = 1 << 20
_HIGH_FREE = 9


class SyntheticEngine:
    """An engine that computes nothing.

    Args:
        pages: expert pages that the pool has; the map shows more once some are split.
        layers, experts, top_k: of the model.
        hybrid: also recurrent states, in every layer but each fourth.
        tiles: row tiles of a projection.
        kv_per_page: KV pages that an expert page splits into.
        seed: of everything random.
    """

    def __init__(
        self,
        pages: int = 20_000,
        *,
        layers: int = 48,
        experts: int = 160,
        top_k: int = 8,
        hybrid: bool = False,
        tiles: int = 1,
        kv_per_page: int = 6,
        seed: int = 0,
    ) -> None:
        self._rng = np.random.default_rng(seed)
        page = 12 * 64 * ENTRY_BYTES
        self._geometry = PoolGeometry.from_bytes(
            page // tiles,
            page // tiles // kv_per_page - ENTRY_BYTES,
            2 * page if hybrid else None,
            2 * ENTRY_BYTES if hybrid else None,
            tiles,
        )
        huge = self._geometry.huge_page_bytes
        pool = max(1, pages // self._geometry.pages_per_huge(PageKind.EXPERT)) * huge + 12_345
        self._allocator = PageAllocator(self._geometry, pool)
        self._per_expert = self._geometry.pages_per_expert
        self._kv_layers = tuple(layer for layer in range(layers) if not hybrid or layer % 4 == 3)
        self._ssm_layers = tuple(layer for layer in range(layers) if layer not in self._kv_layers)
        shape = (layers, experts)
        self._entries = np.full((*shape, self._per_expert), -1, dtype=np.int32)
        popularity = self._rng.zipf(1.4, shape).clip(max=60).astype(np.float64)
        self._popularity = popularity / popularity.sum(axis=1, keepdims=True)
        self._scores = (self._popularity * top_k).astype(np.float32)
        self._hits = np.zeros(shape, dtype=np.int64)
        self._layer_counts = np.zeros((layers, 2), dtype=np.int64)
        self._blocks: list[list[int]] = []
        self._owners: list[int] = []
        self._firsts: list[int] = []
        self._states: list[tuple[int, int, int, int, int]] = []
        self._tokens: dict[int, int] = {}
        self._events: deque[AdjusterRecord] = deque(maxlen=64)
        self._num_events = self._step = self._frames = self._prefilled = self._decoded = self._swaps = self._link = self._preempted = 0
        self._rates = (0.0, 0.0, 0.0)
        self._answer: CeilingAnswer | None = None
        self._top_k = top_k
        self._floor = max(top_k, experts // 8)
        self._assembler = FrameAssembler()
        self.identity = self._identify(layers, experts, pool, hybrid, seed)
        buffers = min(2 * self._per_expert * 4, self._allocator.available(PageKind.EXPERT) // 8)
        self._buffers = self._allocator.allocate(PageKind.EXPERT, buffers)
        self._expand(layers * experts, record=False)

    def play(self, scenario: Scenario, count: int, seconds: float = 0.1) -> Iterator[Frame]:
        """The next `count` frames, `seconds` apart: what comes before goes on."""
        for _ in range(count):
            yield self.next(scenario, seconds)

    def next(self, scenario: Scenario, seconds: float = 0.1) -> Frame:
        """One more frame."""
        self._rates = (0.0, 0.0, 0.0)
        match scenario:
            case "prefill":
                self._run(tokens=512, prompt=True, seconds=seconds)
            case "decode":
                self._run(tokens=2, prompt=False, seconds=seconds)
            case "long context":
                self._run(tokens=2048, prompt=True, seconds=seconds)
                self._run(tokens=2, prompt=False, seconds=seconds)
            case "shrink storm":
                self._shrink(40 + int(self._rng.integers(40)), required=100)
                self._run(tokens=1024, prompt=True, seconds=seconds)
            case "recovery":
                self._release()
                self._expand(30)
            case "idle":
                pass
        return self._frame(scenario != "idle", seconds)

    def tables(self) -> Tables:
        """What a real engine with these pages would write down."""
        width = len(self._kv_layers)
        return Tables(
            entries=self._entries.copy(),
            scores=self._scores.copy(),
            hits=self._hits.copy(),
            layers=self._layer_counts.copy(),
            loading=np.zeros((0, 2 + self._per_expert), dtype=np.int32),
            buffers=np.array(self._buffers, dtype=np.int32),
            blocks=np.array(self._blocks, dtype=np.int32).reshape(-1, width),
            block_owner=np.array(self._owners, dtype=np.int32),
            block_first=np.array(self._firsts, dtype=np.int32),
            states=np.array(self._states, dtype=np.int32).reshape(-1, 5),
            running=np.array(sorted(self._tokens), dtype=np.int32),
        )

    def head(self, busy: bool, seconds: float = 0.1) -> Head:
        """Counters and events of the next frame; time goes on by `seconds`."""
        self._frames += 1
        resident = int((self._entries[:, :, 0] >= 0).sum())
        uses, hits = self._layer_counts.sum(axis=0).tolist()
        idle = sum(owner == -1 for owner in self._owners)
        per_layer = self._allocator.available(PageKind.KV) // len(self._kv_layers)
        used = max(self._tokens.values(), default=0)
        counters = Counters(
            step=self._step,
            tables_step=self._step,
            prefill_tokens=self._prefilled,
            decode_tokens=self._decoded,
            prefill_rate=self._rates[0],
            decode_rate=self._rates[1],
            ttft=0.4 if self._decoded else None,
            running=len(self._tokens) if busy else 0,
            waiting=0,
            context_used=used,
            context_possible=min(self.identity.context_limit, used + per_layer * self.identity.block_tokens),
            cached_tokens=idle * self.identity.block_tokens,
            expert_uses=uses,
            expert_hits=hits,
            resident_experts=resident,
            total_experts=self._scores.size,
            swaps=self._swaps,
            link_bytes=self._link,
            link_rate=self._rates[2],
            preemptions=self._preempted,
            splits=self._allocator.splits,
            merges=self._allocator.merges,
            free_bytes=self._allocator.free_bytes,
            tail_bytes=self._allocator.tail_bytes,
        )
        now = _EPOCH + self._frames * seconds
        return Head(self._frames, now, busy, self.identity, counters, self._kv_layers, tuple(self._events), self._answer)

    def request_ceiling(self, ceiling_bytes: int) -> bool:
        """Grant any ceiling that is not below the least, as an engine would; nothing moves."""
        ok = ceiling_bytes >= self.identity.least_ceiling_bytes
        least = self.identity.least_ceiling_bytes // _MIB
        text = f"The ceiling is {ceiling_bytes // _MIB:,} MiB now." if ok else f"The model needs at least {least:,} MiB."
        self._answer = CeilingAnswer(ceiling_bytes, ok, text, _EPOCH + self._frames * 0.1)
        return True

    def _frame(self, busy: bool, seconds: float) -> Frame:
        return self._assembler.frame(self.head(busy, seconds), self.tables())

    def _run(self, tokens: int, *, prompt: bool, seconds: float) -> None:
        """Compute tokens of sequence 1, or of a new one after `recovery`: select experts, exchange some, take KV pages."""
        self._step += 1
        sequence = max(self._tokens, default=max(self._owners, default=0) + 1)
        layers = len(self._scores)
        wanted = np.minimum(tokens, 64) * self._top_k
        chosen = self._rng.multinomial(wanted, self._popularity)
        resident = self._entries[:, :, 0] >= 0
        self._hits += chosen
        self._layer_counts[:, 0] += chosen.sum(axis=1)
        self._layer_counts[:, 1] += (chosen * resident).sum(axis=1)
        self._scores = (0.95 * self._scores + 0.05 * chosen / max(1, wanted) * self._top_k).astype(np.float32)
        misses = int((chosen * ~resident).astype(bool).sum())
        self._link += misses * self.identity.expert_bytes
        self._swap(min(misses, layers))
        if not self._grow(sequence, self._tokens.get(sequence, 0) + tokens):
            self._preempted += 1
            self._release()
            return
        self._rates = (
            tokens / seconds if prompt else self._rates[0],
            self._rates[1] if prompt else tokens / seconds,
            misses * 8e6 / seconds,
        )
        if prompt:
            self._prefilled += tokens
        else:
            self._decoded += tokens

    def _grow(self, sequence: int, tokens: int) -> bool:
        """Give a sequence the KV pages (and states) for so many tokens, at the experts' cost if need be; False if there are not so many."""
        size, width = self.identity.block_tokens, len(self._kv_layers)
        have = sum(owner == sequence for owner in self._owners)
        blocks = min(-(-tokens // size), self.identity.context_limit // size) - have
        per_page = self._geometry.layout(PageKind.KV).per_parent
        if PageKind.SSM in self._geometry.kinds and not any(state[3] == sequence for state in self._states):
            if not self._make_room(PageKind.SSM, len(self._ssm_layers) + 1, required=self._per_expert):
                return False
            for layer, entry in zip(self._ssm_layers, self._allocator.allocate(PageKind.SSM, len(self._ssm_layers)), strict=True):
                self._states.append((0, entry, layer, sequence, -1))
            for row, entry in enumerate(self._allocator.allocate_runs(PageKind.CONV, 1, 3)[0]):
                self._states.append((1, entry, self._ssm_layers[0], sequence, row))
        if not self._make_room(PageKind.KV, blocks * width, required=blocks * width // per_page + 1):
            return False
        pages = self._allocator.allocate(PageKind.KV, max(0, blocks) * width)
        for number in range(max(0, blocks)):
            self._blocks.append(pages[number * width : (number + 1) * width])
            self._owners.append(sequence)
            self._firsts.append((have + number) * size)
        self._tokens[sequence] = min(tokens, self.identity.context_limit)
        return True

    def _make_room(self, kind: PageKind, count: int, *, required: int) -> bool:
        while self._allocator.available(kind) < count:
            if not self._shrink(4, required=required):
                return False
        return True

    def _release(self) -> None:
        """Sequences end; half of their blocks are kept for reuse."""
        self._tokens.clear()
        keep = [index for index in range(len(self._blocks)) if index % 2 == 0 and self._owners[index] >= 0]
        for index in sorted(set(range(len(self._blocks))) - set(keep), reverse=True):
            self._allocator.free(self._blocks.pop(index))
            del self._owners[index], self._firsts[index]
        self._owners = [-1] * len(self._owners)
        self._allocator.free([state[1] for state in self._states])
        self._states = []

    def _swap(self, count: int) -> None:
        """Residents of the lowest score give their pages to better-ranked absent experts of their layer."""
        for layer in self._rng.permutation(len(self._scores))[:count]:
            resident = self._entries[layer, :, 0] >= 0
            if resident.all() or not resident.any():
                continue
            worst = int(np.where(resident, self._scores[layer], np.inf).argmin())
            best = int(np.where(resident, -np.inf, self._scores[layer]).argmax())
            if self._scores[layer, best] > 1.3 * self._scores[layer, worst]:
                self._entries[layer, best], self._entries[layer, worst] = self._entries[layer, worst].copy(), -1
                self._swaps += 1

    def _shrink(self, count: int, *, required: int) -> int:
        """Retire the lowest-ranked experts above the floor."""
        resident = self._entries[:, :, 0] >= 0
        ranked = np.argsort(np.where(resident, self._scores, np.inf), axis=None, kind="stable")
        left, free, done = resident.sum(axis=1), self._allocator.available(PageKind.EXPERT), 0
        for place in ranked[: int(resident.sum())]:
            layer, expert = divmod(int(place), self._scores.shape[1])
            if done < count and left[layer] > self._floor:
                self._allocator.free(self._entries[layer, expert].tolist())
                self._entries[layer, expert] = -1
                left[layer] -= 1
                done += 1
        self._record(done, 0, "sequences need pages", required, free)
        return done

    def _expand(self, count: int, *, record: bool = True) -> None:
        """Admit the best-ranked absent experts while pages stay free."""
        free, done = self._allocator.available(PageKind.EXPERT), 0
        absent = self._entries[:, :, 0] < 0
        for place in np.argsort(np.where(absent, -self._scores, np.inf), axis=None, kind="stable")[: int(absent.sum())]:
            if done == count or self._allocator.available(PageKind.EXPERT) < self._per_expert + _HIGH_FREE:
                break
            layer, expert = divmod(int(place), self._scores.shape[1])
            self._entries[layer, expert] = self._allocator.allocate(PageKind.EXPERT, self._per_expert)
            done += 1
        self._link += done * self.identity.expert_bytes
        if record:
            self._record(0, done, "free blocks to spare", 0, free)

    def _record(self, shrunk: int, expanded: int, reason: str, required: int, free: int) -> None:
        if shrunk or expanded:
            now = _EPOCH + self._frames * 0.1
            self._events.append(AdjusterRecord(self._num_events, self._step, now, shrunk, expanded, reason, required, free))
            self._num_events += 1

    def _identify(self, layers: int, experts: int, pool: int, hybrid: bool, seed: int) -> EngineIdentity:
        geometry = self._geometry
        strides = {kind: geometry.layout(kind).stride_bytes for kind in geometry.kinds}
        dense, workspace, program = pool // 8, pool // 16, pool // 32
        expert = geometry.pages_per_expert * geometry.expert_page_bytes
        return EngineIdentity(
            pid=4711,
            engine_id=f"{seed + 0xABCDEF:016x}",
            role="chat",
            version="0.0.0",
            started=_EPOCH,
            model="synthetic/Slime-30B-A3B",
            architecture="SyntheticMoeForCausalLM",
            device="cuda:0",
            backend_reason="Imaginary GPU",
            precision="bf16",
            num_layers=layers,
            moe_layers=tuple(range(layers)),
            num_experts=experts,
            top_k=self._top_k,
            floor=self._floor,
            ceiling_bytes=pool + dense + workspace + program,
            least_ceiling_bytes=(pool + dense + workspace + program) // 3,
            program_bytes=program,
            dense_bytes=dense,
            workspace_bytes=workspace,
            pool_bytes=pool,
            context_limit=32_768,
            model_context=131_072,
            huge_page_bytes=geometry.huge_page_bytes,
            expert_page_bytes=strides[PageKind.EXPERT],
            ssm_page_bytes=strides.get(PageKind.SSM),
            kv_page_bytes=strides[PageKind.KV],
            conv_page_bytes=strides.get(PageKind.CONV),
            pages_per_expert=geometry.pages_per_expert,
            tiles=geometry.tiles,
            block_tokens=16,
            expert_bytes=expert,
            host_tier="pinned",
            host_bytes=layers * experts * expert,
            host_pinned_bytes=layers * experts * expert,
            link_ceiling=25e9,
            notices=("This engine is made up.",),
        )
