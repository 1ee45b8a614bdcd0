"""Whether a model fits this machine, as the hub's other parts get to know it: the question and the answer, without the arithmetic.

The memory arithmetic is the engine's own, and the hub does not import the engine. So `rimuru_cli.fit.check_fit`, which stands to the
right of both, does the work, and a command hands it to whatever part of the hub wants to ask before the first byte of a download:

    from rimuru_cli.fit import check_fit    # in commands/…; imports neither torch nor huggingface_hub
    download(…, check_fit=check_fit)        # in hub/…: parameter `check_fit: FitCheck`
    verdict = check_fit("org/name", config, index)
    if not verdict.runs: …                  # say verdict.problem and verdict.hint; verdict.exit_code is 6
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rimuru_models.config import ModelConfig
from rimuru_models.index import CheckpointIndex

DOES_NOT_FIT = 6
"""Exit code of a model that does not fit."""


@dataclass(frozen=True)
class FitVerdict:
    """Whether a model runs on a machine, in words and numbers.

    Attributes:
        runs: whether it does.
        device: what it would compute on; None when it does not run.
        headline: one line for people, whether it runs or not, without a final full stop: "runs on the GPU (NVIDIA GeForce RTX 4090):
            36 % of its experts stay on the card, about 40 to 110 tokens/s".
        problem: why it does not run, in one sentence; None when it does.
        hint: what to type or change about that; None when it runs or nothing helps.
        report: everything that `rimuru fit --json` prints; JSON-able, sizes in bytes, rates in tokens or decimal GB per second.
    """

    runs: bool
    device: Literal["gpu", "cpu"] | None
    headline: str
    problem: str | None
    hint: str | None
    report: dict[str, Any]

    @property
    def exit_code(self) -> int:
        """0, or 6 when the model does not run here."""
        return 0 if self.runs else DOES_NOT_FIT


class FitCheck(Protocol):
    """Asks about this machine; see `rimuru_cli.fit.check_fit`."""

    def __call__(self, name: str, config: ModelConfig, index: CheckpointIndex | None = None) -> FitVerdict:
        """Whether the model runs here, and about how fast.

        Args:
            name: what to call the model.
            config: its configuration, from a file or the hub.
            index: headers of all shards, from the disk or by Range reads; None: only config.json is known yet, and its weights are taken
                to be stored as config.json says they are (`torch_dtype` is not in `config`: bfloat16 is assumed, and the report says so).

        Returns:
            The verdict. A model that does not fit is an answer, not an error.

        Raises:
            CheckpointError: `index` and `config` contradict each other.
        """
        ...
