"""`rimuru show`: what a model is made of."""

from __future__ import annotations

from rimuru_cli.commands import _options as options
from rimuru_cli.output import Output


def show(model: options.SeenModelArg, json: options.JsonFlag = False) -> None:
    """Show a model's architecture, experts, bytes by part, pages in memory, licence, files. Before a download, too."""
    from rimuru_cli.commands._library import print_model
    from rimuru_cli.fit.pages import page_facts
    from rimuru_cli.hub.show import describe
    from rimuru_cli.hub.source import open_source

    out = Output(json=json)
    with out.progress() as progress:
        progress(f"Looking for {model}", 0, 0)
        source = open_source(model, progress=progress)
    facts = describe(source)
    print_model({**facts, "pages": page_facts(source.config, source.tensors.formats)}, out)
