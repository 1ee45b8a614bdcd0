"""What the recurrent layers of a model add to the memory plan of a device. No torch."""

from __future__ import annotations

from rimuru_models.config import ModelConfig
from rimuru_models.recurrent_config import STATE_ITEMSIZE, RecurrentConfig

CHUNK = 64
"""Rows that the chunked forms of recurrent layers compute together."""

MAX_STATE_DIM = 256
"""Longest rows of a Mamba-2 state for which several rows of a sequence are computed by a kernel; longer ones are computed in torch."""

_UNDO_BYTES = 128 << 20


def state_bytes(model: ModelConfig, itemsize: int) -> int:
    """Bytes of one sequence's states, convolution rows in the model's own dtype; 0 for a model without recurrent layers."""
    mixer = model.recurrent
    if mixer is None:
        return 0
    return len(model.recurrent_layers) * (mixer.state_bytes + mixer.conv_rows * mixer.conv_row_bytes(itemsize))


def undo_sequences(model: ModelConfig, itemsize: int, max_sequences: int) -> int:
    """Sequences whose states can be kept as they were before a step: as many as 128 MiB hold, but at least one.

    More would let larger batches be queued ahead, too, and cost experts; what the host takes between two steps is soon a small part of
    them.
    """
    if model.recurrent is None:
        return 0
    return max(1, min(max_sequences, _UNDO_BYTES // state_bytes(model, itemsize)))


def undo_bytes(model: ModelConfig, itemsize: int, max_sequences: int) -> int:
    """Bytes that these states take."""
    return undo_sequences(model, itemsize, max_sequences) * state_bytes(model, itemsize)


def mixer_bytes(model: ModelConfig, itemsize: int, tokens: int, sequences: int) -> int:
    """Bytes of the largest temporary tensors of a recurrent layer in a step of `tokens` rows; 0 for a model without such layers."""
    mixer = model.recurrent
    if mixer is None:
        return 0
    return _mamba2_bytes(mixer, itemsize, tokens) if mixer.kind == "mamba2" else _delta_bytes(mixer, itemsize, tokens, sequences)


def _delta_bytes(mixer: RecurrentConfig, itemsize: int, tokens: int, sequences: int) -> int:
    heads, inner = mixer.value_heads, mixer.inner
    # Projection (q, k, v, z, b, a), convolution, output, and its norm.
    rows = tokens * (2 * mixer.channels + 3 * inner + 2 * heads) * itemsize
    # Gates; then what the chunked form passes from kernel to kernel: w, sums of decays and lengths of keys, a state for each chunk.
    gates = tokens * heads * 2 * STATE_ITEMSIZE
    chunks = tokens // CHUNK + sequences
    passed = tokens * heads * (mixer.key_dim * itemsize + 2 * STATE_ITEMSIZE) + chunks * heads * mixer.key_dim * mixer.value_dim * itemsize
    return rows + gates + passed


def _mamba2_bytes(mixer: RecurrentConfig, itemsize: int, tokens: int) -> int:
    inner, heads = mixer.inner, mixer.value_heads
    rows = tokens * (2 * mixer.channels + 3 * inner + heads) * itemsize + tokens * heads * STATE_ITEMSIZE
    if mixer.key_dim <= MAX_STATE_DIM:
        return rows
    # In torch they are computed in float32: x, b, c, the skip, dt x, steps and decays; and a chunk's products.
    wide = tokens * (mixer.channels + 2 * inner + 4 * heads) * STATE_ITEMSIZE
    chunk = heads * CHUNK * (2 * CHUNK + 3 * mixer.value_dim + 3 * mixer.key_dim) * STATE_ITEMSIZE
    return rows + wide + chunk + 2 * mixer.state_bytes
