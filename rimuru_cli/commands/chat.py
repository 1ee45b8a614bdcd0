"""`rimuru chat`: talk with a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rimuru_cli.commands import _options as options
from rimuru_cli.commands._window import why_no_window
from rimuru_cli.output import Output
from rimuru_models.errors import UsageError


def chat(
    model: options.OptionalModelArg = None,
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
    tui: Annotated[bool, typer.Option("--tui", help="Show the talk and the page pool side by side in one window.")] = False,
) -> None:
    """Talk with a model. From a pipe, the whole input is one message and stdout carries only the answer."""
    flags = dict(locals())
    from rimuru_cli.settings import resolve

    settings = resolve(flags)
    if tui:
        sys.exit(_in_a_window(flags, system_file, tuple(stop or ())))
    from rimuru_cli.chat.talk import talk

    sys.exit(talk(settings, Output(), system_file=system_file, stop=tuple(stop or ())))


def _in_a_window(flags: dict[str, object], system_file: Path | None, stop: tuple[str, ...]) -> int:
    """Raises UsageError where there is no terminal."""
    unseen = why_no_window()
    if unseen is not None:
        raise UsageError(f"--tui needs a terminal: {unseen}.", hint="Without it, `rimuru chat` also works through a pipe.")
    from rimuru_cli.tui.chat_app import run_chat

    return run_chat(flags, system_file=system_file, stop=stop)
