"""The engine: scheduling, memory, experts, sampling. It talks to no person: no console, no network."""

from __future__ import annotations

import os

# Before torch is imported: its OpenMP threads would otherwise spin for milliseconds at the end of every small operation, and on a machine
# where anything else runs (a browser is enough) that makes a token up to fifty times slower. Spinning briefly costs an idle machine little.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
