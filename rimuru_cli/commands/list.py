"""`rimuru list`: the models on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from rimuru_cli.commands import _options as options
from rimuru_cli.output import Output


def list_models(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also what rimuru cannot run, and why not.")] = False,
    json: options.JsonFlag = False,
) -> None:
    """List the models on this machine: in the shared Hugging Face cache, built by rimuru, and local folders it has run."""
    from rimuru_cli.commands._library import print_models
    from rimuru_cli.hub.library import cache_folder, find_models

    print_models(find_models(), cache_folder(), Output(json=json), everything=everything)
