"""The one mouth of the command line: data goes to stdout, everything else to stderr.

Escape codes appear only on a terminal, and never when NO_COLOR is set. Text that comes from a model or a checkpoint cannot smuggle its own
escape codes onto the screen: control characters are replaced before they reach a terminal (and left alone in a pipe, where bytes matter).
"""

from __future__ import annotations

import contextlib
import json
import locale
import math
import os
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TextIO

Style = Literal["dim", "bold", "red", "yellow", "green", "cyan"]
Progress = Callable[[str, int, int], None]
TransferProgress = Callable[[str, int, int, str], None]

_CODES: dict[Style, str] = {"dim": "2", "bold": "1", "red": "31", "yellow": "33", "green": "32", "cyan": "36"}
_TURNS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0), *_TURNS) if code not in (0x09, 0x0A, 0x0D)} | {0x0D: ""}
"""For `str.translate`. C0 and C1 control characters except newline and tab: a terminal would obey them. Marks that change the direction of
what follows: a name must not look like another. A carriage return is dropped, as in a Windows line end."""
_WIDTHLESS = ("Mn", "Me", "Cf")
_REDRAW_SECONDS = 0.1


class ReaderGone(Exception):
    """Whoever read our stdout has closed it (`rimuru … | head`): stop quietly."""


def prepare_streams() -> None:
    """Make stdout and stderr UTF-8 whatever the locale says; what cannot be encoded (lone surrogates) becomes '?'.

    One that the caller closed becomes a stream to nowhere. It takes the free descriptor, too, so that no file which is opened later
    gets to be the one that libraries write their warnings to.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8", errors="replace"))  # noqa: SIM115  # until the process ends
            continue
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="replace")


class Output:
    """Prints for one invocation of a command.

    Attributes:
        json: machine-readable mode: stdout carries JSON only, and no progress bars are drawn.
    """

    def __init__(self, *, json: bool = False) -> None:
        self.json = json
        self._bar: _Bar | None = None

    # The streams are looked up on every call, so that a test (or a caller) that swaps sys.stdout is respected.
    @property
    def stdout(self) -> TextIO:
        """Where data goes."""
        return sys.stdout

    @property
    def stderr(self) -> TextIO:
        """Where everything else goes."""
        return sys.stderr

    def data(self, text: str) -> None:
        """Write text to stdout as it is, without a newline, and flush it.

        Raises:
            ReaderGone: the reading end of the pipe was closed.
        """
        self._put(text.translate(CONTROLS) if is_terminal(self.stdout) else text)

    def _put(self, text: str) -> None:
        if self._bar is not None:
            self._bar.wipe()  # both streams may be one terminal
        try:
            self.stdout.write(text)
            self.stdout.flush()
        except BrokenPipeError as error:
            raise ReaderGone from error

    def line(self, text: str = "") -> None:
        """Write one line of data to stdout."""
        self.data(text + "\n")

    def styled_line(self, *pieces: tuple[str, Style | None]) -> None:
        """Write one line of data in pieces that have styles of their own; the styles show on terminals with colours only.

        Raises:
            ReaderGone: the reading end of the pipe was closed.
        """
        clean = [(text.translate(CONTROLS), style) for text, style in pieces] if is_terminal(self.stdout) else pieces
        self._put("".join(self.paint(text, style, self.stdout) for text, style in clean) + "\n")

    def emit(self, value: object, *, compact: bool = False) -> None:
        """Write one JSON value to stdout; compact puts it on a single line (NDJSON). NaN and infinities become null."""
        self.line(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=None if compact else 2))

    def note(self, text: str, style: Style | None = None) -> None:
        """Write one line to stderr."""
        self.write_note(text + "\n", style)

    def write_note(self, text: str, style: Style | None = None) -> None:
        """Write text to stderr without a newline. A stderr that takes nothing (gone, full) is not an error."""
        if self._bar is not None:
            self._bar.wipe()  # it comes back with its next update, below the note
        clean = text.translate(CONTROLS) if is_terminal(self.stderr) else text
        with contextlib.suppress(OSError):
            self.stderr.write(self.paint(clean, style, self.stderr))
            self.stderr.flush()

    def warn(self, text: str) -> None:
        """Say on stderr that something is not as asked for, without stopping."""
        self.note(f"warning: {text}", "yellow")

    def paint(self, text: str, style: Style | None, stream: TextIO) -> str:
        """Return the text in the style if the stream is a terminal that shows colours, else unchanged."""
        if style is None or not text.strip() or not shows_colours(stream):
            return text
        body = text.rstrip("\n")
        return f"\x1b[{_CODES[style]}m{body}\x1b[0m{text[len(body) :]}"

    @contextlib.contextmanager
    def progress(self, unit: Literal["bytes", "items"] = "bytes") -> Iterator[Progress]:
        """Give a function (stage, done, total) that draws a bar on stderr; the bar is wiped at the end, also on Ctrl-C.

        Nothing is drawn in JSON mode or when stderr is not a terminal. total 0 means unknown.
        """
        if self.json or not is_terminal(self.stderr):
            yield lambda stage, done, total: None
            return
        self._bar = _Bar(self.stderr, unit)
        try:
            yield self._bar.update
        finally:
            self._bar.wipe()
            self._bar = None

    @contextlib.contextmanager
    def transfer_progress(self) -> Iterator[TransferProgress]:
        """As `progress`, for bytes on their way: (stage, done, total, rate and time in words), which give way last on a narrow terminal."""
        with self.progress():
            drawn = self._bar
            yield (lambda stage, done, total, pace: None) if drawn is None else drawn.update


class _Bar:
    """One line on a terminal, redrawn at most ten times a second, with carriage returns only (no escape codes)."""

    def __init__(self, stream: TextIO, unit: str) -> None:
        self.stream = stream
        self.unit = unit
        self.width = 0
        self.stage: str | None = None
        self.drawn_at = -math.inf

    def update(self, stage: str, done: int, total: int, pace: str = "") -> None:
        now = time.monotonic()
        if stage == self.stage and done < total and now - self.drawn_at < _REDRAW_SECONDS:
            return
        self.stage, self.drawn_at = stage, now
        columns = max(20, terminal_columns(self.stream) - 1)
        show = format_bytes if self.unit == "bytes" else str
        amount = f"{show(done)} of {show(total)}" if total > 0 else show(done) if done else ""
        if total <= 0:
            layouts = [f"{stage}  {amount}"]
        elif pace:
            share = format_share(min(done / total, 1.0))
            line = f"{amount}  {pace}"
            layouts = [f"{stage}  {bar(done / total, width)}  {line}" for width in (24, 10)] + [
                f"{stage}  {share}  {pace}",
                f"{share}  {pace}",
                share,
            ]
        else:
            share = format_share(min(done / total, 1.0))
            layouts = [f"{stage}  {bar(done / total, width)}  {amount}" for width in (24, 10)] + [f"{stage}  {share}", share]
        text = next((layout for layout in layouts if display_width(layout) <= columns), layouts[-1])
        text = text.translate(CONTROLS).replace("\n", " ")[:columns]
        while display_width(text) > columns:
            text = text[:-1]
        text = text.rstrip()
        width = display_width(text)
        self._write("\r" + text + " " * (self.width - width))
        self.width = width

    def wipe(self) -> None:
        if self.width:
            self._write("\r" + " " * self.width + "\r")
            self.width = 0

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self.stream.write(text)
            self.stream.flush()


def is_terminal(stream: TextIO) -> bool:
    """Whether the stream is a terminal (False for closed or replaced streams)."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def shows_colours(stream: TextIO) -> bool:
    """Whether escape codes may be written: a terminal, NO_COLOR unset or empty, not a dumb terminal."""
    if not is_terminal(stream) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    # The old Windows console needs a mode switch that Windows Terminal and others do not; plain text is the safe choice there.
    return sys.platform != "win32" or any(name in os.environ for name in ("WT_SESSION", "ANSICON", "TERM"))


def shows_blocks() -> bool:
    """Whether block characters can be shown: a locale of UTF-8 (Windows shows them in any), and no terminal that says it is dumb."""
    if os.environ.get("TERM") == "dumb":
        return False
    return sys.platform == "win32" or locale.getencoding().lower().replace("-", "") == "utf8"


def terminal_columns(stream: TextIO) -> int:
    """Width of the terminal in columns; 80 when it cannot be told."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def bar(share: float, width: int = 24, full: str = "█", empty: str = "░") -> str:
    """Draw a share between 0 and 1 as a bar of `width` characters."""
    filled = round(min(1.0, max(0.0, share)) * width)
    return full * filled + empty * (width - filled)


def format_bytes(num_bytes: int | float) -> str:
    """Write a size for people: 1536 -> '1.5 KiB'. JSON carries plain integers instead."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_share(share: float | None) -> str:
    """Write a share for people: 0.512 -> '51 %'; None -> '-'."""
    return "-" if share is None or not math.isfinite(share) else f"{share * 100:.0f} %"


def display_width(text: str) -> int:
    """Columns that the text takes on a terminal: wide characters count two, marks on others and joiners none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.category(c) in _WIDTHLESS else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay out rows under headers in aligned columns; numbers are flush right. Returns lines without a final newline."""
    cells = [[str(value) for value in row] for row in rows]
    right = [bool(rows) and all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(headers))]
    widths = [max(display_width(line[i]) for line in [list(headers), *cells]) for i in range(len(headers))]

    def draw(line: Sequence[str]) -> str:
        padded = []
        for text, width, flush_right in zip(line, widths, right, strict=True):
            space = " " * (width - display_width(text))
            padded.append(space + text if flush_right else text + space)
        return "  ".join(padded).rstrip()

    return "\n".join([draw(headers), "  ".join("-" * width for width in widths), *map(draw, cells)])


def print_report(report: Mapping[str, Any], out: Output) -> None:
    """Print a measurement: with --json as it is, else plain values on stderr and everything that has rows as tables on stdout.

    Rows are lists of dicts ("rows"), or dicts of dicts, whose keys become the first column.
    """
    if out.json:
        out.emit(report)
        return
    for key, value in report.items():
        if isinstance(value, Mapping) and value and all(isinstance(item, Mapping) for item in value.values()):
            out.line(rows_table([{key: name, **item} for name, item in value.items()]))
        elif isinstance(value, (list, tuple)) and value and all(isinstance(item, Mapping) for item in value):
            out.line(rows_table(value))
        elif isinstance(value, Mapping):
            out.note(f"{_title(key)}: " + ", ".join(f"{_title(name)} {_short(item)}" for name, item in value.items()), "dim")
        else:
            out.note(f"{_title(key)}: {_short(value)}", "dim")


def rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay out dicts as a table; a column for every key that any of them has."""
    headers = list(dict.fromkeys(key for row in rows for key in row))
    return table([_title(header) for header in headers], [[_short(row.get(header)) for header in headers] for row in rows])


def _title(key: str) -> str:
    return key.replace("_", " ")


def _short(value: object) -> object:
    """A cell of a table: floats with four significant digits, None as a dash."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return "-" if value is None else value


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON cannot carry, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
