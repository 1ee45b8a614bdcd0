"""What is asked, and when: lists of requests from files, or drawn from published statistics.

Lengths follow the ShareGPT statistics of the PagedAttention paper (Kwon et al., arXiv 2309.06180, figure 11a): prompts of 161.31 tokens
and answers of 337.99 tokens on average. The paper prints means and histograms only; the log-normal shape and the spreads below are
our assumption.
"""

from __future__ import annotations

import json
import math
import reprlib
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rimuru_models.errors import NotFoundError, UsageError

MEAN_PROMPT = 161.31
MEAN_ANSWER = 337.99
PROMPT_SPREAD = 1.1
ANSWER_SPREAD = 0.8
"""Standard deviations of the logarithms."""

LONGEST = 2048
"""Tokens; longer prompts or answers are drawn again (the paper's histograms end there)."""

CHARACTERS_PER_TOKEN = 4.0
"""Of English text, where no tokenizer is given to count with."""

_MOST_BYTES = 4 << 30
_LATEST = 1e9  # seconds, for an arrival
Arrivals = Literal["poisson", "bursty", "at-once"]


@dataclass(frozen=True)
class RequestSpec:
    """One request: when it arrives (seconds from the start), the tokens of its prompt and of its answer, both at least 1."""

    arrival: float
    prompt_tokens: int
    answer_tokens: int


def generate_requests(
    count: int, *, rate: float = math.inf, arrivals: Arrivals = "poisson", burstiness: float = 0.25, seed: int = 0, longest: int = LONGEST
) -> list[RequestSpec]:
    """Draw requests.

    Args:
        count: how many.
        rate: requests a second on average; infinite: all arrive at the start.
        arrivals: "poisson": independent of one another; "bursty": gamma-distributed gaps of shape `burstiness` (below 1: in bursts), as
            in vLLM's serving benchmark; "at-once": the rate does not matter.
        longest: most tokens of a prompt, and of an answer.

    Raises:
        UsageError: a count, rate or shape out of range.
    """
    if count < 1 or not rate > 0 or not burstiness > 0 or longest < 1:
        raise UsageError(
            f"{count} requests at {rate:g} a second (burstiness {burstiness:g}, at most {longest} tokens) cannot be drawn.",
            hint="All of these must be above 0.",
        )
    random = np.random.default_rng(seed)
    prompts = _lengths(random, count, MEAN_PROMPT, PROMPT_SPREAD, longest)
    answers = _lengths(random, count, MEAN_ANSWER, ANSWER_SPREAD, longest)
    times = arrival_times(count, rate=rate, arrivals=arrivals, burstiness=burstiness, seed=seed)
    return [RequestSpec(t, int(p), int(a)) for t, p, a in zip(times, prompts, answers, strict=True)]


def arrival_times(count: int, *, rate: float, arrivals: Arrivals, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start, ascending, the first at 0.

    Raises:
        UsageError: the last would come only after 30 years.
    """
    if arrivals == "at-once" or math.isinf(rate):
        return [0.0] * count
    random = np.random.default_rng([seed, 1])
    shape = 1.0 if arrivals == "poisson" else burstiness
    gaps = random.gamma(shape, 1.0 / (rate * shape), count)
    gaps[0] = 0.0
    times = np.cumsum(gaps)
    if not times[-1] < _LATEST:
        raise UsageError(f"At {rate:g} requests a second the last of {count:,} would come only after 30 years.", hint="Give a higher rate.")
    return [float(t) for t in times]


def _lengths(random: np.random.Generator, count: int, mean: float, spread: float, longest: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    lengths = np.empty(0, dtype=np.int64)
    # A log-normal variable's mean is exp(mu + spread^2 / 2).
    mu = math.log(mean) - spread**2 / 2
    while len(lengths) < count:
        drawn = np.maximum(1, np.rint(random.lognormal(mu, spread, 2 * count + 16))).astype(np.int64)
        kept = drawn[drawn <= longest] if longest >= 4 else np.minimum(drawn, longest)  # so few are nearly never drawn
        lengths = np.concatenate([lengths, kept])
    return lengths[:count]


def load_requests(
    path: Path,
    *,
    rate: float = math.inf,
    arrivals: Arrivals = "poisson",
    burstiness: float = 0.25,
    seed: int = 0,
    count: int | None = None,
    longest: int | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> list[RequestSpec]:
    """Requests of a file: JSON lines with `prompt_tokens`, `answer_tokens` and, if known, `arrival`; or a ShareGPT JSON of conversations.

    Where the file has no arrivals they are drawn as in `generate_requests`.

    Args:
        count: at most so many: of requests with arrivals the first ones, of others some that are drawn.
        longest: leave out what has a prompt or an answer of more tokens.
        note: told what was left out.

    Raises:
        NotFoundError: no such file.
        UsageError: it is neither kind, or a value is out of range; names the line or conversation. Or it says when requests come, and a
            rate does, too.
    """
    text = _read(path)
    if text.lstrip().startswith("["):
        lengths: list[tuple[float | None, int, int]] = [(None, p, a) for p, a in _sharegpt(text, path)]
    else:
        lengths = list(_lines(text, path))
    if not lengths:
        raise UsageError(f"{path} holds no request.", hint="Each needs a prompt and an answer.")
    timed = sum(arrival is not None for arrival, _, _ in lengths)
    if 0 < timed < len(lengths):
        raise UsageError(f"{timed} of {len(lengths)} requests of {path} say when they arrive; either all or none must.")
    if timed and math.isfinite(rate):
        raise UsageError(f"{path} says when its requests arrive, so a rate means nothing.", hint="Leave --rate away.")
    if longest is not None:
        kept = [row for row in lengths if max(row[1:]) <= longest]
        if not kept:
            raise UsageError(f"No request of {path} keeps within {longest:,} tokens.", hint="Give a larger --longest.")
        if len(kept) < len(lengths):
            note(f"{len(lengths) - len(kept):,} of {len(lengths):,} requests are longer than {longest:,} tokens and are left out.")
        lengths = kept
    if timed:
        specs = [RequestSpec(float(arrival or 0.0), p, a) for arrival, p, a in lengths]
        return sorted(specs, key=lambda spec: spec.arrival)[:count]
    if count is not None and count < len(lengths):
        chosen = np.random.default_rng([seed, 4]).choice(len(lengths), count, replace=False)
        lengths = [lengths[index] for index in sorted(chosen.tolist())]
    times = arrival_times(len(lengths), rate=rate, arrivals=arrivals, burstiness=burstiness, seed=seed)
    return [RequestSpec(t, p, a) for t, (_, p, a) in zip(times, lengths, strict=True)]


def _read(path: Path) -> str:
    hint = "Give a JSON-lines file of lengths or a ShareGPT JSON."
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):  # devices never end; pipes are how shells hand programs' output over
            raise UsageError(f"{path} is {'a folder' if stat.S_ISDIR(mode) else 'no file'}.", hint=hint)
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise UsageError(f"{path} is larger than {_MOST_BYTES >> 30} GiB.", hint="Give a part of it.")
        return content.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise NotFoundError(f"There is no file {path}.", hint=hint) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text in UTF-8.", hint=hint) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.", hint=hint) from error


def _lines(text: str, path: Path) -> Iterator[tuple[float | None, int, int]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"Line {number} of {path} is not JSON.", hint='One line: {"prompt_tokens": 200, "answer_tokens": 300}'
            ) from error
        if not isinstance(row, dict):
            raise UsageError(f"Line {number} of {path} is not an object.", hint='One line: {"prompt_tokens": 200, "answer_tokens": 300}')
        arrival = row.get("arrival")
        if arrival is not None and not (isinstance(arrival, int | float) and not isinstance(arrival, bool) and 0 <= arrival < _LATEST):
            raise UsageError(f"Line {number} of {path}: arrival must be seconds from the start, not {reprlib.repr(arrival)}.")
        yield (arrival, _count(row, "prompt_tokens", number, path), _count(row, "answer_tokens", number, path))


def _count(row: dict[str, Any], name: str, number: int, path: Path) -> int:
    if name not in row:
        raise UsageError(f"Line {number} of {path} has no {name}.", hint='One line: {"prompt_tokens": 200, "answer_tokens": 300}')
    value = row[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 24:
        raise UsageError(f"Line {number} of {path}: {name} must be a whole number from 1 to 16,777,216, not {reprlib.repr(value)}.")
    return value


def _sharegpt(text: str, path: Path) -> Iterable[tuple[int, int]]:
    """First exchange of every conversation, as serving benchmarks use the data set."""
    try:
        conversations = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON.", hint="Give a JSON-lines file of lengths or a ShareGPT JSON.") from error
    for conversation in conversations:
        turns = conversation.get("conversations", conversation.get("conversation")) if isinstance(conversation, dict) else None
        if not isinstance(turns, list) or len(turns) < 2:
            continue
        words = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
        if all(isinstance(word, str) and word for word in words):
            prompt, answer = (max(1, round(len(str(word)) / CHARACTERS_PER_TOKEN)) for word in words)
            yield prompt, answer
