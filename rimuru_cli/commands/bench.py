"""`rimuru bench`: measurements."""

from __future__ import annotations

from typing import Annotated

import typer

from rimuru_cli.commands import _options as options
from rimuru_cli.output import Output, print_report

bench_app = typer.Typer(help="Measure the page allocator or decoding.", no_args_is_help=True)


@bench_app.command()
def allocator(json: options.JsonFlag = False) -> None:
    """Measure how long the page allocator takes."""
    from rimuru_cli.bench.allocator import run_allocator_bench

    print_report(run_allocator_bench(), Output(json=json))


@bench_app.command()
def decode(
    model: options.OptionalModelArg = None,
    versus: Annotated[
        str | None, typer.Option("--vs", metavar="transformers", help="Also run the same file in transformers (a development dependency).")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to decode in each run.")] = 64,
    residency: Annotated[str, typer.Option("--residency", metavar="SHARE", help="Share of experts that is resident, as in 50%.")] = "100%",
    json: options.JsonFlag = False,
) -> None:
    """Measure decoding speed, one token at a time."""
    from rimuru_cli.settings import parse_share

    out = Output(json=json)
    share = parse_share(residency, "--residency")
    if versus not in (None, "transformers"):
        raise typer.BadParameter("only transformers can be compared with", param_hint="--vs")
    from rimuru_cli.chat.interrupt import loading_libraries

    with loading_libraries():
        from rimuru_cli.bench.decode import run_decode_bench
        from rimuru_cli.hub.resolve import resolve_model

    with out.progress() as progress:
        resolved = resolve_model(model, progress=progress)
    with out.progress("items") as progress:
        report = run_decode_bench(resolved.path, versus=versus, tokens=tokens, residency=share, progress=progress)
    print_report(report, out)
