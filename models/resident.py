"""KV cache, recurrent states and experts in plain memory: the oracle that the paged, offloaded engine must equal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import linear

from rimuru_kernels.silu_and_mul import silu_and_mul
from rimuru_models.attention import causal_attention
from rimuru_models.config import ModelConfig
from rimuru_models.states import StatesInPlace
from rimuru_models.weights import CheckpointReader


class ResidentKVCache:
    """Keys and values of a few sequences, one growing tensor a sequence and layer. Satisfies `interfaces.KVCache`.

    With one sequence every row of a step belongs to it. With more, `begin_step` says before each forward how many rows each one has.
    """

    def __init__(self, config: ModelConfig, num_sequences: int = 1) -> None:
        self.num_sequences = num_sequences
        self._last = config.attention_layers[-1]
        self._cu_seqlens: tuple[int, ...] | None = None
        self._keys: list[list[Tensor | None]] = [[None] * config.num_layers for _ in range(num_sequences)]
        self._values: list[list[Tensor | None]] = [[None] * config.num_layers for _ in range(num_sequences)]

    def begin_step(self, rows: Sequence[int]) -> None:
        """Rows of the coming step: rows[i] tokens of sequence i, one sequence after the other; 0 for a sequence that rests.

        Raises:
            ValueError: not one count a sequence.
        """
        if len(rows) != self.num_sequences or min(rows) < 0:
            raise ValueError(f"begin_step: need {self.num_sequences} row counts, got {list(rows)}")
        self._cu_seqlens = (0, *accumulate(rows))

    def length(self, sequence: int = 0) -> int:
        """Tokens stored of a sequence (after the step's last attention layer)."""
        keys = self._keys[sequence][self._last]
        return 0 if keys is None else keys.shape[0]

    def positions(self, rows: Sequence[int]) -> Tensor:
        """[sum(rows)] int64: positions of the next rows[i] tokens of each sequence i."""
        starts = [(self.length(sequence), count) for sequence, count in enumerate(rows)]
        return torch.cat([torch.arange(start, start + count) for start, count in starts])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, sliding_window: int | None) -> Tensor:
        """See `interfaces.KVCache.attend`."""
        cu_seqlens = self._cu_seqlens
        if cu_seqlens is None:
            if self.num_sequences != 1:
                raise ValueError("ResidentKVCache: call begin_step before the forward of several sequences")
            cu_seqlens = (0, q.shape[0])
        if cu_seqlens[-1] != q.shape[0]:
            raise ValueError(f"ResidentKVCache: begin_step announced {cu_seqlens[-1]} rows, the step has {q.shape[0]}")
        outputs = []
        for sequence, (start, stop) in enumerate(pairwise(cu_seqlens)):
            if start == stop:
                continue
            keys = self._keys[sequence][layer] = _grow(self._keys[sequence][layer], k[start:stop])
            values = self._values[sequence][layer] = _grow(self._values[sequence][layer], v[start:stop])
            outputs.append(causal_attention(q[start:stop], keys, values, scale=scale, sliding_window=sliding_window))
        return torch.cat(outputs)


def _grow(past: Tensor | None, new: Tensor) -> Tensor:
    return new.clone() if past is None else torch.cat((past, new))


class ResidentStates(StatesInPlace):
    """Recurrent and convolution states of a few sequences in plain memory. Satisfies `interfaces.RecurrentState`.

    Args:
        config: of a model with recurrent layers.
        dtype: the model's; convolution states have it, recurrent states are float32 (float64 for float64 models).
    """

    def __init__(self, config: ModelConfig, num_sequences: int = 1, dtype: torch.dtype = torch.float32) -> None:
        mixer = config.recurrent
        assert mixer is not None, "the model has no recurrent layers"
        wide = torch.promote_types(dtype, torch.float32)
        self.num_sequences = num_sequences
        self._recurrent = {
            layer: [torch.zeros(mixer.state_shape, dtype=wide) for _ in range(num_sequences)] for layer in config.recurrent_layers
        }
        self._convolution = {
            layer: [torch.zeros(mixer.conv_rows, mixer.channels, dtype=dtype) for _ in range(num_sequences)]
            for layer in config.recurrent_layers
        }

    def begin_step(self, rows: Sequence[int]) -> None:
        """Rows of the coming step, as `ResidentKVCache.begin_step`."""
        if len(rows) != self.num_sequences or min(rows) < 0:
            raise ValueError(f"begin_step: need {self.num_sequences} row counts, got {list(rows)}")
        self.cu_seqlens = (0, *accumulate(rows))

    def recurrent(self, layer: int) -> list[Tensor]:
        """See `StatesInPlace.recurrent`."""
        return self._recurrent[layer]

    def convolution(self, layer: int) -> list[Tensor]:
        """See `StatesInPlace.convolution`."""
        return self._convolution[layer]


class ResidentExperts:
    """All experts of a checkpoint as stacked tensors in memory. Satisfies `interfaces.ExpertProvider`.

    Each (token, slot) contribution is computed and stored on its own and the slots are then added in order, so the sum does not
    depend on which expert is computed first.

    Args:
        reader: an open checkpoint; it may be closed afterwards.
        dtype: dtype of the stacked weights and of the computation.
    """

    def __init__(self, reader: CheckpointReader, dtype: torch.dtype = torch.float32) -> None:
        config = reader.config
        hidden, width, count = config.hidden_size, config.expert_intermediate, config.num_experts
        self.gate_up: dict[int, Tensor] = {}
        self.down: dict[int, Tensor] = {}
        for layer in config.moe_layers:
            gate_up = self.gate_up[layer] = torch.empty(count, 2 * width, hidden, dtype=dtype)
            down = self.down[layer] = torch.empty(count, hidden, width, dtype=dtype)
            for expert, tensors in enumerate(reader.experts(layer)):
                gate_up[expert, :width].copy_(tensors.gate)
                gate_up[expert, width:].copy_(tensors.up)
                down[expert].copy_(tensors.down)

    def forward(self, layer: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """See `interfaces.ExpertProvider.forward`."""
        gate_up, down = self.gate_up[layer], self.down[layer]
        rows = x.to(gate_up.dtype)
        contributions = torch.empty(*topk_ids.shape, x.shape[1], dtype=gate_up.dtype)
        for expert in sorted(set(topk_ids.flatten().tolist())):
            token, slot = torch.where(topk_ids == expert)
            y = linear(silu_and_mul(linear(rows[token], gate_up[expert])), down[expert])
            contributions[token, slot] = (y * topk_weights[token, slot, None]).to(contributions.dtype)
        total = contributions[:, 0].clone()
        for slot_index in range(1, topk_ids.shape[1]):
            total += contributions[:, slot_index]
        return total.to(x.dtype)
