"""`rimuru quantize`: a copy of a model with experts at 8 or 4 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rimuru_cli.commands import _options as options
from rimuru_cli.output import Output


def quantize(
    model: options.ModelArg,
    to: Annotated[str, typer.Option("--to", metavar="int8|int4", help="Bits of an expert's weight.", show_default=False)],
    group: Annotated[
        int | None,
        typer.Option("--group", metavar="32|64|128", help="Weights that share a scale.", show_default="32 for int4, 128 for int8"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to write it.", show_default="rimuru's data folder")
    ] = None,
    json: options.JsonFlag = False,
) -> None:
    """Make a copy of a model with quantised experts, in the layout of compressed-tensors. Cut short, it goes on where it was."""
    from rimuru_cli.chat.interrupt import loading_libraries
    from rimuru_cli.commands._quantizing import print_copy

    output = Output(json=json)
    with loading_libraries():
        from rimuru_cli.engine.quantizing import quantized_copy
        from rimuru_cli.hub.paths import quantized_dir
        from rimuru_cli.hub.resolve import resolve_model
        from rimuru_models.quantizer.layout import Recipe

    recipe = Recipe.of(to, group)
    with output.progress() as progress:
        resolved = resolve_model(model, progress=progress)
        place = None if out is None else out.expanduser().absolute()
        folder, was_there = quantized_copy(resolved.path, resolved.name, recipe, store=quantized_dir(), out=place, progress=progress)
    print_copy(resolved.name, resolved.path, folder, recipe, output, was_there=was_there, chosen=out is not None)
