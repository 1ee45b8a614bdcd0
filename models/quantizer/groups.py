"""Scales of groups of weights, chosen for least squared error, and packing of codes into words.

A group of g weights that follow each other in a row shares a scale: w ~ code * scale, codes from -2^(b-1) to 2^(b-1) - 1. The largest
weight alone does not decide the scale: a smaller one clips a few and rounds all others finer. So several clipping ratios are tried; each
is refined by the scale that fits its codes best, sum(h w c) / sum(h c^2), and the best of all is taken, as it will be stored.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rimuru_models.errors import CheckpointError

RATIOS = {4: (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7), 8: (1.0, 0.97)}
"""Clipping ratios that are tried, by bits: with 8 bits hardly any clipping pays."""

_TINY = 1e-20


def group_of(columns: int, group: int) -> int:
    """Weights a group in rows of so many columns: the largest common divisor, because readers expect groups to fill rows exactly."""
    return math.gcd(columns, group)


def code_limits(bits: int) -> tuple[int, int]:
    """The smallest and the largest code."""
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def best_scales(x: Tensor, bits: int, dtype: torch.dtype, importance: Tensor | None = None) -> Tensor:
    """Scale of each group.

    Args:
        x: [..., g] float32, g weights a group.
        dtype: in which scales are stored; they are chosen among numbers of this dtype.
        importance: [..., g] (broadcast), factors on the squared errors; None: all alike.

    Returns:
        float32 [..., 1], never zero.

    Raises:
        CheckpointError: a weight is not finite.
    """
    low, high = code_limits(bits)
    # Squares of very large or very small weights would leave float32; powers of two change nothing else.
    peak = x.abs().amax(-1, keepdim=True)
    if not bool(peak.isfinite().all()):
        raise CheckpointError("An expert has a weight that is not a finite number, so it cannot be quantised.", hint="Download it again.")
    exponent = torch.frexp(peak).exponent
    x = torch.ldexp(x, -exponent)
    largest = x.abs().amax(-1, keepdim=True)
    weighted = x if importance is None else x * importance
    best = least = None
    for ratio in RATIOS[bits]:
        scale = _stored(largest * (ratio / high), dtype)
        codes = (x / scale).round_().clamp_(low, high)
        fit = (weighted * codes).sum(-1, keepdim=True)
        squares = codes * codes if importance is None else codes * codes * importance
        fit /= squares.sum(-1, keepdim=True).clamp_min_(_TINY)
        scale = _stored(torch.where(fit > 0, fit, scale), dtype)
        codes = torch.div(x, scale, out=codes).round_().clamp_(low, high)
        error = codes.mul_(scale).sub_(x).square_()
        if importance is not None:
            error *= importance
        error = error.sum(-1, keepdim=True)
        if best is None or least is None:
            best, least = scale, error
        else:
            better = error < least
            best, least = torch.where(better, scale, best), torch.where(better, error, least)
    assert best is not None, "there is at least one ratio"
    return _stored(torch.ldexp(best, exponent), dtype)


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A scale as `dtype` holds it, in float32; the least normal number where it would be zero."""
    info = torch.finfo(dtype)
    return scale.clamp(info.tiny, info.max).to(dtype).float()


def quantize_groups(weights: Tensor, bits: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes int8 [N, K] and scales `dtype` [N, K / g] of weights [N, K]; g is `group_of(K, group)`."""
    rows, columns = weights.shape
    size = group_of(columns, group)
    x = weights.float().reshape(rows, columns // size, size)
    scales = best_scales(x, bits, dtype)
    low, high = code_limits(bits)
    codes = (x / scales).round_().clamp_(low, high).to(torch.int8)
    return codes.view(rows, columns), scales.squeeze(-1).to(dtype)


def dequantize_groups(codes: Tensor, scales: Tensor) -> Tensor:
    """codes [..., K] times the scale of their group [..., groups], float32."""
    shape = codes.shape
    wide = codes.float().view(*scales.shape, shape[-1] // scales.shape[-1])
    return wide.mul_(scales.float().unsqueeze(-1)).view(shape)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Codes int8 [N, K] as int32 [N, ceil(K * bits / 32)]: each plus 2^(bits - 1), the first one in the lowest bits."""
    each = 32 // bits
    unsigned = codes.to(torch.int64) + (1 << (bits - 1))
    unsigned = torch.nn.functional.pad(unsigned, (0, -codes.shape[1] % each)).view(codes.shape[0], -1, each)
    words = (unsigned << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_words(words: Tensor, bits: int, columns: int) -> Tensor:
    """What `pack_words` was given: int8 [N, columns]."""
    codes = (words.to(torch.int64).unsqueeze(-1) >> torch.arange(0, 32, bits)) & ((1 << bits) - 1)
    return (codes.view(words.shape[0], -1)[:, :columns] - (1 << (bits - 1))).to(torch.int8)
