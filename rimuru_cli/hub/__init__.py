"""Models as a person names them, and where they lie on the disk: name resolution, the shared cache, the demonstration model. No torch."""

from __future__ import annotations
