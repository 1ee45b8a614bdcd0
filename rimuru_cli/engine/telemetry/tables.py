"""What an engine writes down for its readers: the owners of pages as it knows them itself, nothing worked out.

The map of the pool follows from these tables (`layout.py`): the engine copies a few arrays, and each reader does the rest in its own time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Tables:
    """Owners of pages. Entries are offsets in the pool divided by 256; -1 stands for none.

    Attributes:
        entries: int32 [L, E, P], pages of visible experts.
        scores: float32 [L, E], decayed routing weights.
        hits: int64 [L, E], selections of each expert so far, or None if they are not counted one by one.
        layers: int64 [L, 2], selections of each layer and those that found their expert resident, or None.
        loading: int32 [n, 2 + P], experts on their way: row of `entries`, expert, its pages.
        buffers: int32 [n], expert pages of the loading buffers.
        blocks: int32 [slots, A], KV pages of token blocks in the A layers that have a KV cache; a slot of -1 is empty. A block stays in its
            slot for life.
        block_owner: int32 [slots], sequence that holds the block, -1 if it is kept only for reuse.
        block_first: int32 [slots], position of its first token.
        states: int32 [n, 5], recurrent states, see `state_rows.py`.
        running: int32 [n], sequences that took part in the last step.
    """

    entries: Ints
    scores: NDArray[np.float32]
    hits: NDArray[np.int64] | None
    layers: NDArray[np.int64] | None
    loading: Ints
    buffers: Ints
    blocks: Ints
    block_owner: Ints
    block_first: Ints
    states: Ints
    running: Ints
