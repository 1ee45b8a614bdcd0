"""Memory policies by name, as engine settings: nothing here is a special case of the engine.

    static          all experts resident; the rest of the pool is for sequences
    fixed:20%       that share of every layer's experts is absent, always
    elastic         the paper's: experts leave whenever sequences need pages (Algorithm 1)
    paced           as elastic, but only sequences that are worth it are let in (admission `paced`); rimuru's default

All but the last let in whoever finds room (admission `eager`). Each takes changes behind further colons: no-profile (nothing is known about
experts at the start), no-live (the profile alone ranks them), no-hysteresis (experts come back as soon as pages are free), eol=N (at most N
absent experts a layer), paced (static and fixed: with the default's admission, which shows what elasticity adds to it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from rimuru_cli.engine.admission import eager, paced
from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.experts.adjuster import AdjusterConstants, decide, hold
from rimuru_models.config import ModelConfig
from rimuru_models.errors import UsageError

KINDS = ("static", "fixed", "elastic", "paced")
SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Absent shares that `fixed` without one stands for."""

_HINT = "For example: static, fixed, fixed:20%, elastic, paced, elastic:no-live, paced:eol=12, static:paced."


@dataclass(frozen=True)
class Policy:
    """One way to divide memory.

    Attributes:
        kind: of KINDS.
        share: absent experts of each layer, between 0 and 1, for "fixed".
        profiled, live, hysteresis: whether these are on.
        eol: most absent experts of a layer; None: only the floor counts.
        admission: whether `paced` decides who is let in, for "static" and "fixed".
    """

    kind: str
    share: float | None = None
    profiled: bool = True
    live: bool = True
    hysteresis: bool = True
    eol: int | None = None
    admission: bool = False

    @property
    def name(self) -> str:
        """As it is typed."""
        parts = [self.kind] + ([] if self.share is None else [f"{100 * self.share:g}%"])
        off = {"no-profile": self.profiled, "no-live": self.live, "no-hysteresis": self.hysteresis}
        limit = [] if self.eol is None else [f"eol={self.eol}"]
        return ":".join(parts + [word for word, on in off.items() if not on] + limit + (["paced"] if self.admission else []))

    @property
    def plain(self) -> bool:
        """Whether nothing is changed about it."""
        return self == Policy(self.kind, self.share)

    def configure(self, config: EngineConfig, model: ModelConfig) -> EngineConfig:
        """The same settings under this policy.

        Raises:
            UsageError: the limit on absent experts is larger than a layer.
        """
        if self.eol is not None and self.eol > model.num_experts:
            raise UsageError(f"{self.name}: a layer has only {model.num_experts} experts.")
        constants = AdjusterConstants()
        if not self.hysteresis:
            constants = replace(constants, high_free=constants.low_free)
        config = replace(
            config,
            live_ranking=self.live,
            expert_offload_limit=self.eol,
            adjuster=partial(decide, constants=constants),
            admission=paced if self.admission or self.kind == "paced" else eager,
        )
        if self.kind == "static":
            return replace(config, expert_offload_limit=0)
        if self.kind == "fixed":
            assert self.share is not None
            limit = round(self.share * model.num_experts)
            return replace(config, expert_offload_limit=limit, fixed_residents=True, adjuster=hold)
        return config


def parse_policies(text: str) -> list[Policy]:
    """The policies that one word stands for; several for "fixed" without a share.

    Raises:
        UsageError: it is none.
    """
    kind, *changes = (part.strip().lower() for part in text.split(":"))
    if kind not in KINDS:
        raise UsageError(f"There is no memory policy {text!r}.", hint=_HINT)
    share = None
    if kind == "fixed" and changes and changes[0].endswith("%"):
        share = _share(changes.pop(0), text)
    policy = Policy(kind, share)
    for change in changes:
        if change == "no-profile":
            policy = replace(policy, profiled=False)
        elif change == "no-live":
            policy = replace(policy, live=False)
        elif change == "no-hysteresis":
            policy = replace(policy, hysteresis=False)
        elif change == "paced" and kind in ("static", "fixed"):
            policy = replace(policy, admission=True)
        elif change.startswith("eol=") and change[4:].isascii() and change[4:].isdigit() and kind in ("elastic", "paced"):
            policy = replace(policy, eol=int(change[4:]))
        else:
            raise UsageError(f"{text!r}: {change!r} does not change {kind}.", hint=_HINT)
    if kind == "fixed" and share is None:
        return [replace(policy, share=share) for share in SHARES]
    return [policy]


def _share(word: str, text: str) -> float:
    try:
        percent = float(word[:-1])
    except ValueError as error:
        raise UsageError(f"{text!r}: {word!r} is no share.", hint=_HINT) from error
    if not 0 < percent < 100:
        raise UsageError(f"{text!r}: the share must lie between 0% and 100%.", hint=_HINT)
    return percent / 100
