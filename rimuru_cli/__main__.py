"""`python -m rimuru_cli` is the same as `rimuru`."""

from __future__ import annotations

import sys

from rimuru_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
