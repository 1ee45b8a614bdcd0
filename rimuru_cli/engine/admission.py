"""Whether a sequence is worth the experts that have to leave for it. Pure functions.

The paper's adjuster retires experts whenever a sequence needs pages (`eager`). Where many sequences run, a step uses nearly all experts, so
an absent one is brought over the link in every step. With B sequences and steps of T seconds, a sequence that displaces h experts of
e seconds each is worth it as long as B / T >= (B - 1) / (T - h e), that is

    B h e <= T        (`paced`)

Otherwise it waits until pages come free by themselves, or the youngest is computed later instead. Few sequences never wait for that: how
long somebody waits for an answer counts more there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PACED_FROM = 8
"""With fewer running sequences everybody is admitted."""


@dataclass(frozen=True)
class AdmissionStats:
    """What one decision is based on.

    Attributes:
        running: B, sequences that run.
        displaced: h, experts whose pages the sequence takes and that would be resident otherwise; need not be whole.
        expert_seconds: e, what an absent expert costs a step on average; 0 where nothing is brought.
        step_seconds: T of recent steps without prompts; None before the first.
    """

    running: int
    displaced: float
    expert_seconds: float
    step_seconds: float | None


AdmissionPolicy = Callable[[AdmissionStats], bool]


def eager(stats: AdmissionStats) -> bool:
    """Everybody, as long as the experts' floor allows it: the paper's rule."""
    return True


def paced(stats: AdmissionStats) -> bool:
    """Those who make the whole faster; see the module's text."""
    if stats.running < PACED_FROM or stats.expert_seconds == 0.0:
        return True
    return stats.step_seconds is not None and stats.running * stats.displaced * stats.expert_seconds <= stats.step_seconds
