"""What is put down for each sequence once its rows are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rimuru_cli.engine.scheduler import ScheduledRows
from rimuru_cli.engine.sequence import Sequence as TokenSequence
from rimuru_cli.engine.stats import Work


@dataclass
class Clock:
    """When a request was submitted, first scheduled, and given its first token."""

    submitted: float
    started: float | None = None
    first_token: float | None = None


def count_rows(plan: Sequence[ScheduledRows], row_hits: NDArray[np.int64], uses_per_row: int, work: Work) -> None:
    """Count a step.

    Args:
        row_hits: int64 [rows], selections of each row that found their expert resident.
        uses_per_row: selections of each.
    """
    # Sums from the first row on, so that a sequence's hits are a difference: hundreds of small sums would take longer than the step.
    hits = [0, *np.cumsum(row_hits).tolist()]
    start = 0
    for rows in plan:
        sequence, count = rows.sequence, rows.count
        request, end = sequence.request, start + count
        request.expert_uses += count * uses_per_row
        request.expert_hits += hits[end] - hits[start]
        request.timings.computed_tokens += count
        work.add_rows(request.id, count, generating=bool(request.output_ids))
        sequence.computed += count
        start = end


def count_alike(sequence: TokenSequence, steps: int, tokens: Sequence[int], hits: int, *, uses: int) -> None:
    """Count steps of one row for a sequence, the tokens that it got in them, selections, and those that found their expert resident."""
    request, timings = sequence.request, sequence.request.timings
    request.expert_uses += uses
    request.expert_hits += hits
    timings.computed_tokens += steps
    timings.generated_tokens += len(tokens)
    sequence.computed += steps
    sequence.tokens.extend(tokens)
    request.output_ids.extend(tokens)
