"""Mixture-of-experts feed-forward (SwiGLU experts). See `reference.py` for shapes and the formula."""

from __future__ import annotations

from torch import Tensor

from rimuru_kernels.fused_moe import reference

__all__ = ["expert_ffn", "gathered_moe"]


def expert_ffn(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
    """One expert over some tokens: x [R, d], gate and up [f, d], down [d, f], weights [R] -> [R, d], all float32.

    Raises:
        ValueError: if the shapes do not belong together.
    """
    f, d = gate.shape
    if up.shape != (f, d) or down.shape != (d, f) or x.shape[1:] != (d,) or weights.shape != x.shape[:1]:
        shapes = [tuple(t.shape) for t in (x, gate, up, down, weights)]
        raise ValueError(f"expert_ffn: x, gate, up, down, weights of shapes {shapes} do not belong together")
    return reference.expert_ffn(x, gate, up, down, weights)


def gathered_moe(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
    """One token over its k gathered experts: x [1, d], gate_up [2, k, f, d], down [k, d, f], weights [k] -> [1, d], all float32.

    Raises:
        ValueError: if the shapes do not belong together.
    """
    two, k, f, d = gate_up.shape
    if two != 2 or down.shape != (k, d, f) or x.shape != (1, d) or weights.shape != (k,):
        shapes = [tuple(t.shape) for t in (x, gate_up, down, weights)]
        raise ValueError(f"gathered_moe: x, gate_up, down, weights of shapes {shapes} do not belong together")
    return reference.gathered_moe(x, gate_up, down, weights)
