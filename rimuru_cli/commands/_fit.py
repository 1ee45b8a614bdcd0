"""How the answer of `rimuru fit` is laid out for people: tables, and the memory drawn at several contexts."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rimuru_cli.commands._tables import parameters_in_words
from rimuru_cli.hub.fit import FitVerdict
from rimuru_cli.output import Output, Style, format_bytes, format_share, shows_blocks, table, terminal_columns
from rimuru_models.quantization.precision import Precision

_WIDEST_BAR, _NARROWEST_BAR = 64, 8


class _Piece(NamedTuple):
    """A part of the memory in the chart: its words, its letters with and without Unicode, and its colour."""

    words: str
    block: str
    letter: str
    style: Style | None


_WEIGHTS = _Piece("weights and workspace", "▓", "=", "cyan")
_EXPERTS = _Piece("experts", "█", "#", "green")
_CHAT = _Piece("conversation", "▒", "+", "yellow")
_FREE = _Piece("free", "░", ".", "dim")


def print_verdict(verdict: FitVerdict, out: Output, *, downloaded: bool) -> None:
    """Print whether a model runs, and how."""
    report = verdict.report
    if out.json:
        out.emit(report)
        return
    architecture = report["architecture"].removesuffix("ForCausalLM")
    precision = Precision(report["precision"], report["dense_precision"]).words()
    size = f"{parameters_in_words(report['parameters'])} parameters, {precision}, {format_bytes(report['stored_bytes'])}"
    out.line(f"{report['model']}: {architecture}, {size}")
    out.styled_line((f"{verdict.headline}.", "green" if verdict.runs else "red"))
    for notice in report["notices"]:
        out.note(f"note: {notice}")
    if not verdict.runs:
        out.line(f"why:  {verdict.problem}")
        if verdict.hint:
            out.line(f"hint: {verdict.hint}")
        _print_assumptions(report, out)
        return
    if report["gpu_not_used"] and report["device"] == "cpu":
        out.line(f"No GPU is used: {report['gpu_not_used']}.")
    out.line()
    out.line(table(["part", "where", "bytes"], [[row["part"], row["place"], format_bytes(row["bytes"])] for row in report["places"]]))
    out.line()
    out.line(
        table(["context", "experts resident", "share", "conversation", "tokens/s"], [_context_cells(row) for row in report["contexts"]])
    )
    out.line()
    out.line(table(["prompt", "tokens/s"], [[f"{row['tokens']:,}", rate_range(row)] for row in report["prompts"]]))
    out.line()
    _print_chart(report, out)
    out.line()
    out.line(
        f"Largest context: {report['largest_context']:,} tokens ({_limit_in_words(report)}), KV cache {report['memory']['kv_precision']}."
    )
    _print_assumptions(report, out)
    if not downloaded:
        out.note(f"Not downloaded yet: rimuru pull {report['model']}")


def _context_cells(row: Mapping[str, Any]) -> list[str]:
    context = f"{row['context']:,}"
    if not row["fits"]:
        return [context, "-", "-", "-", "beyond the model's context" if row["limit"] == "model" else "does not fit"]
    return [
        context,
        f"{row['resident_experts']:,}",
        format_share(row["resident_share"]),
        format_bytes(row["conversation_bytes"]),
        rate_range(row, "decode_"),
    ]


def rate_range(row: Mapping[str, Any], prefix: str = "") -> str:
    """A range of rates for people: "7.8 to 25", one number where both ends are the same, "-" where there is none."""
    low, high = row[f"{prefix}tokens_per_s_low"], row[f"{prefix}tokens_per_s_high"]
    if low is None:
        return "-"
    return _rate(low) if _rate(low) == _rate(high) else f"{_rate(low)} to {_rate(high)}"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{float(f'{rate:.2g}'):g}"


def _print_chart(report: Mapping[str, Any], out: Output) -> None:
    """A bar a context: what the memory under the ceiling holds."""
    memory = report["memory"]
    blocks = shows_blocks()
    label_width = max(len(f"{row['context']:,}") for row in report["contexts"])
    room = terminal_columns(out.stdout) - label_width - 3
    width = min(_WIDEST_BAR, max(_NARROWEST_BAR, room))
    total = max(1, memory["ceiling_bytes"])
    fixed = memory["program_bytes"] + memory["dense_bytes"] + memory["workspace_bytes"]
    where = "VRAM" if report["device"] == "gpu" else "RAM"
    out.line(f"{where} under the ceiling of {format_bytes(memory['ceiling_bytes'])}, by context:")
    for row in report["contexts"]:
        if row["fits"]:
            sizes = ((_WEIGHTS, fixed), (_EXPERTS, row["resident_experts"] * memory["expert_bytes"]), (_CHAT, row["conversation_bytes"]))
            bar = _bar(sizes, total, width, blocks)
        else:
            bar = [("-", None)]
        out.styled_line((f"{row['context']:>{label_width},}  ", None), *bar)
    for line in _packed(
        [f"{_glyph(piece, blocks)} {piece.words}" for piece in (_WEIGHTS, _EXPERTS, _CHAT, _FREE)], terminal_columns(out.stdout)
    ):
        out.line(line)


def _packed(words: Sequence[str], columns: int) -> list[str]:
    """As many words a line as fit, two blanks between them; none is broken."""
    lines = [words[0]]
    for word in words[1:]:
        joined = f"{lines[-1]}  {word}"
        if len(joined) < columns:
            lines[-1] = joined
        else:
            lines.append(word)
    return lines


def _glyph(piece: _Piece, blocks: bool) -> str:
    return piece.block if blocks else piece.letter


def _bar(sizes: Sequence[tuple[_Piece, int]], total: int, width: int, blocks: bool) -> list[tuple[str, Style | None]]:
    """Cells in proportion to bytes; what is there at all gets a cell, and the rest is free."""
    pieces: list[tuple[str, Style | None]] = []
    used = done = 0
    for piece, num_bytes in sizes:
        done += num_bytes
        cells = min(max(round(done / total * width) - used, 1 if num_bytes else 0), width - used)
        used += cells
        pieces.append((_glyph(piece, blocks) * cells, piece.style))
    return [*pieces, (_glyph(_FREE, blocks) * (width - used), _FREE.style)]


def _limit_in_words(report: Mapping[str, Any]) -> str:
    if report["largest_context"] >= report["model_context"]:
        return "the model's own limit"
    return f"the memory allows no more; the model's own limit is {report['model_context']:,}"


def _print_assumptions(report: Mapping[str, Any], out: Output) -> None:
    columns = max(40, min(terminal_columns(out.stdout) - 1, 120))
    out.line("Assumed:")
    for line in report["assumptions"]:
        for wrapped in textwrap.wrap(f"{line}.", columns, initial_indent="- ", subsequent_indent="  "):
            out.line(wrapped)
