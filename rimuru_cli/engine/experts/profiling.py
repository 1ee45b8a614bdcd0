"""Recording a hotset profile: run text, write down what the routers chose, and test the profile on text it has not seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.experts.coverage import SHARES, RoutingTrace, coverage
from rimuru_cli.engine.experts.hotset import HotsetProfile, save_profile
from rimuru_cli.engine.request import SamplingParams
from rimuru_models.errors import UsageError

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class HotsetReport:
    """What was recorded, where the profile lies, and what it is worth.

    Attributes:
        coverage: one row per share of experts held, measured on the held-out part: share, uniform, lru, profile, live, oracle.
    """

    profile_path: Path
    profile: HotsetProfile
    prompts: int
    profile_tokens: int
    held_out_tokens: int
    coverage: tuple[dict[str, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able summary (the orderings themselves are in the profile file)."""
        return {
            "profile": str(self.profile_path),
            "model": self.profile.model,
            "identity": self.profile.identity,
            "created": self.profile.created,
            "prompts": self.prompts,
            "profile_tokens": self.profile_tokens,
            "held_out_tokens": self.held_out_tokens,
            "coverage": [dict(row) for row in self.coverage],
        }


def profile_hotset(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    identity: str,
    output: Path,
    split: float = 0.5,
    generate_tokens: int = 64,
    progress: Progress | None = None,
) -> HotsetReport:
    """Run `prompts` (token ids), record the routing of prompts and answers, write the profile of one part and test it on the rest.

    Args:
        engine: an idle engine.
        identity: the model's identity, which the profile is bound to.
        output: file to write.
        split: share of the prompts that make the profile; the others are held out.
        generate_tokens: tokens to generate after each prompt (greedily, with the model's end-of-answer token); 0 records prompts only.

    Raises:
        UsageError: fewer than two prompts with tokens, or a split that leaves one part empty.
    """
    usable = [list(p) for p in prompts if len(p)]
    chosen = [int((i + 1) * split) > int(i * split) for i in range(len(usable))]
    if not 0.0 < split < 1.0 or all(chosen) or not any(chosen):
        raise UsageError(
            f"{len(usable)} prompts cannot be divided into a profile and a held-out part at {split:g}.",
            hint="Give at least two prompts and a --split between 0 and 1.",
        )
    report = progress or (lambda stage, done, total: None)
    parts: dict[bool, list[RoutingTrace]] = {True: [], False: []}
    for index, prompt in enumerate(usable):
        parts[chosen[index]].append(record_routing(engine, prompt, generate_tokens))
        report("routing", index + 1, len(usable))
    fitted, held_out = _join(parts[True]), _join(parts[False])
    profile = HotsetProfile(
        identity=identity,
        model=engine.info.model,
        top_k=engine.info.top_k,
        tokens=fitted.tokens,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        probabilities=fitted.probabilities(),
    )
    rows = []
    for index, share in enumerate(SHARES):
        rows.append({"share": share, **coverage(held_out, profile.probabilities, share)})
        report("held-out coverage", index + 1, len(SHARES))
    save_profile(profile, output)
    return HotsetReport(output, profile, len(usable), fitted.tokens, held_out.tokens, tuple(rows))


def record_routing(engine: Engine, prompt: Sequence[int], generate_tokens: int) -> RoutingTrace:
    """Run one prompt (cut to the context) and return what the routers chose for its tokens and those of the answer."""
    num_layers, top_k = engine.info.num_moe_layers, engine.info.top_k
    room = engine.info.context_limit - max(1, generate_tokens)
    experts: list[list[Tensor]] = [[] for _ in range(num_layers)]
    weights: list[list[Tensor]] = [[] for _ in range(num_layers)]

    def record(layer: int, topk_ids: Tensor, topk_weights: Tensor) -> None:
        experts[layer].append(topk_ids.clone())
        weights[layer].append(topk_weights.double())

    with engine.recording(record):
        params = SamplingParams(temperature=0.0, max_tokens=max(1, generate_tokens))
        for _ in engine.generate(list(prompt)[: max(1, room)], params):
            pass
    ids = torch.stack([torch.cat(rows) for rows in experts], dim=1).numpy()
    values = torch.stack([torch.cat(rows) for rows in weights], dim=1).numpy()
    assert ids.shape[1:] == (num_layers, top_k)
    return RoutingTrace(ids, values, engine.info.num_experts)


def _join(traces: Sequence[RoutingTrace]) -> RoutingTrace:
    experts = np.concatenate([t.experts for t in traces])
    return RoutingTrace(experts, np.concatenate([t.weights for t in traces]), traces[0].num_experts)
