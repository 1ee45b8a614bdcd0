"""Guessing the next layer's experts: its router on what this layer's router saw, and bringing the likeliest that is absent.

Between two routers lie only one layer's experts and the next one's attention, so the guess is mostly right (the idea of Fate,
arXiv 2502.12224). A guess is worth the time that the link would otherwise be idle: from this layer's experts to the next layer's. It costs
what is left of a copy when the next layer's own copies are due, and in vain where it was wrong.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from rimuru_cli.engine.device.residency import DeviceResidency
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_kernels.expert_fetch import FetchPlan, ResolvePolicy, fetch, predict


class Prediction:
    """Brings one guessed expert a layer in decode steps of one row. All of it can be captured.

    Args:
        num_layers: MoE layers of the model.
    """

    def __init__(self, residency: DeviceResidency, pool: PagePool, num_layers: int, num_experts: int, policy: ResolvePolicy) -> None:
        device = pool.data.device
        self._residency, self._pool, self._policy = residency, pool, policy
        self._plan = FetchPlan.create(num_experts, residency.pages_per_expert, num_experts, device)
        self._norms: list[Tensor | None] = [None] * num_layers
        self._routers: list[Tensor | None] = [None] * num_layers  # for what the layer before saw
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._decided: torch.cuda.Event | None = None
        self._read: Tensor | None = None  # what a guess under way still reads

    def begin_forward(self) -> None:
        """Forget what a forward pass that failed left behind."""
        self._decided = self._read = None

    def learn(self, index: int, router: Tensor, norm: Tensor) -> None:
        """Call in every step: layer `index` has this router [E, d], behind an RMSNorm with the weights `norm` [d].

        The norm is the layer's own, so for the guess it is exchanged for the one of the layer before: that finds clearly more.
        """
        if self._norms[index] is not None:
            return
        self._norms[index] = norm
        before = self._norms[index - 1] if index else None
        if before is not None:
            # A weight of 0 hides its part of the stream: there is nothing to exchange it for.
            quotient = (norm.float() / before.float()).nan_to_num(0.0, 0.0, 0.0)
            self._routers[index] = (router.float() * quotient).to(router.dtype)

    def before_decisions(self) -> None:
        """Call before a layer decides: the guess has made its changes to the layer's table."""
        if self._decided is not None:
            torch.cuda.current_stream().wait_event(self._decided)

    def before_copies(self) -> None:
        """Call before the layer copies: the guess may have to give up its pages again, so its copy must be complete."""
        if self._decided is not None and self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._decided = self._read = None

    def guess(self, index: int, x: Tensor, top_k: int) -> None:
        """Call once layer `index` is queued: guess for the next. x: [1, d], what this layer's router saw."""
        router = self._routers[index + 1] if index + 1 < len(self._routers) else None
        if router is None:
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            predict(x, router, top_k, self._residency.tables.layer(index + 1), self._plan, self._policy)
            if self._stream is not None:
                self._decided = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._decided.record(self._stream)
                self._read = x
            tiles = self._residency.layer_pages[index + 1]
            fetch(self._plan, self._pool.data, self._pool.geometry.expert_page_bytes, (0, tiles))
