"""Running MoE layers over experts in the pool, in loading buffers and in the host tier.

Pages hold weights in float32, the dtype of the arithmetic, so a resident expert is used where it lies. One token (decode) is two
matrix-vector products per expert; absent experts are converted from the host tier into a workspace and may then take the pages of residents
that they outrank. More tokens go expert by expert; the absent ones are read in place as well (on demand), or come through the loading
buffers while other experts are computed (streamed). Which of the two is chosen per step from measured costs.

Results do not depend on where an expert lies: every contribution is computed by the same operation on the same values and kept
per (token, slot), and a token's slots are summed in ascending expert order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rimuru_cli.engine.experts.host_store import HostStore
from rimuru_cli.engine.experts.ranking import ExpertRanking
from rimuru_cli.engine.experts.residency import ExpertTiles, Residency
from rimuru_cli.engine.experts.streaming import ExpertStream, LoadingBuffers
from rimuru_cli.engine.experts.transfer import Loader
from rimuru_kernels.fused_moe import TokenWorkspace, expert_ffn, token_moe

MoeMode = Literal["auto", "streamed", "on_demand"]
# Told the MoE layer, topk_ids [T, k] and topk_weights [T, k] of every layer that is run.
Recorder = Callable[[int, Tensor, Tensor], None]

# An absent expert takes a resident's pages only if it outranks it clearly; otherwise near-equals would trade places at every token.
SWAP_MARGIN = 1.3


class TransferCosts:
    """Seconds that matter for choosing how missing experts are reached, measured while running.

    Attributes:
        read_seconds: first read of an expert from the host tier (includes the disk if it is not cached).
        copy_seconds: a read once it is in memory.
        compute_seconds: computing one MoE layer for one token.
    """

    def __init__(self, read_seconds: float, copy_seconds: float) -> None:
        self.read_seconds = read_seconds
        self.copy_seconds = copy_seconds
        self.compute_seconds = 0.0

    def prefers_streaming(self, num_tokens: int, top_k: int, num_experts: int, absent_per_layer: float) -> bool:
        """Whether loading all absent experts beside the computation beats reading only the selected ones in its way."""
        touched = 1.0 - (1.0 - top_k / num_experts) ** num_tokens
        on_demand = absent_per_layer * touched * self.read_seconds
        streamed = max(0.0, absent_per_layer * self.read_seconds - num_tokens * self.compute_seconds) + absent_per_layer * self.copy_seconds
        return streamed < on_demand

    def observe_compute(self, num_tokens: int, seconds: float) -> None:
        """Learn from a layer that took `seconds` without waiting for transfers."""
        sample = seconds / num_tokens
        self.compute_seconds = sample if self.compute_seconds == 0.0 else 0.8 * self.compute_seconds + 0.2 * sample


class PooledExperts:
    """The model's `ExpertProvider` over the pool.

    Attributes:
        uses, hits: expert selections, and those whose expert was resident.
        fetched_bytes: always 0; what a device copies by itself is counted here, see `DeviceExperts`.
        row_hits: selections with a resident expert of each row of the current step, over all layers.
        selections: int64 [num_moe_layers, num_experts], of each expert so far.
        layer_counts: int64 [num_moe_layers, 2], selections of each layer so far, and those whose expert was resident.
        streamed_steps: steps that went through the loading buffers.
        recorder: told every layer's routing, if set.
    """

    def __init__(
        self,
        *,
        host: HostStore,
        residency: Residency,
        ranking: ExpertRanking,
        buffers: LoadingBuffers,
        loader: Loader,
        costs: TransferCosts,
        moe_layers: tuple[int, ...],
        top_k: int,
        expert_shape: tuple[int, int],
        mode: MoeMode,
    ) -> None:
        self._host = host
        self._residency = residency
        self._ranking = ranking
        self._buffers = buffers
        self._loader = loader
        self._costs = costs
        self._index = {layer: index for index, layer in enumerate(moe_layers)}
        self._top_k = top_k
        self._mode = mode
        f, d = expert_shape
        self._f, self._d = f, d
        # Workspace for the experts of one token that cannot be used where they lie: one slot for each of the k.
        self._slots = self._make_slots()
        self._token_space = TokenWorkspace(top_k, f, d)
        self._single = (torch.empty(f, d), torch.empty(f, d), torch.empty(d, f))
        self._stream: ExpertStream | None = None
        self._step_tokens = 0
        self.uses = 0
        self.hits = 0
        self.fetched_bytes = 0
        self.selections: NDArray[np.int64] = np.zeros((host.num_layers, host.num_experts), dtype=np.int64)
        self.layer_counts: NDArray[np.int64] = np.zeros((host.num_layers, 2), dtype=np.int64)
        self.row_hits: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.streamed_steps = 0
        self.recorder: Recorder | None = None

    def _make_slots(self) -> list[tuple[Tensor, Tensor]]:
        return [(torch.empty(2 * self._f, self._d), torch.empty(self._d, self._f)) for _ in range(self._top_k)]

    def begin_step(self, num_tokens: int) -> None:
        """Prepare for a forward pass over `num_tokens` rows; residency stays as it is until `end_step`, except for one-row swaps.

        Raises:
            CheckpointError: a file of the host tier has become shorter.
        """
        self._host.check_files()
        self._step_tokens = num_tokens
        self._ranking.begin_step(num_tokens)
        self.row_hits = np.zeros(num_tokens, dtype=np.int64)
        if num_tokens > 1 and self._residency.expandable and self._chooses_streaming(num_tokens):
            absent = [[int(e) for e in np.flatnonzero(~row)] for row in self._residency.resident]
            self._stream = ExpertStream(self._buffers, self._host, self._loader, absent)
            self.streamed_steps += 1

    def close(self) -> None:
        """Nothing to give up: buffers and threads belong to others."""

    def end_step(self) -> None:
        """Finish the forward pass, also one that failed."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def forward(self, layer: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """x [T, d], topk_ids [T, k] ascending in each row, topk_weights [T, k] -> [T, d], all of model layer `layer`."""
        index = self._index[layer]
        self.uses += topk_ids.numel()
        if self.recorder is not None:
            self.recorder(index, topk_ids, topk_weights)
        if len(x) == 1:
            return self._one_token(index, x, topk_ids, topk_weights)
        ids = topk_ids.numpy()
        self._ranking.add_tokens(index, ids, topk_weights.double().numpy())
        found = self._residency.resident[index][ids].sum(axis=1)
        self.row_hits += found
        self._count(index, ids.reshape(-1), int(found.sum()))
        return self._many_tokens(index, x, topk_ids, topk_weights)

    def _chooses_streaming(self, num_tokens: int) -> bool:
        if self._mode != "auto":
            return self._mode == "streamed"
        absent = self._residency.expandable / self._host.num_layers
        return self._costs.prefers_streaming(num_tokens, self._top_k, self._host.num_experts, absent)

    def _one_token(self, index: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        residency = self._residency
        ids: list[int] = topk_ids[0].tolist()
        self._ranking.add_token(index, ids, topk_weights[0].tolist())
        ready, missed = residency.matrices[index], []
        gate_ups, downs = [], []
        for slot, expert in enumerate(ids):
            matrices = ready[expert]
            if matrices is None:
                matrices = self._slots[slot]
                tiles = residency.tiles(index, expert)
                if tiles is None:
                    missed.append(expert)
                    stored = self._host.expert(index, expert)
                    tiles = [stored.gate], [stored.up], [stored.down]
                _fill_rows(matrices[0], tiles[0] + tiles[1])
                _fill_rows(matrices[1], tiles[2])
            gate_ups.append(matrices[0])
            downs.append(matrices[1])
        out = token_moe(x, gate_ups, downs, topk_weights[0], self._token_space)
        hits = len(ids) - len(missed)
        self.row_hits[0] += hits
        self._count(index, ids, hits)
        if missed:
            residency.offer(index, missed, SWAP_MARGIN)
        return out

    def _count(self, index: int, ids: list[int] | NDArray[np.int64], hits: int) -> None:
        """Count the selections of a layer, `hits` of which found their expert resident."""
        self.hits += hits
        self.selections[index] += np.bincount(ids, minlength=self._host.num_experts)
        counts = self.layer_counts[index]
        counts[0] += len(ids)
        counts[1] += hits

    def _many_tokens(self, index: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        num_tokens, k = topk_ids.shape
        started = time.perf_counter()
        waited = 0.0
        order = torch.argsort(topk_ids.reshape(-1), stable=True)
        counts = torch.bincount(topk_ids.reshape(-1), minlength=self._host.num_experts).tolist()
        starts = np.concatenate(([0], np.cumsum(counts)))
        tokens = order // k
        weights = topk_weights.reshape(-1)[order]
        contributions = torch.empty(num_tokens * k, self._d)
        source = self._experts(index, counts)
        while True:
            asked = time.perf_counter()
            item = next(source, None)
            waited += time.perf_counter() - asked
            if item is None:
                break
            expert, parts = item
            rows = slice(int(starts[expert]), int(starts[expert + 1]))
            contributions[order[rows]] = self._expert(index, x[tokens[rows]], parts, weights[rows])
        self._costs.observe_compute(num_tokens, max(0.0, time.perf_counter() - started - waited))
        return contributions.view(num_tokens, k, self._d).sum(1)

    def _expert(self, index: int, x: Tensor, tiles: ExpertTiles, weights: Tensor) -> Tensor:
        """One expert of MoE layer `index` over some tokens: x [R, d], weights [R] -> [R, d]."""
        return expert_ffn(x, *self._float_weights(index, tiles), weights)

    def _experts(self, index: int, counts: list[int]) -> Iterator[tuple[int, ExpertTiles]]:
        """The selected experts of a layer, valid until the next is asked for: residents first, then absent ones as they arrive."""
        absent = []
        for expert, count in enumerate(counts):
            if not count:
                continue
            tiles = self._residency.tiles(index, expert)
            if tiles is None:
                absent.append(expert)
            else:
                yield expert, tiles
        if self._stream is not None:
            for expert, tiles in self._stream.take(index):
                if counts[expert]:
                    yield expert, tiles
            return
        for expert in absent:
            yield expert, self._absent(index, expert)

    def _absent(self, index: int, expert: int) -> ExpertTiles:
        """An absent expert; valid until the next call."""
        stored = self._host.expert(index, expert)
        return [stored.gate], [stored.up], [stored.down]

    def _float_weights(self, index: int, tiles: ExpertTiles) -> tuple[Tensor, Tensor, Tensor]:
        """Projections of an expert of MoE layer `index` as float32; valid until the next call."""
        out = []
        for parts, target in zip(tiles, self._single, strict=True):
            if len(parts) == 1 and parts[0].dtype == torch.float32:
                out.append(parts[0])
                continue
            _fill_rows(target, parts)
            out.append(target)
        return out[0], out[1], out[2]


def _fill_rows(target: Tensor, parts: list[Tensor]) -> None:
    """Copy row tiles, one below the other, into a matrix."""
    start = 0
    for part in parts:
        target[start : start + len(part)] = part
        start += len(part)
