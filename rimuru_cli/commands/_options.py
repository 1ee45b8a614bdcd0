"""Option types that several commands share, so that a flag means and reads the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TALK, MODELS, TUNE, SETUP = "Talk", "Models", "Tune", "Set up"
_MEMORY, _ANSWER, _SAMPLING = "Memory", "Answer", "Sampling"

ModelArg = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder, a GGUF file, org/name, org/name@revision or org/name:Q4_K_M from the shared Hugging Face cache, or rimuru-demo.",
        show_default=False,
    ),
]
OptionalModelArg = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A folder, a GGUF file, org/name, org/name:Q4_K_M, org/name@revision, or rimuru-demo (the default).",
        show_default=False,
    ),
]
PullArg = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="org/name, org/name@revision with a branch, tag or commit, or org/name:Q4_K_M of GGUF files.",
        show_default=False,
    ),
]
SeenModelArg = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder, a GGUF file, org/name, org/name@revision or org/name:Q4_K_M (here or on the hub), or rimuru-demo.",
        show_default=False,
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Write JSON to stdout, errors too.")]

MemoryOpt = Annotated[
    str | None,
    typer.Option(
        "--memory", "--vram", metavar="SIZE", help="Most memory the process may use: 8GiB, 8GB, bytes, or 50%.", rich_help_panel=_MEMORY
    ),
]
ContextOpt = Annotated[
    str | None, typer.Option("--context", metavar="TOKENS", help="Longest conversation to make room for.", rich_help_panel=_MEMORY)
]
KVOpt = Annotated[
    str | None,
    typer.Option("--kv", metavar="auto|q8", help="Store the conversation as it is computed, or at 8 bits.", rich_help_panel=_MEMORY),
]
QuantOpt = Annotated[
    str | None,
    typer.Option("--quant", metavar="int8|int4", help="Use a quantised copy of the model, made once and kept.", rich_help_panel=_MEMORY),
]
ProfileOpt = Annotated[
    str | None,
    typer.Option("--profile", metavar="FILE", help="Hotset profile that seeds the expert ranking, or none.", rich_help_panel=_MEMORY),
]

DashboardOpt = Annotated[
    bool | None,
    typer.Option("--dashboard/--no-dashboard", help="Let `rimuru dashboard` look on, or not.", rich_help_panel=_MEMORY, show_default=False),
]

SystemOpt = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System prompt.", rich_help_panel=_ANSWER)]
SystemFileOpt = Annotated[
    Path | None, typer.Option("--system-file", metavar="FILE", help="Read the system prompt from a UTF-8 file.", rich_help_panel=_ANSWER)
]
ThinkOpt = Annotated[
    bool | None,
    typer.Option("--think/--no-think", help="Let a model that can reason do so, or not.", rich_help_panel=_ANSWER, show_default=False),
]
MaxTokensOpt = Annotated[str | None, typer.Option("--max-tokens", metavar="N", help="Most tokens of one answer.", rich_help_panel=_ANSWER)]
StopOpt = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="End the answer before this text; may be repeated.", rich_help_panel=_ANSWER),
]

# Sampling values arrive as text and are read by the settings table, which the variables and the file share.
TemperatureOpt = Annotated[
    str | None, typer.Option("--temperature", metavar="T", help="0 always takes the likeliest token.", rich_help_panel=_SAMPLING)
]
TopKOpt = Annotated[
    str | None, typer.Option("--top-k", metavar="K", help="Keep the K likeliest tokens; 0 is all.", rich_help_panel=_SAMPLING)
]
TopPOpt = Annotated[
    str | None, typer.Option("--top-p", metavar="P", help="Keep the likeliest tokens up to this probability.", rich_help_panel=_SAMPLING)
]
MinPOpt = Annotated[
    str | None, typer.Option("--min-p", metavar="P", help="Leave out tokens below this share of the likeliest.", rich_help_panel=_SAMPLING)
]
RepetitionOpt = Annotated[
    str | None,
    typer.Option("--repetition-penalty", metavar="R", help="Above 1, seen tokens become less likely.", rich_help_panel=_SAMPLING),
]
PresenceOpt = Annotated[
    str | None, typer.Option("--presence-penalty", metavar="X", help="Taken off once for tokens already used.", rich_help_panel=_SAMPLING)
]
FrequencyOpt = Annotated[
    str | None, typer.Option("--frequency-penalty", metavar="X", help="Taken off for each use of a token.", rich_help_panel=_SAMPLING)
]
SeedOpt = Annotated[str | None, typer.Option("--seed", metavar="N", help="Makes the answer repeatable.", rich_help_panel=_SAMPLING)]
