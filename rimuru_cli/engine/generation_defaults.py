"""What a checkpoint recommends for sampling (generation_config.json), under what the user asks for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rimuru_cli.engine.json_files import read_json_object
from rimuru_cli.engine.request import SamplingParams
from rimuru_models.errors import CheckpointError, UsageError
from rimuru_models.gguf import GGUFHeader, gguf_of, open_gguf

_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty")
_FILE = "generation_config.json"
_GGUF_KEYS = {"temperature": "temp", "top_p": "top_p", "min_p": "min_p", "top_k": "top_k", "repetition_penalty": "penalty_repeat"}


def load_generation_defaults(model_dir: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Sampling fields that generation_config.json (or a GGUF file) sets, and notices about what in it was ignored.

    `"do_sample": false` means greedy decoding (temperature 0). A missing file sets nothing; null counts as not set. Nothing here fails:
    these are recommendations, and a model with a broken file still runs, with a notice.
    """
    gguf = gguf_of(model_dir)
    if gguf is not None:
        config = _of_gguf(open_gguf(gguf).main)
    else:
        try:
            config = read_json_object(model_dir / _FILE) or {}
        except CheckpointError as error:
            return {}, (f"{error.what} Its sampling defaults are ignored.",)
    source = _FILE if gguf is None else gguf.name
    values: dict[str, Any] = {}
    notices: list[str] = []
    for name in (*_FLOATS, "top_k"):
        value = config.get(name)
        if value is None:
            continue
        problem = _problem(name, value)
        if problem:
            notices.append(f"{source}: {problem} It is ignored.")
        else:
            values[name] = int(value) if name == "top_k" else float(value)
    do_sample = config.get("do_sample")
    if do_sample is False:
        values["temperature"] = 0.0
    elif do_sample is not None and do_sample is not True:
        notices.append(f"{source}: do_sample must be true or false. It is ignored.")
    return values, tuple(notices)


def _of_gguf(header: GGUFHeader) -> dict[str, Any]:
    """What a GGUF file recommends, under the names of generation_config.json."""
    found = {name: header.scalar(f"general.sampling.{key}") for name, key in _GGUF_KEYS.items()}
    return {name: value for name, value in found.items() if value is not None}


def merge_sampling(defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from the checkpoint's defaults and the user's values, which win; None among these means not given.

    Raises UsageError for values out of range (only the user's can be).
    """
    return SamplingParams(**{**defaults, **{k: v for k, v in overrides.items() if v is not None}})


def _problem(name: str, value: object) -> str | None:
    wanted = (int,) if name == "top_k" else (int, float)
    if isinstance(value, bool) or not isinstance(value, wanted):
        return f"{name} must be a number."
    try:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    except UsageError as error:
        return error.what
    except OverflowError:
        return f"{name} is too large a number."
    return None
