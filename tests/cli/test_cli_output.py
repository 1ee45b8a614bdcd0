"""The one mouth: streams kept apart, no escape codes where they do not belong, bars that leave no trace."""

from __future__ import annotations

import io
import json
import sys

import pytest

from rimuru_cli import output
from rimuru_cli.output import Output, ReaderGone, bar, display_width, format_bytes, format_share, print_report, table


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Closed(io.StringIO):
    """A pipe that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> tuple[Terminal, Terminal]:
    """Put terminals in place of stdout and stderr. (Not a fixture: pytest swaps the streams between set-up and test.)"""
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    return out, err


def test_data_and_notes_go_to_different_streams(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output()
    out.line("data")
    out.note("note", "red")
    out.warn("careful")
    captured = capsys.readouterr()
    assert captured.out == "data\n"
    assert captured.err == "note\nwarning: careful\n"


def test_styles_appear_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    Output().note("dim", "dim")
    assert terminal[1].getvalue() == "\x1b[2mdim\x1b[0m\n"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_escape_codes_when_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    terminal = use_terminal(monkeypatch)
    monkeypatch.setenv(name, value)
    Output().note("plain", "red")
    assert terminal[1].getvalue() == "plain\n"


def test_a_model_cannot_send_escape_codes_to_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    Output().data("a\x1b[2Jb\r\x07\x9bc\td\n")
    assert terminal[0].getvalue() == "a\ufffd[2Jb\ufffd\ufffdc\td\n"


def test_nothing_turns_the_direction_of_a_line_around_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    Output().note("gpt\u202exam\u2066x\u2069 \u05e9\u05dc\u05d5\u05dd")
    assert terminal[1].getvalue() == "gpt\ufffdxam\ufffdx\ufffd \u05e9\u05dc\u05d5\u05dd\n", "letters that run to the left are letters"


def test_a_line_in_styles_takes_the_place_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = use_terminal(monkeypatch)[0]
    monkeypatch.setattr(sys, "stderr", screen)
    out = Output()
    with out.progress() as update:
        update("Reading", 1, 4)
        out.styled_line(("found", None), (" it", "green"))
    assert " \rfound" in screen.getvalue()


def test_piped_data_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Output().data("a\x1b[2Jb\r")
    assert capsys.readouterr().out == "a\x1b[2Jb\r"


def test_closed_stdout_is_its_own_signal_and_closed_stderr_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(sys, "stderr", Closed())
    Output().note("nobody hears")
    with pytest.raises(ReaderGone):
        Output().data("x")


def test_json_carries_no_nan_and_keeps_unicode(capsys: pytest.CaptureFixture[str]) -> None:
    Output(json=True).emit({"rate": float("nan"), "list": (1, float("inf")), "text": "ü"})
    text = capsys.readouterr().out
    assert json.loads(text) == {"rate": None, "list": [1, None], "text": "ü"}
    assert "ü" in text
    Output(json=True).emit({"a": 1, "b": [2]}, compact=True)
    assert capsys.readouterr().out == '{"a": 1, "b": [2]}\n'


def test_progress_draws_on_a_terminal_and_wipes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with Output().progress() as update:
        update("Reading\x1b[2J weights", 512, 1024)
        update("Reading", 1024, 1024)
    drawn = terminal[1].getvalue()
    assert "512 B of 1.0 KiB" in drawn and "\x1b" not in drawn
    assert drawn.endswith(" \r"), "the last thing written clears the line"
    assert terminal[0].getvalue() == ""


def test_a_note_takes_the_place_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    out = Output()
    with out.progress() as update:
        update("Reading", 1, 4)
        out.note("something odd")
    assert terminal[1].getvalue().endswith(" \rsomething odd\n")


def test_progress_is_wiped_when_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with pytest.raises(KeyboardInterrupt), Output().progress("items") as update:
        update("Recording", 1, 4)
        raise KeyboardInterrupt
    assert terminal[1].getvalue().endswith(" \r")


@pytest.mark.parametrize("json_mode", [True, False])
def test_progress_is_silent_in_json_mode_and_in_a_pipe(json_mode: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream: io.StringIO = use_terminal(monkeypatch)[1] if json_mode else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Output(json=json_mode).progress() as update:
        update("Reading", 1, 2)
    assert stream.getvalue() == ""


def test_a_bar_of_wide_characters_fits_and_is_wiped_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    monkeypatch.setattr(output, "terminal_columns", lambda stream: 30)
    with Output().progress("items") as update:
        update("日本語の模型を読む日本語の模型を読む", 0, 0)
        update("x", 0, 0)
    first, second, wiped = (line for line in terminal[1].getvalue().split("\r") if line)
    assert 25 < display_width(first) < 30
    assert len(second) >= display_width(first), "what was there is covered"
    assert wiped == " "


def test_progress_with_unknown_or_exceeded_total(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with Output().progress() as update:
        update("Waiting", 0, 0)
        update("Over", 30, 20)
    assert "Waiting" in terminal[1].getvalue() and "█" * 24 in terminal[1].getvalue()


@pytest.mark.parametrize("columns", [20, 30, 40, 60, 100])
def test_a_bar_that_is_half_full_looks_it_on_any_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    monkeypatch.setattr(output, "terminal_columns", lambda stream: columns)
    with Output().progress() as update:
        update("Checking what is here", 1 << 30, 2 << 30)
    line = terminal[1].getvalue().split("\r")[1].rstrip()
    assert display_width(line) < columns and line.count("█") == line.count("░")
    assert "50 %" in line or "1.0 GiB of 2.0 GiB" in line


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1.0 GiB"), (5 << 40, "5.0 TiB")]
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_shares_and_bars() -> None:
    assert [format_share(x) for x in (0.5, None, float("nan"))] == ["50 %", "-", "-"]
    assert bar(0.5, 4) == "██░░" and bar(-1, 2) == "░░" and bar(7, 2) == "██"


def test_table_aligns_numbers_right_and_counts_wide_characters() -> None:
    text = table(["name", "n"], [["a", 5], ["日本", 123]])
    assert text.splitlines() == ["name    n", "----  ---", "a       5", "日本  123"]
    assert display_width("日本e\u0301") == 5
    assert display_width("a\u200bb\ufe0f\u200d") == 2 and display_width("\u0e01\u0e31") == 1, "marks and joiners have no width"
    assert table(["a", "b"], []) == "a  b\n-  -"


def test_report_as_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = {"model": "m", "rows": [{"run": "ours", "tok_per_second": 12.34567, "x": None}]}
    print_report(report, Output())
    captured = capsys.readouterr()
    assert captured.err == "model: m\n"
    assert captured.out.splitlines()[0].split() == ["run", "tok", "per", "second", "x"]
    assert "12.35" in captured.out and captured.out.splitlines()[2].endswith("-")
    print_report(report, Output(json=True))
    assert json.loads(capsys.readouterr().out) == report
