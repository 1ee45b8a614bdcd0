"""Words: owners of every kind of page, amounts, and nothing that a terminal would obey."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from tui_parts import played, small_engine

from rimuru_cli.engine.telemetry.frame import BUFFER, CONV, EXPERT, FREE, KV, SSM, TAIL, AdjusterRecord
from rimuru_cli.tui import ceiling, words
from rimuru_cli.tui.widgets.heat_map import expert_words
from rimuru_cli.tui.widgets.ribbon import in_words
from rimuru_cli.tui.widgets.tiles import page_facts, page_words
from rimuru_cli.tui.wrapping import wrap

HYBRID = played(small_engine(hybrid=True, tiles=2), ("long context", 2), ("decode", 2))[-1]


def test_a_clock_shows_every_moment_that_a_frame_may_name() -> None:
    assert words.clock(0.0) == time.strftime("%H:%M:%S", time.localtime(0.0))
    for moment in (4.6e18, -4.6e18, math.inf, math.nan):
        assert words.clock(moment) == "--:--:--"


def first(kind: int) -> int:
    return int(np.flatnonzero(HYBRID.pages.kind == kind)[0])


def test_every_kind_of_owner_has_words() -> None:
    pages = HYBRID.pages
    expert = first(EXPERT)
    assert words.owner(HYBRID, expert).startswith(f"layer {pages.layer[expert]} · expert {pages.owner[expert]} · ")
    assert any(name in words.owner(HYBRID, expert) for name in ("gate, tile", "up, tile", "down, tile"))
    kv = first(KV)
    start = int(pages.part[kv])
    assert words.owner(HYBRID, kv) == f"sequence {pages.owner[kv]} · layer {pages.layer[kv]} · tokens {start:,}–{start + 15:,}"
    assert "recurrent state" in words.owner(HYBRID, first(SSM))
    assert "convolution row" in words.owner(HYBRID, first(CONV))
    assert words.owner(HYBRID, first(BUFFER)) == "experts on their way"
    assert words.owner(HYBRID, first(FREE)) == "nobody"
    assert "too small" in words.owner(HYBRID, first(TAIL))


def test_kv_that_is_kept_for_reuse_says_so() -> None:
    frame = played(small_engine(), ("prefill", 2), ("recovery", 1))[-1]
    kept = np.flatnonzero((frame.pages.kind == KV) & (frame.pages.owner == -1))
    assert words.owner(frame, int(kept[0])).startswith("kept for reuse · layer ")


def test_the_inspector_knows_kind_owner_rank_and_last_use() -> None:
    facts = dict(page_facts(HYBRID, first(EXPERT)))
    assert facts["kind"] == "expert" and "of 32 in its layer" in facts["rank"] and "step" in facts["last use"]
    assert facts["level"].startswith("L2") and "bytes" in facts["size"] and "entry" in facts["offset"]
    assert set(dict(page_facts(HYBRID, first(FREE)))) == {"kind", "owner", "level", "size", "offset"}
    for page in range(len(HYBRID.pages)):
        assert page_words(HYBRID, page)


@given(st.integers(0, len(HYBRID.pages) - 1), st.integers(0, 60))
def test_short_owners_fit(page: int, width: int) -> None:
    assert len(words.short_owner(HYBRID, page, width)) <= width


def test_an_expert_in_words() -> None:
    table = HYBRID.experts
    layer, expert = (int(i) for i in np.argwhere(table.resident)[0])
    text = expert_words(HYBRID, (layer, expert))
    assert text.startswith(f"layer {layer} · expert {expert} · resident · rank ") and "hits" in text and "loaded" in text
    layer, expert = (int(i) for i in np.argwhere(~table.resident)[0])
    assert "· absent ·" in expert_words(HYBRID, (layer, expert))


def test_a_decision_in_words() -> None:
    shrunk = AdjusterRecord(0, 1204, 0.0, 4, 0, "sequences need pages", 12, 1)
    assert in_words(shrunk) == "step 1,204: retired 4 experts, because sequences need pages (R_b 12, F_b 1)"
    both = AdjusterRecord(0, 5, 0.0, 1, 1, "\x1b[31mred", 0, 30)
    assert "retired 1 and admitted 1 experts" in in_words(both) and "\x1b" not in in_words(both)
    assert "left everything" in in_words(AdjusterRecord(0, 5, 0.0, 0, 0, "steady", 0, 5))


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (None, "-"),
        (float("nan"), "-"),
        (0.0, "0 %"),
        (0.512, "51 %"),
        (0.8999, "89 %"),
        (0.9312, "93.1 %"),
        (0.99962, "99.96 %"),
        (0.99999, "99.99 %"),
        (1.0, "100 %"),
    ],
)
def test_per_cent(share: float | None, text: str) -> None:
    assert words.percent(share) == text


def test_amounts() -> None:
    assert [words.rate(value) for value in (None, 0.0, 5.24e8, 5.24e9, 1.2e11)] == ["-", "0", "0.52", "5.2", "120"]
    assert [words.seconds(value) for value in (None, 0.42, 12.4, 75, 3725)] == ["-", "0.42 s", "12 s", "1:15", "1:02:05"]
    assert [words.tokens_rate(value) for value in (None, 0.0, 41.83, 512.4)] == ["-", "-", "41.8", "512"]
    assert words.seconds_clock(75.9) == "1:15"
    assert [words.steps_ago(step, 10) for step in (-1, 10, 9, 12, 4)] == [
        "not known",
        "in this step",
        "1 step ago (step 9)",
        "in this step",
        "6 steps ago (step 4)",
    ]


@given(st.text(max_size=40), st.integers(0, 20))
def test_cut_text_fits(text: str, width: int) -> None:
    assert cell_len(words.fit(words.clean(text).replace("\n", " "), width)) <= width


def test_nothing_that_a_terminal_obeys_gets_through() -> None:
    cleaned = words.clean("a\x1b[2Jb\x07c\x9bd\ud800e\tf\r\ng")
    assert cleaned == "a\ufffd[2Jb\ufffdc\ufffdd\ufffde    f\ng"


@given(
    st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\n\r\t", exclude_categories=("Cc", "Zl", "Zp")), max_size=200),
    st.integers(1, 40),
)
def test_wrapped_lines_fit_and_lose_nothing_but_spaces(text: str, width: int) -> None:
    text = words.clean(text)
    lines = wrap(text, width)
    assert lines
    if width >= 2:
        assert all(cell_len(line) <= width for line in lines)
        assert "".join("".join(lines).split()) == "".join(text.split())


def test_wrapping() -> None:
    assert wrap("one two three", 7) == ["one two", "three"]
    assert wrap("", 5) == [""]
    assert wrap("abcdefgh", 3) == ["abc", "def", "gh"]
    assert wrap("    indented", 20) == ["    indented"]
    assert wrap("日本語です", 4) == ["日本", "語で", "す"]


def test_steps_of_the_ceiling() -> None:
    assert ceiling.step_bytes(24 << 30) == 1 << 30
    assert ceiling.step_bytes(693 << 20) == 32 << 20
    assert ceiling.next_ceiling(24 << 30, 1, 1) == 25 << 30
    assert ceiling.next_ceiling((24 << 30) + 5, 1, -1) == 24 << 30
    assert ceiling.next_ceiling(10 << 30, (10 << 30) - 5, -1) == (10 << 30) - 5
    assert ceiling.next_ceiling(1, 1, -1) == 1
