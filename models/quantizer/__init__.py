"""Our own quantiser: experts at 8 or 4 bits, written so that others can read them (compressed-tensors, `pack-quantized`)."""

from __future__ import annotations
