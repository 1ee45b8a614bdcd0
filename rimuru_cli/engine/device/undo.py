"""Taking a step back: states are changed in place, so they are copied before a step that may turn out not to be wanted.

Two kinds of steps may: one that was queued before it was planned, and one that lacked an expert and has to be computed again. Keys and
values need nothing of this, for they are the same however often they are stored. The copies lie in a buffer that the memory plan knows;
a copy costs each of its bytes read and written once, some 30 µs for the 60 MiB of Qwen3.5-35B-A3B on a card of 4 TB/s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rimuru_cli.engine.state_blocks import StateBlock, StateBlocks


class Undo:
    """Room for the states of a few sequences as they were before a step.

    Args:
        states: who owns the states.
        state_shape: of a recurrent state; conv_shape: [m, C], of a convolution state, which has `dtype`.
        sequences: how many sequences there is room for.

    Attributes:
        sequences: see above.
    """

    def __init__(
        self,
        states: StateBlocks,
        state_shape: tuple[int, ...],
        conv_shape: tuple[int, int],
        *,
        sequences: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._states, self.sequences = states, sequences
        shape = (sequences, states.layout.layers)
        recurrent = torch.empty((*shape, *state_shape), device=device)
        convolution = torch.empty((*shape, *conv_shape), dtype=dtype, device=device)
        self._slots = [[*a.unbind(), *b.unbind()] for a, b in zip(recurrent.unbind(), convolution.unbind(), strict=True)]

    @torch.inference_mode()
    def save(self, blocks: Sequence[StateBlock]) -> None:
        """Copy the states of these blocks; from now on `StateBlocks.settle` brings them back. At most `sequences` of them."""
        assert not self._states.ahead, "what was saved before is neither taken back nor done with"
        targets: list[Tensor] = []
        for slot, block in enumerate(blocks):
            targets += self._slots[slot]
            self._states.ahead[block] = lambda slot=slot, block=block: self._bring_back(slot, block)  # type: ignore[misc]
        torch._foreach_copy_(targets, [state for block in blocks for state in (*block.recurrent, *block.convolution)])

    def holds(self, blocks: Sequence[StateBlock | None]) -> bool:
        """Whether the steps that these blocks were saved for can still be taken as they are: nobody has settled any of them."""
        return all(block in self._states.ahead for block in blocks)

    def done(self) -> None:
        """The steps were wanted."""
        self._states.ahead.clear()

    def take_back(self) -> None:
        """The steps were not wanted: all states that nobody has settled meanwhile are as before."""
        for block in list(self._states.ahead):
            self._states.settle(block)

    @torch.inference_mode()
    def _bring_back(self, slot: int, block: StateBlock) -> None:
        torch._foreach_copy_([*block.recurrent, *block.convolution], self._slots[slot])
