"""Logits to tokens. Semantics and order of transformers' logits processors:

    repetition, presence, frequency penalty -> temperature -> top-k -> top-p -> min-p -> draw

Repetition penalty: CTRL (arXiv 1909.05858), over prompt and answer. Presence and frequency: logit - presence·[n > 0] - frequency·n with n
the number of times the token was generated (OpenAI API reference). Min-p: arXiv 2407.01082.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from rimuru_cli.engine.request import SamplingParams
from rimuru_models.errors import CheckpointError

GREEDY_BELOW = 1e-5  # temperatures this small only overflow; they mean greedy
_FIRST_CANDIDATES = 256  # nucleus candidates looked at before a full sort


class SamplerState:
    """What sampling remembers about one request: its random numbers and, where penalties need them, its tokens.

    The random numbers belong to the request alone, so its tokens do not depend on what else is in the batch.

    Attributes:
        seed: the seed in use, drawn when params.seed is None.
        greedy: temperature 0.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Iterable[int] = (), *, device: torch.device | str = "cpu") -> None:
        self.params = params
        self.greedy = params.temperature < GREEDY_BELOW
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self._generator: torch.Generator | None = None
        if not self.greedy:
            self._generator = torch.Generator().manual_seed(self.seed % 2**64)
        self._repetition = params.repetition_penalty != 1.0
        self._additive = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self.penalised = self._repetition or self._additive
        # Distinct tokens in order of appearance, with how often each was generated (0: in the prompt only). Grown by doubling.
        self._slot: dict[int, int] = {}
        self._ids = torch.zeros(64, dtype=torch.int64, device=device)
        self._counts = torch.zeros(64, dtype=torch.float32, device=device)
        if self._repetition:
            self._enter(list(dict.fromkeys(prompt_ids)))

    def observe(self, token_id: int) -> None:
        """Record a generated token. `sample` does it for the tokens it returns."""
        if not self.penalised:
            return
        slot = self._slot.get(token_id)
        if slot is None:
            slot = len(self._slot)
            self._enter([token_id])
        self._counts[slot] += 1.0

    def uniform(self) -> float:
        """Next random number of this request, in [0, 1)."""
        assert self._generator is not None
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def penalise(self, logits: Tensor) -> Tensor:
        """Logits [vocab] with this request's penalties, as a new tensor."""
        n = len(self._slot)
        if n == 0:
            return logits
        ids, counts = self._ids[:n], self._counts[:n]
        values = logits[ids]
        if self._repetition:
            p = self.params.repetition_penalty
            values = torch.where(values < 0, values * p, values / p)
        if self._additive:
            values = values - (self.params.frequency_penalty * counts + self.params.presence_penalty * (counts > 0))
        return logits.index_copy(0, ids, values)

    def _enter(self, ids: list[int]) -> None:
        start = len(self._slot)
        need = start + len(ids)
        if need > self._ids.numel():
            room = max(need, 2 * self._ids.numel())
            self._ids = torch.cat([self._ids[:start], self._ids.new_zeros(room - start)])
            self._counts = torch.cat([self._counts[:start], self._counts.new_zeros(room - start)])
        self._ids[start:need] = torch.tensor(ids, dtype=torch.int64, device=self._ids.device)
        self._slot.update((t, start + i) for i, t in enumerate(ids))


# Told the rows' most likely tokens, int64 [R] where the logits are, and where they arrive on the host (float64 [R + 1]).
Meanwhile = Callable[[Tensor, Tensor], None]


def sample(logits: Tensor, states: Sequence[SamplerState], meanwhile: Meanwhile | None = None) -> list[int]:
    """Draw one token a row and record it in the row's state.

    Args:
        logits: [R, vocab] float32, not modified.
        states: R states, row by row.
        meanwhile: called before the host waits for the tokens, if these will be the most likely ones of all rows.

    Returns:
        R token ids. Greedy rows: the highest logit after penalties, the lowest id among equals.

    Raises:
        CheckpointError: a logit is NaN or infinite.
    """
    assert logits.dim() == 2 and logits.shape[0] == len(states), "one state a row"
    if not states:
        return []
    # One trip to the host for tokens and check together: every wait for a device costs a good part of a small model's step.
    likeliest = _argmax(logits)
    found = torch.cat((likeliest.double(), logits.sum().double().view(1)))
    greedy = all(s.greedy and not s.penalised for s in states)
    arrived = None
    if found.is_cuda:
        here = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        here.copy_(found, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        found = here
    if greedy and meanwhile is not None:
        meanwhile(likeliest, found)
    if arrived is not None:
        arrived.synchronize()
    *best, total = found.tolist()
    # The sum is not finite if any logit is not; the slower second look is for sums of finite logits that overflow.
    if not math.isfinite(total) and not bool(torch.isfinite(logits).all()):
        raise CheckpointError(
            "The model computed values that are not numbers (NaN or infinite logits), so its checkpoint is broken or was damaged.",
            hint="Check the files of the model, or download it again.",
        )
    if greedy:
        return [int(token) for token in best]
    tokens = []
    for row, state in zip(logits, states, strict=True):
        if state.penalised:
            row = state.penalise(row)
        token = int(_argmax(row)) if state.greedy else _draw(row, state)
        state.observe(token)
        tokens.append(token)
    return tokens


def candidates(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """Scaled logits of the tokens that may be drawn.

    Args:
        logits: [vocab], penalties applied.

    Returns:
        (values [n], ids [n] in order of falling value); ids None when nothing was cut off and values are [vocab] in order of id.
        Values are logits / temperature minus a constant (their maximum is 0), so that no temperature overflows.
    """
    scaled = (logits - logits.max()) / params.temperature
    vocab = scaled.numel()
    top_k = params.top_k if 0 < params.top_k < vocab else 0
    if not top_k and params.top_p >= 1.0 and params.min_p <= 0.0:
        return scaled, None
    if top_k:
        # Tokens as likely as the last of the k stay too.
        kept = torch.nonzero(scaled >= scaled.topk(top_k).values[-1]).view(-1)
        values, order = scaled[kept].sort(descending=True, stable=True)
        ids, log_total = kept[order], values.logsumexp(0)
    else:
        log_total = scaled.logsumexp(0)
        values, ids = _sorted_head(scaled, params, log_total)
    keep = values.numel()
    if params.top_p < 1.0:
        # A token stays if the tokens above it do not reach p yet; the first always stays.
        mass = (values.double() - log_total).exp().cumsum(0)
        keep = min(keep, 1 + int(torch.searchsorted(mass, params.top_p)))
    if params.min_p > 0.0:
        keep = min(keep, max(1, int((values >= math.log(params.min_p)).sum())))
    return values[:keep], ids[:keep]


def _sorted_head(scaled: Tensor, params: SamplingParams, log_total: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely tokens, sorted, enough of them for top_p or min_p to cut: a sort of the whole vocabulary is rarely needed."""
    size = _FIRST_CANDIDATES
    while size < scaled.numel():
        values, ids = scaled.topk(size)
        enough_p = params.top_p < 1.0 and float((values.double() - log_total).exp().sum()) >= params.top_p
        if enough_p or (params.min_p > 0.0 and float(values[-1]) < math.log(params.min_p)):
            return values, ids
        size *= 16
    values, ids = scaled.sort(descending=True, stable=True)
    return values, ids


def _argmax(logits: Tensor) -> Tensor:
    """Index of the highest logit of the last dimension, the lowest among equals (`max` promises it, and is faster than `argmax`)."""
    return logits.max(dim=-1).indices


def _draw(logits: Tensor, state: SamplerState) -> int:
    values, ids = candidates(logits, state.params)
    # Inverse of the cumulative distribution: one random number a token, whatever the size of the vocabulary.
    cumulative = values.double().exp().cumsum(0)
    index = int(torch.searchsorted(cumulative, state.uniform() * float(cumulative[-1]), right=True))
    index = min(index, values.numel() - 1)
    return index if ids is None else int(ids[index])
