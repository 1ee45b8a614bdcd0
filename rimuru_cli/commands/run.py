"""`rimuru run`: one answer, for scripts and pipes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rimuru_cli.commands import _options as options
from rimuru_cli.output import Output


def run(
    model: options.ModelArg,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; - or nothing reads it from stdin.", show_default=False)
    ] = None,
    json: options.JsonFlag = False,
    stream: Annotated[
        bool | None,
        typer.Option("--stream/--no-stream", help="Show pieces as they come (with --json: one object a line).", show_default=False),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give the model the prompt as it is, without its chat template.")] = False,
    system: options.SystemOpt = None,
    system_file: options.SystemFileOpt = None,
    think: options.ThinkOpt = None,
    max_tokens: options.MaxTokensOpt = None,
    stop: options.StopOpt = None,
    memory: options.MemoryOpt = None,
    context: options.ContextOpt = None,
    kv: options.KVOpt = None,
    quant: options.QuantOpt = None,
    profile: options.ProfileOpt = None,
    dashboard: options.DashboardOpt = None,
    temperature: options.TemperatureOpt = None,
    top_k: options.TopKOpt = None,
    top_p: options.TopPOpt = None,
    min_p: options.MinPOpt = None,
    repetition_penalty: options.RepetitionOpt = None,
    presence_penalty: options.PresenceOpt = None,
    frequency_penalty: options.FrequencyOpt = None,
    seed: options.SeedOpt = None,
) -> None:
    """Answer one prompt: the answer to stdout, everything else to stderr."""
    flags = dict(locals())
    from rimuru_cli.chat.single import SingleRun, prompt_from
    from rimuru_cli.chat.talk import answer_once
    from rimuru_cli.settings import resolve

    single = SingleRun(raw=raw, stream=not json if stream is None else stream)
    settings = resolve(flags)
    sys.exit(answer_once(settings, prompt_from(prompt), Output(json=json), single, system_file=system_file, stop=tuple(stop or ())))
