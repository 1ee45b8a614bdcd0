"""A routing for shapes of which none was recorded: drawn, with the habits of the one that was.

Long answers, each of a topic of its own, by the model in `bench/workload/routing.py`, whose three numbers were fitted to a routing recorded
on Qwen3-30B-A3B (how often experts of the token before, or of 16 before, come again; what the most used ones take; hits with so many
residents). Always the same for a shape: the seeds are fixed. A token's experts weigh alike.
"""

from __future__ import annotations

import numpy as np
import torch

from rimuru_cli.bench.workload.routing import SyntheticRouting

PROMPT_STEPS = 28
"""As many as in the recording: the first tokens, in which a cache gets to know the topic."""


def drawn_experts(steps: int, layers: int, num_experts: int, top_k: int, *, answers: int = 1, seed: int = 0) -> torch.Tensor:
    """int64 [steps, layers, answers, top_k], ascending in a row: what the routers choose for each token of some answers."""
    routing = SyntheticRouting(layers, num_experts, top_k, seed)
    chosen = np.empty((steps, layers, answers, top_k), dtype=np.int64)
    for answer in range(answers):
        topic = routing.topic_of(answer)
        for step in range(steps):
            _, expert = np.nonzero(routing.draw_each({answer: topic}).touched)
            assert len(expert) == layers * top_k, "every layer chooses so many different experts"
            chosen[step, :, answer] = expert.reshape(layers, top_k)  # in order of layers, and of experts in each
    return torch.from_numpy(chosen)
