"""`rimuru chat`: talk with a model."""

from __future__ import annotations

import sys

from rimuru_cli.commands import _options as options
from rimuru_cli.output import Output


def chat(
    model: options.OptionalModelArg = None,
    system: options.SystemOpt = None,
    system_file: options.SystemFileOpt = None,
    think: options.ThinkOpt = None,
    max_tokens: options.MaxTokensOpt = None,
    stop: options.StopOpt = None,
    memory: options.MemoryOpt = None,
    context: options.ContextOpt = None,
    profile: options.ProfileOpt = None,
    temperature: options.TemperatureOpt = None,
    top_k: options.TopKOpt = None,
    top_p: options.TopPOpt = None,
    min_p: options.MinPOpt = None,
    repetition_penalty: options.RepetitionOpt = None,
    presence_penalty: options.PresenceOpt = None,
    frequency_penalty: options.FrequencyOpt = None,
    seed: options.SeedOpt = None,
) -> None:
    """Talk with a model. From a pipe, the whole input is one message and stdout carries only the answer."""
    flags = dict(locals())
    from rimuru_cli.chat.talk import talk
    from rimuru_cli.settings import resolve

    sys.exit(talk(resolve(flags), Output(), system_file=system_file, stop=tuple(stop or ())))
