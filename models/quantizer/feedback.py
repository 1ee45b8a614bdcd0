"""Rounding with feedback: what one column's rounding did to the outputs is made up for in the columns that are still to come.

The method is GPTQ's (Frantar et al. 2022, arXiv 2210.17323): with inputs X, the squared error of the outputs is a quadratic form of
H = X^T X. Columns are rounded in order; the error of column j, divided by U_jj, times row j of U is taken off the columns behind it, U
being the upper Cholesky factor of the inverse of H. H is damped, since a few hundred inputs do not determine it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rimuru_models.quantizer.groups import best_scales, code_limits, group_of


def feedback_factor(gram: Tensor, damping: float) -> Tensor:
    """The factor U [..., K, K] of gram matrices [..., K, K] float32, `damping` times the mean of the diagonal added to it.

    A gram matrix of zeros (inputs that were never seen) gives a factor without feedback.
    """
    diagonal = torch.diagonal(gram, dim1=-2, dim2=-1)
    mean = diagonal.double().mean(-1, keepdim=True)
    extra = torch.where(mean > 0, damping * mean, torch.ones_like(mean)).expand(diagonal.shape)
    damped = gram.double() + torch.diag_embed(extra)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True).float()
    return factor


def quantize_with_feedback(weights: Tensor, factor: Tensor, bits: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of matrices for which the inputs are known.

    Args:
        weights: [B, N, K] float32; overwritten.
        factor: [B, K, K] from `feedback_factor`.
        dtype: in which scales are stored.

    Returns:
        codes int8 [B, N, K] and scales `dtype` [B, N, K / g], g being `group_of(K, group)`.
    """
    batch, rows, columns = weights.shape
    size = group_of(columns, group)
    low, high = code_limits(bits)
    codes = torch.empty(weights.shape, dtype=torch.int8)
    scales = torch.empty((batch, rows, columns // size), dtype=dtype)
    pivots = torch.diagonal(factor, dim1=-2, dim2=-1)
    for start in range(0, columns, size):
        stop = start + size
        part = weights[:, :, start:stop].contiguous()
        # An error of column j costs 1 / U_jj^2 once the columns behind it have made up for what they can.
        importance = pivots[:, None, start:stop].square().reciprocal()
        scale = best_scales(part, bits, dtype, importance / importance.mean(-1, keepdim=True))
        scales[:, :, start // size] = scale.squeeze(-1).to(dtype)
        errors = torch.empty_like(part)
        for place in range(size):
            column = part[:, :, place]
            code = (column / scale.squeeze(-1)).round_().clamp_(low, high)
            codes[:, :, start + place] = code.to(torch.int8)
            error = (column - code * scale.squeeze(-1)) / pivots[:, None, start + place]
            errors[:, :, place] = error
            if place + 1 < size:
                part[:, :, place + 1 :] -= error.unsqueeze(-1) * factor[:, None, start + place, start + place + 1 : stop]
        if stop < columns:
            weights[:, :, stop:].baddbmm_(errors, factor[:, start:stop, stop:], alpha=-1)
    return codes, scales
