"""Boxes in front of the pool: help, the engine and its notes, the list of engines."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Label, OptionList, Static
from textual.widgets.option_list import Option

from rimuru_cli.engine.telemetry.frame import Frame
from rimuru_cli.engine.telemetry.sources import EngineEntry
from rimuru_cli.tui import words
from rimuru_cli.tui.palette import BASE, LOOKS, Palette
from rimuru_cli.tui.widgets.page_map import CURSOR_GLYPH, MERGED_GLYPH, SPLIT_GLYPH

_BOX = """
%(name)s { align: center middle; }
%(name)s > .box { width: 92; max-width: 96%%; height: auto; max-height: 94%%; border: round $primary; padding: 0 1; background: $surface; }
"""

_KEYS = (
    ("Tab, Shift-Tab", "from part to part; the one with the keyboard has a mark"),
    ("arrows, Home, End", "move in it"),
    ("Enter", "look at the huge page under the cursor; Esc comes back"),
    ("k", "show one kind of page only, then the next, then all"),
    ("m", "layer x expert: brighter by score, by hits, or only resident"),
    ("1 2 3 4 5", "all, pool, experts, history, events"),
    ("w", "how much of the past the charts show: 1, 2, 5 or 10 minutes"),
    ("+ -", "raise or lower the engine's memory ceiling"),
    ("p", "stand still and go on; a recording at its end begins anew"),
    (", .   < >", "recording: 5 seconds back or on; slower or faster"),
    ("e   i", "list the engines; all about this one, with its notes"),
    ("t", "another theme"),
    ("s", "save a picture (SVG)"),
    ("q, Ctrl-Q", "leave"),
)
_CHAT_KEYS = (
    ("Enter", "send; Alt-Enter or Ctrl-J begins a new line"),
    ("Esc", "stop the answer; else go over to the pool, and c comes back"),
    ("Up, Down", "earlier messages, from the first and the last line"),
    ("Tab", "complete a slash command; /help lists them"),
    ("PageUp, PageDown", "scroll the talk"),
    ("Ctrl-C", "stop the answer; twice leaves"),
    ("F1  F2", "help; chat and pool, only chat, only pool"),
)
_READING = (
    "Every cell of the map is a huge page (or several, or a part of one: the heading says so) in the order of addresses. The colour is "
    "the kind that owns most of it. Pages that were just loaded are bright and fade within two seconds; dark ones are only partly filled. "
    "A white cell was just split into smaller pages, a grey one was merged again.",
    "Experts and conversation share this memory. A growing conversation takes pages from the experts that are wanted least, and they "
    "come back afterwards: that is what the adjuster's ribbon tells. R_b are blocks that sequences lacked at that moment, F_b blocks that "
    "were free.",
    "In the table of layers and experts the coloured ones are resident and the grey ones are not; the brighter, the more they are wanted.",
    "The axis of the hit rate is linear up to 90 %, and above that misses that get ten times rarer are always equally far apart.",
)


class _Box(ModalScreen[None]):
    """Closes with Esc, Enter, q or the key that opened it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q", "dismiss", "Close")]


class HelpScreen(_Box):
    """Keys and how to read the map."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("question_mark,f1", "dismiss", "Close", show=False)]
    CSS = _BOX % {"name": "HelpScreen"}

    def __init__(self, palette: Palette, *, chat: bool) -> None:
        super().__init__()
        self._palette = palette
        self._chat = chat

    def compose(self) -> ComposeResult:
        """One scrolling box."""
        with VerticalScroll(classes="box") as box:
            box.border_title = "help"
            box.border_subtitle = "Esc closes"
            yield Static(help_text(self._palette, chat=self._chat))


def help_text(palette: Palette, *, chat: bool) -> Text:
    """Everything that the help says."""
    text = Text()
    sections = [("Talk", _CHAT_KEYS), ("Pool", _KEYS)] if chat else [("Keys", _KEYS)]
    for title, keys in sections:
        text.append(f"{title}\n", "bold")
        for key, meaning in keys:
            text.append(f"  {key:<18}", "bold").append(f" {meaning}\n")
    text.append("\nKinds\n  ", "bold")
    for look in LOOKS.values():
        text.append("■ " if palette.colours else f"{look.glyph} ", palette.style(look.name, BASE)).append(f"{look.label}   ")
    if not palette.colours:
        text.append(f"{SPLIT_GLYPH} just split   {MERGED_GLYPH} just merged   {CURSOR_GLYPH} the cursor")
    text.append("\n")
    for paragraph in _READING:
        text.append("\n").append(paragraph).append("\n")
    return text


class InfoScreen(_Box):
    """All about the engine that is shown."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("i", "dismiss", "Close", show=False)]
    CSS = _BOX % {"name": "InfoScreen"}

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self._frame = frame

    def compose(self) -> ComposeResult:
        """One scrolling box."""
        with VerticalScroll(classes="box") as box:
            box.border_title = "engine"
            box.border_subtitle = "Esc closes"
            yield Static(info_text(self._frame))


def info_text(frame: Frame) -> Text:
    """Identity, sizes and notes of an engine."""
    engine, now = frame.engine, frame.counters
    pages = [("huge", engine.huge_page_bytes), ("expert", engine.expert_page_bytes), ("SSM", engine.ssm_page_bytes)]
    pages += [(f"KV of {engine.block_tokens} tokens", engine.kv_page_bytes), ("conv", engine.conv_page_bytes)]
    rows = [
        ("model", f"{engine.model} ({engine.architecture}), {engine.precision}"),
        ("device", f"{engine.device}: {engine.backend_reason}"),
        (
            "process",
            f"{engine.pid}, {engine.role}, rimuru {engine.version}, since {words.clock(engine.started)}",
        ),
        (
            "layers",
            f"{engine.num_layers}, {engine.num_moe_layers} of them with {engine.num_experts} experts "
            f"({engine.top_k} a token, at least {engine.floor} stay)",
        ),
        ("ceiling", f"{words.size(engine.ceiling_bytes)} (at least {words.size(engine.least_ceiling_bytes)})"),
        (
            "of it",
            f"program {words.size(engine.program_bytes)}, dense {words.size(engine.dense_bytes)}, "
            f"workspace {words.size(engine.workspace_bytes)}, pool {words.size(engine.pool_bytes)}",
        ),
        ("pages", ", ".join(f"{name} {words.size(size)}" for name, size in pages if size)),
        ("expert", f"{words.size(engine.expert_bytes)} in {words.expert_pages(engine)} pages"),
        ("host tier", f"{words.size(engine.host_bytes)} {engine.host_tier}"),
        (
            "link",
            f"{words.rate(engine.link_ceiling)} GB/s measured, {words.size(now.link_bytes)} moved so far"
            if engine.link_ceiling
            else f"not measured, {words.size(now.link_bytes)} moved so far",
        ),
        ("context", f"{engine.context_limit:,} tokens with this ceiling, the model's own is {engine.model_context:,}"),
    ]
    text = Text()
    for name, value in rows:
        text.append(f"{name:<10}", "bold").append(f"{words.clean(value)}\n")
    text.append("\nnotes\n" if engine.notices else "\nno notes: nothing was reduced, nothing fell back\n", "bold")
    for notice in engine.notices:
        text.append(f"· {words.clean(notice)}\n")
    return text


class EnginesScreen(ModalScreen[str | None]):
    """Choose the engine to look at; gives its id, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,e,q", "close", "Close")]
    CSS = _BOX % {"name": "EnginesScreen"}

    def __init__(self, engines: tuple[EngineEntry, ...]) -> None:
        super().__init__()
        self._engines = engines

    def compose(self) -> ComposeResult:
        """A list, or why there is none."""
        with VerticalScroll(classes="box") as box:
            box.border_title = "engines of this user"
            box.border_subtitle = "Enter attaches, Esc closes"
            box.can_focus = False
            if not self._engines:
                yield Label("None is running. Start one in another terminal, for example:  rimuru chat")
                return
            yield OptionList(*(Option(engine_line(entry), id=entry.engine_id) for entry in self._engines))

    def on_mount(self) -> None:
        """The attached one is marked."""
        for index, entry in enumerate(self._engines):
            if entry.attached:
                self.query_one(OptionList).highlighted = index

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """That one."""
        self.dismiss(event.option.id)

    def action_close(self) -> None:
        """None."""
        self.dismiss(None)


def engine_line(entry: EngineEntry) -> Text:
    """One engine in a line."""
    state = "" if entry.responding else "  does not move"
    mark = "▶" if entry.attached else " "
    who = f"{words.clean(entry.model)} on {entry.device}  {entry.role}, process {entry.pid}"
    return Text(f"{mark} {who}, since {words.clock(entry.started)}{state}")
