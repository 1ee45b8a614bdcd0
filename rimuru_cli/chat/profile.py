"""What `profile-hotset` does around the recording itself: which texts, a progress bar, a table of the coverage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rimuru_cli.chat import loading
from rimuru_cli.chat.single import read_prompts
from rimuru_cli.output import Output, format_share, table
from rimuru_cli.settings import resolve
from rimuru_models.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rimuru_cli.chat.session import Speech
    from rimuru_cli.engine.experts.profiling import HotsetReport

# Columns of the table in reading order, if the report has them: from the simplest policy to the best that is possible.
_POLICIES = ("uniform", "lru", "profile", "live", "oracle")
_PIECE_CHARACTERS = 2000


def choose_texts(prompts: Path | None, text: Path | None) -> tuple[list[str], bool]:
    """The texts to run, and whether they are prompts to answer (True) or text to read (False).

    Raises:
        UsageError: both files, an empty file, a wrong line, or not UTF-8.
        NotFoundError: no such file.
    """
    if prompts is not None and text is not None:
        raise UsageError("--prompts and --text cannot both be given.", hint="Leave one of them out.")
    if prompts is not None:
        return read_prompts(loading.read_text_file(prompts), prompts.name), True
    if text is not None:
        pieces = split_text(loading.read_text_file(text))
        if not pieces:
            raise UsageError(f"{text} holds no text.")
        return pieces, False
    from rimuru_cli.engine.experts.prompt_mix import PROMPT_MIX

    return list(PROMPT_MIX), True


def split_text(text: str, size: int = _PIECE_CHARACTERS) -> list[str]:
    """Cut a text at paragraphs into pieces of about `size` characters; a longer paragraph is cut inside."""
    pieces, current = [], ""
    for paragraph in text.split("\n\n"):
        if current and len(current) + len(paragraph) > size:
            pieces.append(current)
            current = ""
        current = f"{current}\n\n{paragraph}" if current else paragraph
        while len(current) > size:
            pieces.append(current[:size])
            current = current[size:]
    pieces.append(current)
    return [piece for piece in pieces if piece.strip()]


def coverage_table(rows: Sequence[Mapping[str, float]]) -> str:
    """Lay out held-out coverage: a row a share of experts held, a column a policy."""
    shown = [name for name in _POLICIES if any(name in row for row in rows)]
    shown += sorted({name for row in rows for name in row} - {*shown, "share"})
    return table(["resident", *shown], [[format_share(row["share"]), *(format_share(row.get(name)) for name in shown)] for row in rows])


def record_profile(
    model: str, out: Output, *, prompts: Path | None, text: Path | None, split: float, generate_tokens: int, output: Path | None
) -> None:
    """Record, write and report a hotset profile.

    Raises:
        RimuruError: bad texts, or the model cannot be loaded.
    """
    texts, are_prompts = choose_texts(prompts, text)
    if len(texts) < 2:
        raise UsageError("There is only one text, so none is left to test the profile on.", hint="Give more prompts or a longer text.")
    if output is not None and not output.parent.is_dir():
        raise UsageError(f"There is no folder {output.parent} to write the profile to.")
    report = _record(model, texts, are_prompts, out, split=split, generate_tokens=generate_tokens if are_prompts else 0, output=output)
    result = report.to_dict()
    if out.json:
        out.emit(result)
        return
    out.note(f"Profile written to {report.profile_path}")
    out.note(f"Share of expert selections that find their expert, on {result['held_out_tokens']:,} tokens the profile has not seen:", "dim")
    out.line(coverage_table(result["coverage"]))


def _record(
    model: str, texts: Sequence[str], are_prompts: bool, out: Output, *, split: float, generate_tokens: int, output: Path | None
) -> HotsetReport:
    from rimuru_models.index import model_identity

    settings = resolve({"profile": "none"})  # recording must not depend on an older profile
    resolved, engine, speech = loading.open_parts(model, settings, out, chat=are_prompts)
    try:
        from rimuru_cli.engine.experts.profiling import profile_hotset

        with out.progress("items") as progress:
            return profile_hotset(
                engine,
                [_ids(speech, text, are_prompts) for text in texts],
                identity=model_identity(resolved.path),
                output=output or loading.profile_file(resolved.path),
                split=split,
                generate_tokens=generate_tokens,
                progress=progress,
            )
    finally:
        engine.close()


def _ids(speech: Speech, text: str, is_prompt: bool) -> list[int]:
    """Token ids: a prompt as a user's first message, a text as it stands."""
    if not is_prompt:
        return speech.encode(text, raw=True)
    return speech.encode(speech.render([{"role": "user", "content": text}], think=None))
