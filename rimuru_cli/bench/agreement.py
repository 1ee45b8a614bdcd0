"""How far an engine's answers in bfloat16 are from the CPU's in float32, token by token of the same text.

The CPU answers each prompt greedily. The other engine then computes the same answers: it runs as always, prompt and then token after token,
but its every choice is replaced by the CPU's, so that both see the same text to the end and one early difference is counted once. Where an
answer has no difference at all, both would have written the same answer by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rimuru_cli.bench.gpu_only import require_gpu
from rimuru_cli.bench.looking_on import watched
from rimuru_cli.bench.prompts import prompt_ids
from rimuru_cli.bench.yardstick import check_transformers, load_transformers
from rimuru_cli.engine.config import Device, EngineConfig
from rimuru_cli.engine.device.runner import DeviceRunner
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.loading import load_parts
from rimuru_cli.engine.model_runner import ModelRunner
from rimuru_cli.engine.request import SamplingParams
from rimuru_cli.engine.scheduler import ScheduledRows
from rimuru_models.errors import UsageError

Progress = Callable[[str, int, int], None]
JUDGED: dict[str, Device] = {"cuda": "cuda", "emulated": "emulated"}


@dataclass(frozen=True)
class Tolerance:
    """What counts as the same model, computed in bfloat16. The defaults are for the demonstration model.

    That model is the hardest that we know: every token uses 20 of 32 experts whose router logits lie close together, so that any rounding
    at all exchanges experts somewhere in its 30 layers. Float32 in another order of operations moves its logits by 1 % of their spread.
    transformers in bfloat16, which nobody here wrote, is 0.865, 0.073 and 0.24 away from float32 in the first three figures below. The
    limits are tighter than that: an engine must lose less than the format costs there, and they are missed as soon as the routers' logits,
    say, are rounded too.

    Attributes:
        top1: least share of positions with the same most likely token.
        kl: most mean Kullback-Leibler divergence from the reference's distribution, in nats.
        logit_delta: most mean |Δlogit|, as a share of the logits' own standard deviation over the vocabulary.
        margin: most by which the reference prefers its token where the other engine chose another, in the same unit. It is far below the
            distance of the first token from an average one (about 5): where the reference is sure, there must be no difference.
    """

    top1: float = 0.875
    kl: float = 0.055
    logit_delta: float = 0.20
    margin: float = 1.0


@dataclass
class Answers:
    """What the reference wrote: for each prompt the answer's token ids, and the logits float32 [n, vocab] each was chosen from."""

    prompts: list[list[int]]
    ids: list[list[int]]
    logits: list[Tensor]


@dataclass
class Comparison:
    """Sums over the positions that were compared."""

    positions: int = 0
    same: int = 0
    answers: int = 0
    same_answers: int = 0
    delta: float = 0.0
    relative_delta: float = 0.0
    largest_delta: float = 0.0
    kl: float = 0.0
    largest_kl: float = 0.0
    margins: list[float] = field(default_factory=list)

    def add_answer(self, want: Tensor, got: Tensor) -> None:
        """Compare one answer's logits, [n, vocab] each."""
        want, got = want.double(), got.double()
        spread = want.std(-1)
        delta = (got - want).abs()
        logp = want.log_softmax(-1)
        kl = (logp.exp() * (logp - got.log_softmax(-1))).sum(-1)
        best, other = want.max(-1).indices, got.max(-1).indices
        same = best == other
        gap = (want.gather(-1, best[:, None]) - want.gather(-1, other[:, None]))[:, 0] / spread
        self.positions += len(want)
        self.same += int(same.sum())
        self.answers += 1
        self.same_answers += int(same.all())
        self.delta += float(delta.mean(-1).sum())
        self.relative_delta += float((delta.mean(-1) / spread).sum())
        self.largest_delta = max(self.largest_delta, float(delta.max()))
        self.kl += float(kl.sum())
        self.largest_kl = max(self.largest_kl, float(kl.max()))
        self.margins += gap[~same].tolist()

    def row(self, name: str) -> dict[str, Any]:
        """The means, JSON-able."""
        count = max(1, self.positions)
        return {
            "engine": name,
            "positions": self.positions,
            "top1_agreement": round(self.same / count, 5),
            "same_answers": self.same_answers,
            "mean_logit_delta": round(self.delta / count, 5),
            "relative_logit_delta": round(self.relative_delta / count, 5),
            "largest_logit_delta": round(self.largest_delta, 4),
            "mean_kl": round(self.kl / count, 7),
            "largest_kl": round(self.largest_kl, 5),
            "largest_margin": round(max(self.margins, default=0.0), 5),
        }


class Dictation:
    """Writes down the logits of every position that a runner computes from now on, and may tell it what to choose there.

    Attributes:
        dictated: answers by request id; requests that are not in it choose for themselves.
        written: logits [vocab] of a request's positions, by request id.
    """

    def __init__(self, runner: ModelRunner | DeviceRunner) -> None:
        self._forward = runner.forward
        self.dictated: dict[int, list[int]] = {}
        self.written: dict[int, list[Tensor]] = {}
        setattr(runner, "forward", self.forward)  # noqa: B010

    def forward(self, plan: Sequence[ScheduledRows]) -> Tensor | None:
        """As the runner's, with a dictated row's token far above all others."""
        logits = self._forward(plan)
        if logits is None:
            return None
        sampling = [rows.sequence for rows in plan if rows.samples]
        for row, sequence in zip(logits, sampling, strict=True):
            request = sequence.request
            place = len(sequence.tokens) - len(request.prompt_ids)
            written = self.written.setdefault(request.id, [])
            assert place == len(written), "every position is sampled once and in order"
            written.append(row.cpu().clone())
            if request.id in self.dictated:
                token = self.dictated[request.id][place]
                row[token] = row.max().abs() * 2 + 1
        return logits


def run_agreement_bench(
    model_dir: Path,
    *,
    device: str = "cuda",
    prompts: int | None = None,
    tokens: int = 64,
    residency: float | None = None,
    versus: str | None = None,
    tolerance: Tolerance = Tolerance(),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compare an engine with the CPU engine in float32 over the prompts of `prompt_mix`.

    Args:
        device: of the engine that is judged: "cuda", or "emulated" (the GPU's way, in the checkpoint's dtype, with the reference ops).
        prompts: how many of the prompts; None: all.
        tokens: most tokens of an answer.
        residency: share of experts resident in the judged engine; None: as the engine chooses.
        versus: "transformers": also judge transformers in bfloat16 (on the CPU), the yardstick for what the format itself costs.

    Returns:
        JSON-able dict: settings, `rows` (see Comparison.row), `tolerance`, `exceeded` (names of what the judged engine exceeds).

    Raises:
        DoesNotFitError: no GPU for "cuda".
        UsageError: an unknown device or peer.
    """
    if device not in JUDGED:
        raise UsageError(f"{device!r} cannot be judged.", hint=f"--device is one of {', '.join(JUDGED)}.")
    if versus not in (None, "transformers"):
        raise UsageError(f"{versus!r} cannot be compared with.", hint="--vs takes transformers.")
    if device == "cuda":
        require_gpu("Judging the GPU's answers", "`rimuru bench agreement --device emulated` takes the GPU's way on the CPU.")
    if versus == "transformers":
        check_transformers()
    report = progress or (lambda stage, done, total: None)
    texts = prompt_ids(model_dir, prompts)
    answers = reference_answers(model_dir, texts, tokens, report)
    config = EngineConfig(device=JUDGED[device], resident_share=residency)
    rows = [dictated_answers(model_dir, config, answers, report).row(device)]
    if versus == "transformers":
        rows.append(transformers_answers(model_dir, answers, report).row("transformers, bfloat16"))
    return {
        "bench": "agreement",
        "model": model_dir.name,
        "reference": "cpu, float32",
        "prompts": len(texts),
        "tokens": tokens,
        "residency": residency,
        "rows": rows,
        "tolerance": asdict(tolerance),
        "exceeded": exceeded(rows[0], tolerance),
    }


def exceeded(row: dict[str, Any], tolerance: Tolerance) -> list[str]:
    """Names of the figures of a row that lie outside the tolerance; NaN always does."""
    within = {
        "top1_agreement": row["top1_agreement"] >= tolerance.top1,
        "mean_kl": row["mean_kl"] <= tolerance.kl,
        "relative_logit_delta": row["relative_logit_delta"] <= tolerance.logit_delta,
        "largest_margin": row["largest_margin"] <= tolerance.margin,
    }
    return [name for name, good in within.items() if not good or math.isnan(row[name])]


def reference_answers(model_dir: Path, prompts: Sequence[Sequence[int]], tokens: int, progress: Progress) -> Answers:
    """Greedy answers of the CPU engine in float32, up to the model's own end of answer or `tokens`."""
    answers = Answers([list(prompt) for prompt in prompts], [], [])
    parts = load_parts(model_dir, EngineConfig(device="cpu"), None)
    dictation = Dictation(parts.runner)
    with watched(Engine(parts, EngineConfig(device="cpu"))) as engine:
        for done, prompt in enumerate(answers.prompts):
            request = engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=tokens))
            _finish(engine)
            logits = torch.stack(dictation.written.pop(request.id))
            # What was chosen at each position, the end of the answer included.
            answers.ids.append(logits.max(-1).indices.tolist())
            answers.logits.append(logits)
            progress("answers in float32", done + 1, len(answers.prompts))
    return answers


def dictated_answers(model_dir: Path, config: EngineConfig, answers: Answers, progress: Progress) -> Comparison:
    """The same answers by another engine. Half of the prompts come one by one, the others together, so that batches are judged too."""
    comparison = Comparison()
    parts = load_parts(model_dir, config, None)
    dictation = Dictation(parts.runner)
    with watched(Engine(parts, config)) as engine:
        half = len(answers.prompts) // 2
        groups = [[index] for index in range(half)] + [list(range(half, len(answers.prompts)))]
        for group in groups:
            requests = []
            for index in group:
                params = SamplingParams(temperature=0.0, max_tokens=len(answers.ids[index]), ignore_eos=True)
                request = engine.submit(answers.prompts[index], params)
                dictation.dictated[request.id] = answers.ids[index]
                requests.append((index, request))
            _finish(engine)
            for index, request in requests:
                assert request.output_ids == answers.ids[index][: len(request.output_ids)], "what was dictated was written"
                # Shorter than the answer only where this engine's context ends sooner.
                got = torch.stack(dictation.written.pop(request.id))
                comparison.add_answer(answers.logits[index][: len(got)], got)
                progress(f"answers in {config.device}", comparison.answers, len(answers.prompts))
    return comparison


def _finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def transformers_answers(model_dir: Path, answers: Answers, progress: Progress) -> Comparison:
    """The same answers by transformers in bfloat16 on the CPU, one pass a text."""
    model = load_transformers(model_dir, torch.bfloat16)
    comparison = Comparison()
    with torch.inference_mode():
        for prompt, ids, want in zip(answers.prompts, answers.ids, answers.logits, strict=True):
            logits = model(torch.tensor([prompt + ids[:-1]])).logits[0, len(prompt) - 1 :]
            comparison.add_answer(want, logits.float())
            progress("answers in transformers", comparison.answers, len(answers.prompts))
    return comparison
