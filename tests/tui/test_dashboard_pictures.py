"""Pictures of the main states, compared with stored ones. UPDATE_PICTURES=1 stores them anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from tui_parts import compare_picture, new_app, normalised, played, show, small_engine

from rimuru_cli.engine.telemetry.frame import Frame
from rimuru_cli.tui.messages import SourceStatus

PICTURES = Path(__file__).parent / "pictures"
LIVE = SourceStatus("live", can_control=True)


def states() -> dict[str, tuple[list[Frame], SourceStatus, tuple[int, int]]]:
    """Frames, the source's state and the terminal's size of each picture."""
    long_context = played(small_engine(), ("prefill", 2), ("decode", 20), ("long context", 1), ("decode", 10))
    return {
        "idle": (played(small_engine(), ("idle", 3)), LIVE, (80, 24)),
        "prefill": (played(small_engine(), ("prefill", 3)), LIVE, (110, 34)),
        "long-context": (long_context, LIVE, (110, 34)),
        "shrink-storm": (played(small_engine(hybrid=True), ("decode", 5), ("shrink storm", 3)), LIVE, (110, 34)),
        "engine-gone": (long_context, SourceStatus("waiting"), (80, 24)),
    }


@pytest.mark.parametrize("name", ["idle", "prefill", "long-context", "shrink-storm", "engine-gone"])
async def test_it_looks_as_before(name: str) -> None:
    frames, status, size = states()[name]
    app = new_app()
    async with app.run_test(size=size) as pilot:
        await show(pilot, *frames, status=LIVE)
        if status.state != LIVE.state:
            await show(pilot, None, status=status)
        await compare_picture(app, PICTURES / f"{name}.svg")


async def test_a_change_is_noticed(tmp_path: Path) -> None:
    frames, status, size = states()["idle"]
    app = new_app()
    async with app.run_test(size=size) as pilot:
        await show(pilot, *frames, status=status)
        stored = tmp_path / "idle.svg"
        stored.write_text((PICTURES / "idle.svg").read_text(encoding="utf-8").replace("free", "full", 1), encoding="utf-8")
        with pytest.raises(AssertionError, match=r"idle\.svg.*full"):
            await compare_picture(app, stored)
        assert (tmp_path / "idle.new.svg").exists()


def test_pictures_hold_nothing_that_changes_by_itself() -> None:
    svg = "<!-- Generated with Rich https://x -->\n<style>@font-face { a: url('b') }\n.terminal-123-r1 {}</style>\n\n"
    assert normalised(svg) == "<style>\n.terminal-r1 {}</style>\n"
