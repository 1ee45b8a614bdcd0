"""The host tier: every expert of the model, where the checkpoint's memory map has it.

On the CPU nothing is loaded up front: the operating system reads what is touched, and the page cache is the host tier. That is why a model
larger than the memory ceiling runs, and why a missing expert need not be copied into the pool before it is used.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rimuru_cli.engine.experts.cpu_tiles import CpuTiles
from rimuru_cli.engine.experts.packed_view import PackedView, PageView
from rimuru_cli.engine.experts.pages import ExpertPages
from rimuru_cli.engine.memory.views import copy_in_pieces
from rimuru_models.layout import expert_bytes
from rimuru_models.readers import Reader
from rimuru_models.weights import ExpertTensors


class HostTier(Protocol):
    """Where absent experts are read from."""

    num_layers: int
    num_experts: int
    expert_bytes: int
    bytes_read: int
    brought: int

    def copy_to(self, view: PageView, layer: int, expert: int, pages: Sequence[int]) -> None:
        """Bring one expert of a MoE layer into its pages of the pool."""
        ...


class _Scratch:
    """Where some experts lie packed before they are written as a CPU multiplies them, and what that takes."""

    def __init__(self, pages: ExpertPages) -> None:
        self.tiles = CpuTiles(pages)
        self.packed = torch.empty(pages.packed_at_once, pages.pages_per_expert, pages.packed_page_bytes, dtype=torch.uint8)


class HostStore:
    """Experts by (MoE layer, expert); a MoE layer is counted among the sparse layers only.

    Attributes:
        num_layers: MoE layers.
        num_experts: experts of each.
        expert_bytes: bytes of one expert's three projections as stored; of its pages where experts are packed.
        brought: always 0; a device's host tier counts here what its device cannot read by itself.
    """

    def __init__(self, reader: Reader, pages: ExpertPages | None = None) -> None:
        """`pages`: how experts lie in the pool's; None: all are plain."""
        config = reader.config
        self.num_layers = len(config.moe_layers)
        self.num_experts = config.num_experts
        self._reader, self._moe_layers, self._pages = reader, config.moe_layers, pages
        packed = pages is not None and pages.packed
        self.expert_bytes = pages.expert_bytes if pages is not None and packed else expert_bytes(config, reader.expert_dtype.itemsize)
        self._held: dict[tuple[int, int], tuple[list[Tensor], int]] = {}
        self._own = threading.local()
        self.bytes_read = 0
        self.brought = 0
        # All views at once: a file that is gone shows now and not in the middle of an answer, and no small object made then lies between
        # the large temporary tensors of a step, where it would keep the process from giving their memory back.
        plain = [pages is None or formats is None for formats in (pages.layers if pages is not None else config.moe_layers)]
        # Not where they have to be converted: then all of them would lie in memory, four bytes a weight.
        self._experts = [
            list(reader.experts(layer)) if own and all(reader.expert_extents(layer, one) for one in range(config.num_experts)) else []
            for layer, own in zip(config.moe_layers, plain, strict=True)
        ]

    def expert(self, layer: int, expert: int) -> ExpertTensors:
        """Gate and up [f, d], down [d, f] of one expert: views where the files hold them as numbers. Counts as a read of the host tier."""
        self.bytes_read += self.expert_bytes
        views = self._experts[layer]
        return views[expert] if views else self._reader.expert(self._moe_layers[layer], expert)

    def check_files(self) -> None:
        """Look whether the files are still as long as they were: before a step, since nothing can be caught in the middle of one.

        Raises:
            CheckpointError: a file has become shorter; names it.
        """
        self._reader.check_files()

    def hold(self, layer: int, expert: int, pages: Sequence[Tensor]) -> None:
        """This thread has just written an expert into these pages, which stay as they are until `let_go`.

        If it wants the expert elsewhere, it copies them.
        """
        self._held[layer, expert] = list(pages), threading.get_ident()

    def let_go(self) -> None:
        """What was held may change from now on."""
        self._held.clear()

    def write(self, layer: int, expert: int, pages: Sequence[Tensor]) -> None:
        """Write one expert into pages uint8 [page_bytes] of a model of which some layers are packed. Counts as a read of the host tier."""
        self.write_some(layer, [expert], [pages])

    def write_some(self, layer: int, experts: Sequence[int], places: Sequence[Sequence[Tensor]]) -> None:
        """`write` for some experts of one layer, small ones at once."""
        assert self._pages is not None, "pages of bytes hold packed experts"
        if self._pages.layers[layer] is None:
            for expert, pages in zip(experts, places, strict=True):
                for own, whole in zip(self._pages.split(layer, pages), self.expert(layer, expert), strict=True):
                    for page, rows in zip(own, whole.chunk(len(own)), strict=True):
                        copy_in_pieces(page[: rows.numel() * 4].view(torch.float32).view(rows.shape), rows)
            return
        self.bytes_read += self.expert_bytes * len(experts)
        tiling, number = self._pages.tiling(layer), self._moe_layers[layer]
        if {self._pages.lying(layer, projection) for projection in range(3)} == {"packed"}:
            for expert, pages in zip(experts, places, strict=True):
                self._reader.expert_packed(number, expert, pages, **tiling)
            return
        scratch = self._scratch()
        at_once = len(scratch.packed)
        for first in range(0, len(experts), at_once):
            some, targets = experts[first : first + at_once], places[first : first + at_once]
            sources = [place.unbind(0)[: self._pages.layer_pages[layer]] for place in scratch.packed[: len(some)]]
            for one, packed in zip(some, sources, strict=True):
                self._reader.expert_packed(number, one, packed, **tiling)
            parts = [self._pages.split(layer, packed) for packed in sources], [self._pages.split(layer, pages) for pages in targets]
            for kinds in ((0, 1), (2,)):  # gate and up are of one kind
                tile = scratch.tiles.of(layer, kinds[0])
                assert tile is not None, "of packed experts"
                read, written = ([page for split in part for kind in kinds for page in split[kind]] for part in parts)
                tile.write(read, written)

    def _scratch(self) -> _Scratch:
        """This thread's: the loader writes beside the forward pass."""
        if not hasattr(self._own, "scratch"):
            assert self._pages is not None
            self._own.scratch = _Scratch(self._pages)
        scratch: _Scratch = self._own.scratch
        return scratch

    def copy_to(self, view: PageView, layer: int, expert: int, pages: Sequence[int]) -> None:
        """See `HostTier.copy_to`."""
        if isinstance(view, PackedView):
            targets = [view.pool.bytes_of(page, view.pages.page_bytes) for page in pages[: view.pages.layer_pages[layer]]]
            held, thread = self._held.get((layer, expert), ([], 0))
            if thread == threading.get_ident():
                for target, source in zip(targets, held, strict=True):
                    target.copy_(source)
            else:
                self.write(layer, expert, targets)
        else:
            view.write(pages, *self.expert(layer, expert))

    def close(self) -> None:
        """Nothing to give up: the views belong to the reader."""
