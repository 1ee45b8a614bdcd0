"""`rimuru fit`: will a model run here, and about how fast."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rimuru_cli.commands import _options as options
from rimuru_cli.output import Output


def fit(
    model: options.SeenModelArg,
    vram: Annotated[
        str | None,
        typer.Option(
            "--vram",
            metavar="SIZE",
            help="Most graphics memory to use, 12GiB or 50%; without a card, one of this size is imagined.",
            show_default="what the card has",
        ),
    ] = None,
    ram: Annotated[
        str | None, typer.Option("--ram", metavar="SIZE", help="Main memory in all, as 32GiB.", show_default="what is free now")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            "--link",
            metavar="GB/S",
            help="Rate of copies to the card, as 25; `rimuru doctor` measures it.",
            show_default="measured, or by its PCIe link",
        ),
    ] = None,
    kv: options.KVOpt = None,
    json: options.JsonFlag = False,
) -> None:
    """Say whether a model runs here, what lies where, at what context, and about how fast; before a download, too. Exit code 6: no."""
    from rimuru_cli.commands._fit import print_verdict
    from rimuru_cli.fit.wishes import wished_machine
    from rimuru_cli.settings import BY_NAME, checked

    out = Output(json=json)
    precision = checked(BY_NAME["kv"], kv or "auto", "--kv")
    machine = wished_machine(vram=vram, ram=ram, link=link)
    from rimuru_cli.fit import check_fit
    from rimuru_cli.hub.source import open_source

    with out.progress() as progress:
        progress(f"Looking for {model}", 0, 0)
        source = open_source(model, progress=progress)
    verdict = check_fit(source.name, source.config, source.index, machine=machine, kv=precision)
    print_verdict(verdict, out, downloaded=source.place != "hub")
    if source.place == "demo" and verdict.runs and not json:
        out.note("`rimuru chat` keeps half of this model's experts out on purpose, so that there is something to see.", "dim")
    sys.exit(verdict.exit_code)
