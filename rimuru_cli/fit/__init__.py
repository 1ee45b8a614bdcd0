"""Will a model run on this machine, which part of it lies where, and about how fast: from config.json and headers alone.

The memory arithmetic is the engine's own (`engine.config`, `engine.device.plan`); this room adds what a machine can do, how often experts
are missed, and what that costs in time. It stands to the right of engine and hub because it needs both, and imports neither torch nor
huggingface_hub.
"""

from __future__ import annotations

from rimuru_cli.fit.verdict import check_fit

__all__ = ["check_fit"]
