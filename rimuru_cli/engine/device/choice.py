"""What a step is run like: how many experts it may need at once, and whether misses are fetched one by one or all absent ones streamed.

Numbers decide, not tensors, so that the simulation (`bench/workload`) is decided by the same lines.
"""

from __future__ import annotations

from typing import Protocol

from rimuru_cli.engine.device.link import LinkRates, on_demand_is_quicker
from rimuru_kernels.expert_fetch import MAX_TOKENS

MAX_ON_DEMAND_ROWS = MAX_TOKENS
"""Larger steps are always streamed: they touch nearly all experts."""


class CountedResidency(Protocol):
    """How many experts of each layer are there."""

    floor: int

    @property
    def fewest_visible(self) -> int:
        """Visible experts of the layer that has the fewest."""
        ...

    @property
    def absent_by_layer(self) -> list[int]:
        """How many experts of each layer are not visible."""
        ...


class StepChoice:
    """Decides for one model and link.

    Args:
        miss_rate: share of selections that miss, to begin with.
        served: whether the host has to bring some experts that the device cannot read.

    Attributes:
        rates: of the link, as measured while loading.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        expert_bytes: int,
        top_k: int,
        decay: float,
        residency: CountedResidency,
        rates: LinkRates,
        miss_rate: float,
        served: bool = False,
    ) -> None:
        self._num_experts, self._expert_bytes = num_experts, expert_bytes
        self._top_k, self._decay = top_k, decay
        self._counted = residency
        self._served = served
        self._miss_rate = miss_rate
        self.rates = rates

    @property
    def capacity(self) -> int:
        """Absent experts of the layer that has most of them: what the loading buffers must hold at once."""
        return self._num_experts - self._counted.fewest_visible

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return self._expert_bytes

    def scratch_needed(self, rows: int) -> int:
        """Experts that an on-demand step of so many rows may select beyond the residents of a layer: all must be there at once."""
        most = min(self._num_experts, rows * self._top_k)
        # No layer ever has fewer than the floor; so one sequence, the usual case, costs a comparison.
        return 0 if most <= self._counted.floor else max(0, most - self._counted.fewest_visible)

    def prefers_on_demand(self, rows: int) -> bool:
        """Whether a step of so many rows is expected to be quicker on demand than streamed; see `on_demand_is_quicker`."""
        if rows > MAX_ON_DEMAND_ROWS or (self._served and self.scratch_needed(rows)):
            return False
        if rows == 1:
            return True
        return on_demand_is_quicker(rows, self._top_k, self._miss_rate, self._counted.absent_by_layer, self.rates)

    def _learn(self, rows: int, uses: int, hits: int) -> None:
        """Take in how a step of so many rows fared."""
        if uses:
            # The more rows, the more a step says about how often selections miss.
            kept = self._decay**rows
            self._miss_rate = kept * self._miss_rate + (1.0 - kept) * (1.0 - hits / uses)
