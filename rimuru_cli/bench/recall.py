"""How well a layer's experts can be guessed a layer early: the next layer's router, run on this layer's router input.

Between two routers lie only this layer's experts and the next layer's attention, which change the residual stream little; so the next
router sees nearly the same input (the idea of Fate, arXiv 2502.12224), but for the norm before it, whose weights are the layer's own. So
there are two guesses: from the input as it is, and from the input with this layer's norm weights exchanged for the next layer's (which
costs nothing where the quotient is multiplied into the router beforehand).

What a guess is worth depends on what the memory holds anyway: above all the experts of the token before. So those that the token before did
not use are counted on their own, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rimuru_cli.bench.looking_on import watched
from rimuru_cli.bench.prompts import prompt_ids
from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.loading import load_parts
from rimuru_cli.engine.request import SamplingParams
from rimuru_models.decoder import DecoderLayer
from rimuru_models.errors import UsageError
from rimuru_models.interfaces import CausalLM
from rimuru_models.moe import SparseMoe

Progress = Callable[[str, int, int], None]


@dataclass
class Hits:
    """Counts over tokens of one layer: experts used, guessed, and both; `new`: only those that the token before did not use."""

    used: int = 0
    found: int = 0
    repeated: int = 0
    new_used: int = 0
    new_guessed: int = 0
    new_found: int = 0
    tokens: int = 0

    def add(self, used: Tensor, guessed: Tensor) -> None:
        """used, guessed: bool [T, E], tokens of one text in order."""
        self.tokens += len(used)
        self.used += int(used.sum())
        self.found += int((used & guessed).sum())
        before, later, guess = used[:-1], used[1:], guessed[1:]
        self.repeated += int((later & before).sum())
        self.new_used += int((later & ~before).sum())
        self.new_guessed += int((guess & ~before).sum())
        self.new_found += int((later & guess & ~before).sum())

    def figures(self) -> dict[str, float]:
        """Recall of all experts, and recall and precision among the new ones."""
        return {
            "recall": round(self.found / max(1, self.used), 4),
            "new_recall": round(self.new_found / max(1, self.new_used), 4),
            "new_precision": round(self.new_found / max(1, self.new_guessed), 4),
        }

    def token_before(self) -> float:
        """Recall of the experts that the token before used."""
        return round(self.repeated / max(1, self.repeated + self.new_used), 4)


_COUNTS = tuple(field.name for field in fields(Hits))


def run_recall_bench(model_dir: Path, *, prompts: int | None = None, tokens: int = 64, progress: Progress | None = None) -> dict[str, Any]:
    """Recall of the guess for every MoE layer but the first, on the CPU in float32.

    Args:
        prompts: how many prompts of the mix's held-out half (the one that `profile-hotset` does not learn from); None: all.
        tokens: to generate after each prompt; prompt and answer both count.

    Returns:
        JSON-able dict: settings, `chance` (recall of a guess at random) and `rows`, one a layer and their mean: layer, token_before
        (recall of the experts that the token before used), recall, new_recall, new_precision, and the same renormed_.

    Raises:
        UsageError: a model with fewer than two MoE layers has nothing to guess.
    """
    report = progress or (lambda stage, done, total: None)
    texts = prompt_ids(model_dir)[::2][:prompts]
    config = EngineConfig(device="cpu")
    parts = load_parts(model_dir, config, None)
    with watched(Engine(parts, config)) as engine:
        shape = parts.model.config
        if len(shape.moe_layers) < 2:
            raise UsageError(f"{model_dir.name} has {len(shape.moe_layers)} MoE layer; guessing needs two.")
        counts = {layer: (Hits(), Hits()) for layer in shape.moe_layers[1:]}
        for done, prompt in enumerate(texts):
            with _guesses(parts.model) as seen, engine.recording(lambda layer, ids, weights: None):
                for _ in engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=tokens)):
                    pass
            for layer, both in counts.items():
                used, *guesses = (_flags(ids, shape.num_experts) for ids in seen[layer])
                for hits, guessed in zip(both, guesses, strict=True):
                    hits.add(used, guessed)
            report("guesses", done + 1, len(texts))
    rows = [_row(layer, both) for layer, both in counts.items()]
    total = tuple(Hits(*(sum(getattr(both[way], name) for both in counts.values()) for name in _COUNTS)) for way in range(2))
    return {
        "bench": "recall",
        "model": model_dir.name,
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "chance": round(shape.top_k / shape.num_experts, 4),
        "prompts": len(texts),
        "tokens": total[0].tokens // len(rows),
        "rows": [*rows, _row("mean", total)],
    }


def _row(layer: int | str, both: tuple[Hits, ...]) -> dict[str, Any]:
    plain, renormed = both
    return {
        "layer": layer,
        "token_before": plain.token_before(),
        **plain.figures(),
        **{f"renormed_{name}": value for name, value in renormed.figures().items()},
    }


def _flags(ids: list[Tensor], num_experts: int) -> Tensor:
    """ids, pieces of [T, k] -> bool [T, E]."""
    chosen = torch.cat(ids)
    return torch.zeros(len(chosen), num_experts, dtype=torch.bool).scatter_(1, chosen, True)


@contextmanager
def _guesses(model: CausalLM) -> Iterator[dict[int, tuple[list[Tensor], ...]]]:
    """While the block runs: by model layer, the experts its router chose, and its two guesses a MoE layer before, in pieces of [T, k]."""
    layers: list[DecoderLayer] = [layer for layer in getattr(model, "layers") if isinstance(layer.mlp, SparseMoe)]  # noqa: B009
    blocks = [layer.mlp for layer in layers if isinstance(layer.mlp, SparseMoe)]
    seen: dict[int, tuple[list[Tensor], ...]] = {block.layer: ([], [], []) for block in blocks}
    routes = [block.route for block in blocks]

    def watch(index: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        def route(x: Tensor) -> tuple[Tensor, Tensor]:
            weights, ids = routes[index](x)
            seen[blocks[index].layer][0].append(ids.clone())
            if index + 1 < len(blocks):
                # A weight of 0 hides its part of the stream: there is nothing to exchange it for.
                quotient = (layers[index + 1].mlp_norm / layers[index].mlp_norm).nan_to_num(0.0, 0.0, 0.0)
                for place, inputs in enumerate((x, x * quotient), start=1):
                    seen[blocks[index + 1].layer][place].append(routes[index + 1](inputs)[1].clone())
            return weights, ids

        return route

    for index, block in enumerate(blocks):
        setattr(block, "route", watch(index))  # noqa: B010
    try:
        yield seen
    finally:
        for block in blocks:
            del block.route  # the class's own again
