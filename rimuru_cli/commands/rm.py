"""`rimuru rm`: delete a model."""

from __future__ import annotations

from typing import Annotated

import typer

from rimuru_cli.commands import _options as options
from rimuru_cli.output import Output


def rm(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL[:VARIANT][@REVISION]",
            help="As `rimuru list --all` names it; without a variant or a revision all of them.",
            show_default=False,
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be freed, delete nothing.")] = False,
    json: options.JsonFlag = False,
) -> None:
    """Delete a model that rimuru built or that lies in the shared cache. Files that other revisions need stay."""
    from rimuru_cli.commands._library import agree_to_remove, print_removal
    from rimuru_cli.hub.removal import carry_out, plan_removal

    out = Output(json=json)
    removal = plan_removal(model)
    if dry_run:
        print_removal(removal, out, done=False)
        return
    agree_to_remove(removal, out, yes=yes)
    with out.progress() as progress:
        carry_out(removal, progress)
    print_removal(removal, out, done=True)
