"""`rimuru pull`: a model from its name to a checked snapshot in the shared cache."""

from __future__ import annotations

from typing import Annotated

import typer

from rimuru_cli.commands import _options as options
from rimuru_cli.output import Output


def pull(
    model: options.PullArg,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Download even if something speaks against it; never ask.")] = False,
    connections: Annotated[int, typer.Option("--connections", metavar="N", min=1, max=64, help="Files to fetch side by side.")] = 8,
    json: options.JsonFlag = False,
) -> None:
    """Download a model, or what is missing of it: checked, resumable, shared with other tools. Prints its folder."""
    from rimuru_cli.commands._pulling import Screen, fits_here
    from rimuru_cli.hub.pull import pull_model

    pull_model(model, Screen(Output(json=json)), yes=yes, at_once=connections, check_fit=fits_here)
