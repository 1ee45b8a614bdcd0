"""`rimuru profile-hotset`: record which experts a workload uses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rimuru_cli.commands import _options as options
from rimuru_cli.output import Output


def profile_hotset(
    model: options.ModelArg,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="Prompts: JSON Lines (*.jsonl), or one prompt a line.", show_default=False),
    ] = None,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="Plain text to read instead of prompts.", show_default=False)
    ] = None,
    split: Annotated[float, typer.Option("--split", min=0.05, max=0.95, help="Share of the texts to learn from; the rest tests.")] = 0.5,
    tokens: Annotated[int, typer.Option("--tokens", min=0, help="Tokens to generate after each prompt.")] = 64,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the profile here instead of beside the others.", show_default=False),
    ] = None,
    json: options.JsonFlag = False,
) -> None:
    """Record which experts are used over prompts, write a hotset profile, and report how well it covers text it has not seen."""
    from rimuru_cli.chat.profile import record_profile

    record_profile(model, Output(json=json), prompts=prompts, text=text, split=split, generate_tokens=tokens, output=output)
