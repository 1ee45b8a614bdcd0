"""Triton: the softplus that gates and steps of recurrent layers are made of."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + exp(x)) of float32, to some units in the last place wherever x lies."""
    small = tl.exp(-tl.abs(x))
    # log(1 + y) keeps no digits of a small y; four terms of its series do.
    series = small * (1.0 - small * (0.5 - small * (1.0 / 3.0 - small * 0.25)))
    return tl.maximum(x, 0.0) + tl.where(small < 0.01, series, tl.log(1.0 + small))
