"""`rimuru doctor`: a look at this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from rimuru_cli.commands._options import JsonFlag
from rimuru_cli.output import Output


def doctor(
    json: JsonFlag = False,
    quick: Annotated[bool, typer.Option("--quick", help="Measure nothing: versions, devices and sizes only.")] = False,
) -> None:
    """Show what this machine has, how fast link and memory are (measured), what rimuru will compute on and why, and what to mend."""
    from rimuru_cli.chat.interrupt import loading_libraries
    from rimuru_cli.commands._tables import print_doctor
    from rimuru_cli.fit.measured import rates_of, save_rates

    out = Output(json=json)
    with loading_libraries():
        from rimuru_cli.bench.doctor import examine

    with out.progress("items") as progress:
        facts = examine(quick=quick, progress=progress)
    if facts["link"] is not None:
        save_rates(rates_of(facts["link"]))  # `rimuru fit` goes by them from now on
    print_doctor(facts, out)
