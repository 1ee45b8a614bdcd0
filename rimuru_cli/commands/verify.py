"""`rimuru verify`: whether every byte of a model is as it should be."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rimuru_cli.commands import _options as options
from rimuru_cli.output import Output


def verify(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A downloaded org/name or org/name@revision, a folder, or rimuru-demo.", show_default=False),
    ],
    json: options.JsonFlag = False,
) -> None:
    """Read a model again and compare all checksums, without the network; names the files that are damaged or missing."""
    from rimuru_cli.commands._verifying import print_verification
    from rimuru_cli.hub.verification import verify_model

    out = Output(json=json)
    with out.progress() as progress:
        result = verify_model(model, progress)
    sys.exit(print_verification(result, out))
