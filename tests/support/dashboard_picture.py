"""Makes the README's picture of the dashboard from the demonstration recording.

python tests/support/dashboard_picture.py FILE.svg [SECOND]
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

from rimuru_cli.engine.telemetry.replay import demo_source
from rimuru_cli.output import Output
from rimuru_cli.tui.app import RimuruApp
from rimuru_cli.tui.messages import FrameArrived, SourceStatus

SIZE = (132, 42)
SECOND = 103.0
WINDOW_SECONDS = 40.0
_STEP_SECONDS = 0.1


async def picture(second: float) -> str:
    """The dashboard as it looks at some second of the recording, as SVG."""
    now = [0.0]
    source = demo_source()
    source._clock = lambda: now[0]
    source.seek(0.0)
    app = RimuruApp(source, environ={"COLORTERM": "truecolor", "TERM": "xterm-256color"})
    app.pool.clock = lambda: now[0]
    app.pool.window_seconds = WINDOW_SECONDS
    app._bridge.start = lambda: None  # type: ignore[method-assign]
    async with app.run_test(size=SIZE) as pilot:
        while now[0] < second:
            frame = source.poll()
            if frame is not None:
                status = SourceStatus("live", False, source.position, source.duration)
                app.post_message(FrameArrived(frame, status))
                await pilot.pause()
            now[0] += _STEP_SECONDS
        app._draw(everything=True)
        await pilot.pause()
        svg = app.export_screenshot(title="rimuru dashboard --demo", simplify=True)
    # No fonts from the network, and no names that change from one picture to the next.
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", "'Fira Code', 'DejaVu Sans Mono', Menlo, Consolas, monospace")
    return re.sub(r"terminal-\d+-", "terminal-", svg)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(asyncio.run(picture(float(sys.argv[2]) if len(sys.argv) > 2 else SECOND)), encoding="utf-8", newline="\n")
    Output().line(f"{file}: {file.stat().st_size:,} bytes")
