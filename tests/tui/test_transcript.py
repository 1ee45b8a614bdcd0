"""The talk in its window: nothing of it hides."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from textual.app import App, ComposeResult
from tui_parts import screen_text

from rimuru_cli.tui.palette import Palette
from rimuru_cli.tui.widgets import transcript
from rimuru_cli.tui.widgets.transcript import Transcript
from rimuru_cli.tui.wrapping import wrap


class Talk(App[None]):
    palette = Palette()

    def compose(self) -> ComposeResult:
        yield Transcript()


async def test_nothing_hides_behind_the_scroll_bar() -> None:
    app = Talk()
    async with app.run_test(size=(30, 8)) as pilot:
        talk = app.query_one(Transcript)
        for count in (4, 8):
            for _ in range(count):
                talk.say("model", "0123456789" * 3 + "\n")
            await pilot.pause(0.3)
        assert talk.show_vertical_scrollbar and not talk.show_horizontal_scrollbar
        shown = "".join(line.rstrip("▁▂▃▄▅▆▇█▏▎ ") for line in screen_text(app).splitlines())
        assert shown.endswith("0123456789" * 6), "every character is seen"


@given(st.lists(st.text(alphabet="ab \n日\t", max_size=12), min_size=1, max_size=30), st.integers(1, 9))
@example(["aaa  ", "  ", "  bb"], 4)
@example(["a" * 11, "a" * 11, " b"], 4)
def test_text_that_comes_in_pieces_is_wrapped_as_if_it_had_come_at_once(pieces: list[str], width: int) -> None:
    entry = transcript._Entry("model")
    for piece in pieces:
        entry.grow(piece, width)
    *whole, last = "".join(pieces).split("\n")
    expected = [line for text in whole for line in wrap(text, width)]
    assert entry.lines == expected + (wrap(last, width) if last or not expected else [])
    entry.rewrap(width)
    assert entry.lines == expected + (wrap(last, width) if last or not expected else [])


def test_a_long_paragraph_is_not_wrapped_anew_with_every_word(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0

    def watched(text: str, width: int) -> tuple[list[str], list[int]]:
        nonlocal longest
        longest = max(longest, len(text))
        return whole(text, width)

    whole = transcript.wrapped
    monkeypatch.setattr(transcript, "wrapped", watched)
    entry = transcript._Entry("model")
    for _ in range(500):
        entry.grow("word ", 40)
    assert longest < 150
