"""Compute ops of rimuru: plain torch references and, where a GPU is present, Triton kernels.

One folder an op: `__init__.py` checks and dispatches, `reference.py` is plain torch. Import an op from its folder
(`from rimuru_kernels.rms_norm import rms_norm`); this file imports nothing, so that asking for one op loads one op.
"""

from __future__ import annotations

if __name__ == "kernels":
    raise ImportError("this folder is imported as rimuru_kernels (install the project first: ./install.sh --dev)")
