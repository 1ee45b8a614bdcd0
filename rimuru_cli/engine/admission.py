"""Whether one more sequence is worth what it costs the others. Pure functions.

The paper's adjuster retires experts whenever a sequence needs pages (`eager`). Where many sequences run, a step uses nearly all experts, so
an absent one is brought over the link in every step, which takes e seconds. Where B sequences have taken the place of M experts and a step
takes T seconds, one that takes its share of M / B experts is worth it as long as B / T >= (B - 1) / (T - e M / B), that is

    M e <= T        (`paced`)

Otherwise it waits until pages come free by themselves, or the youngest is computed later instead. Few sequences never wait for that: how
long somebody waits for an answer counts more there.

On a device, decode steps of up to so many rows are one captured graph; others are launched operation by operation, which takes many times
as long if the experts are there. Hence two more rules of `paced`:

- More sequences than a graph has rows are let in only if all that could run then make more tokens a second together (`Crowd`).
- Steps with prompts are launched like that, too, so where many run, newcomers come in groups (`Group`). A group of k costs
  C = (seconds of such a step) - T once. With L tokens to go, B sequences free a place every L / B steps; until k are free, half of them
  stand empty for k L / B steps, which costs T / B a place and step. C / k + k L T / (2 B^2) a newcomer is least at k = B sqrt(2 C / (L T)).
  Half of that is waited for: places that are free also let others grow who would be preempted otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

PACED_FROM = 8
"""With fewer running sequences, the one in question included, everybody is admitted."""


@dataclass(frozen=True)
class Crowd:
    """What is known where a sequence would be one more than a captured step has rows.

    Attributes:
        captured_rows: most rows of a captured step; captured_seconds: what such a step takes, or a part of it; None while nothing is known.
        wide_seconds: what a wider step takes (before the first: one with a prompt), and those take in which `reachable` sequences have
            displaced experts; None while that is not known.
        reachable: sequences that would run in wide steps.
    """

    captured_rows: int
    captured_seconds: float | None
    wide_seconds: float | None
    reachable: int

    @property
    def pays(self) -> bool:
        """Whether wide steps make at least as many tokens a second; not as long as nobody knows."""
        if self.captured_seconds is None or self.wide_seconds is None:
            return False
        return self.reachable * self.captured_seconds >= self.captured_rows * self.wide_seconds


@dataclass(frozen=True)
class Group:
    """What is known where a sequence would be the first newcomer of a step.

    Attributes:
        waiting: sequences that want in; room: so many of them would find a place.
        tokens: L, of an average sequence so far: it is in the middle of its answer.
        step_seconds, prompt_seconds: of steps without and with a prompt.
    """

    waiting: int
    room: int
    tokens: float
    step_seconds: float
    prompt_seconds: float

    def is_complete(self, running: int) -> bool:
        """Whether so many find a place that they may come, beside `running` others."""
        extra = max(0.0, self.prompt_seconds - self.step_seconds)
        size = running * math.sqrt(extra / (2.0 * max(1.0, self.tokens) * self.step_seconds))
        return self.room >= min(int(size), self.waiting)


@dataclass(frozen=True)
class AdmissionStats:
    """What one decision is based on.

    Attributes:
        running: B, sequences that run, the one in question included.
        displaces: whether experts have to leave for it.
        taken: M, experts that would fit where there are none: what sequences and buffers hold of the pool, or is free. Need not be whole.
        expert_seconds: e, what an absent expert costs a step on average; 0 where nothing is brought.
        step_seconds: T of recent steps without prompts; None before the first.
        crowd, group: see there; None where the question does not arise.
    """

    running: int
    displaces: bool
    taken: float
    expert_seconds: float
    step_seconds: float | None
    crowd: Crowd | None = None
    group: Group | None = None


AdmissionPolicy = Callable[[AdmissionStats], bool]


def eager(stats: AdmissionStats) -> bool:
    """Everybody, as long as the experts' floor allows it: the paper's rule."""
    return True


def paced(stats: AdmissionStats) -> bool:
    """Those who make the whole faster; see the module's text."""
    if stats.running < PACED_FROM:
        return True
    if stats.crowd is not None and not stats.crowd.pays:
        return False
    if stats.group is not None and not stats.group.is_complete(stats.running - 1):
        return False
    if not stats.displaces or stats.expert_seconds == 0.0:
        return True
    return stats.step_seconds is not None and stats.taken * stats.expert_seconds <= stats.step_seconds
