"""What holds unless somebody says otherwise. No numpy: settings of an engine are made where nothing is computed."""

from __future__ import annotations

DEFAULT_DECAY = 0.95
"""Factor on all scores of the live ranking per token."""
