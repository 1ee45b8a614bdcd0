"""How much of a core the dashboard takes: python tests/support/measure_dashboard.py [SECONDS [PAGES [COLUMNSxLINES]]]

A made-up engine in another process publishes 10 frames a second through shared memory, as a real one does; `rimuru dashboard` watches it on
a pseudo-terminal. The figure is the CPU time of the dashboard's whole process (user and system) over the wall time, after a warm-up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from pty_screen import PtyScreen

SUPPORT = Path(__file__).parent
WARM_UP_SECONDS = 5.0


def measure(seconds: float, pages: int, size: tuple[int, int], scenario: str = "decode") -> dict[str, float]:
    """CPU share of one core, kilobytes a second to the terminal, pages on the map."""
    with tempfile.TemporaryDirectory() as home:
        options = json.dumps({"pages": pages, "scenario": scenario, "hz": 10})
        environ = {**os.environ, "RIMURU_HOME": home, "OMP_NUM_THREADS": "1"}
        engine = subprocess.Popen(
            [sys.executable, str(SUPPORT / "synthetic_publisher.py"), str(Path(home) / "run"), options], stdin=subprocess.PIPE, env=environ
        )
        command = [sys.executable, "-m", "rimuru_cli", "dashboard"]
        screen = PtyScreen(command, size=size, environ={**environ, "COLORTERM": "truecolor", "TERM": "xterm-256color"})
        screen.wait_for("pool:", 60.0)
        screen.read(WARM_UP_SECONDS)
        process = psutil.Process(screen.pid)
        before, began, written = process.cpu_times(), time.monotonic(), len(screen.written)
        while time.monotonic() - began < seconds:
            screen.read(0.5)
        after, wall = process.cpu_times(), time.monotonic() - began
        cpu = after.user + after.system - before.user - before.system
        rss = process.memory_info().rss
        traffic = (len(screen.written) - written) / wall / 1000
        screen.press("q")
        code = screen.leave()
        assert engine.stdin is not None, "opened as a pipe"
        engine.stdin.close()
        engine.wait(20)
    return {"cpu_share": cpu / wall, "kilobytes_per_second": traffic, "rss_mib": rss / 2**20, "wall_seconds": wall, "exit_code": code}


if __name__ == "__main__":
    words = sys.argv[1:] + ["20", "20000", "120x40", "decode"][len(sys.argv) - 1 :]
    columns, lines = map(int, words[2].split("x"))
    found = measure(float(words[0]), int(words[1]), (columns, lines), words[3])
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))
