"""What quantised weights, or an 8-bit KV cache, do to a model's answers: Kullback-Leibler divergence over a text that both read.

Both engines read the same text; what each expects at every place is compared. A router that hesitates between two experts is thrown the
other way by any rounding at all, that of float32 included, and a model with many near ties then differs by more than its weights do: the
demonstration model is 0.001 nats away from itself with weights changed in the seventh digit, and 0.01 in the fifth. So the judged engine
reads the text twice: once with the experts that the reference chose, which is what the precision costs, and once with its own choice.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from rimuru_cli.bench.agreement import Comparison
from rimuru_cli.bench.gpu_only import require_gpu
from rimuru_cli.bench.looking_on import watched
from rimuru_cli.engine.config import Device, EngineConfig, KVPrecision
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.kv_blocks import Match
from rimuru_cli.engine.loading import load_parts
from rimuru_cli.engine.model_runner import ModelRunner
from rimuru_cli.engine.parts import Parts
from rimuru_cli.engine.request import SamplingParams
from rimuru_cli.engine.tokenizer import Tokenizer
from rimuru_kernels.topk_gating import topk_gating
from rimuru_models.decoder import MoeDecoder
from rimuru_models.errors import DoesNotFitError, NoSpaceError, UsageError
from rimuru_models.interfaces import ForwardContext
from rimuru_models.moe import SparseMoe, router_logits

Progress = Callable[[str, int, int], None]
DEVICES: dict[str, Device] = {"cpu": "cpu", "auto": "auto", "cuda": "cuda", "emulated": "emulated"}
SHIPPED_TEXT = Path(__file__).with_name("yardstick_text.txt")

_WINDOW = 512  # tokens that are read without what came before; at most what the model's context holds
_SHORTEST = 32
_ROWS = 128  # places whose logits are worked on together

Routing = dict[int, Tensor]
"""Experts that a layer chose, int64 [tokens of a window, k], by model layer."""


@dataclass
class _Reading:
    """One window read by one engine: `hidden` [n, d] float of its places, as far as they were computed."""

    hidden: Tensor | None = None
    routing: Routing = field(default_factory=dict)


@dataclass
class _Sums:
    """Comparison and log-likelihoods over all windows."""

    comparison: Comparison = field(default_factory=Comparison)
    judged: float = 0.0
    reference: float = 0.0
    predicted: int = 0

    def add(self, want: Tensor, got: Tensor, following: Sequence[int]) -> None:
        """Logits [n, vocab] of consecutive places, and the tokens that follow there (one fewer at the end of a window)."""
        self.comparison.add_answer(want, got)
        ids = torch.tensor(following, dtype=torch.int64).unsqueeze(-1)
        self.reference -= float(want[: len(ids)].double().log_softmax(-1).gather(-1, ids).sum())
        self.judged -= float(got[: len(ids)].double().log_softmax(-1).gather(-1, ids).sum())
        self.predicted += len(ids)

    def row(self, name: str, routing: str) -> dict[str, Any]:
        """JSON-able figures."""
        row = self.comparison.row(name)
        return {
            "engine": name,
            "experts": routing,
            "positions": row["positions"],
            "mean_kl": row["mean_kl"],
            "largest_kl": row["largest_kl"],
            "top1_agreement": row["top1_agreement"],
            "perplexity": round(math.exp(min(700.0, self.judged / max(1, self.predicted))), 5),
        }

    @property
    def reference_perplexity(self) -> float:
        """Of the reference on the same text."""
        return round(math.exp(min(700.0, self.reference / max(1, self.predicted))), 5)


def run_divergence_bench(
    model_dir: Path,
    *,
    against: Path | None = None,
    kv: KVPrecision = "auto",
    text: str | None = None,
    tokens: int = 1024,
    device: str = "cpu",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compare the model in `against` (or the same model), with a KV cache of `kv`, with the model as its files have it.

    Args:
        against: the judged model; None: the same one.
        text: what both read; None: the text that ships.
        tokens: at most so many tokens of it.
        device: what computes; experts can be dictated on the CPU only.

    Returns:
        JSON-able: `mean_kl` in nats, `top1_agreement`, `perplexity` of the judged engine with the reference's experts (where the
        device allows and the model has the same ones, else with its own), `reference_perplexity`, and `rows` with all figures.

    Raises:
        UsageError: nothing to compare, a text that is too short, models of different vocabularies or tokenizers, or an unknown device.
        DoesNotFitError: of either engine; or no GPU for "cuda".
        CheckpointError: of either engine.
        NoSpaceError: no room for the reference's answers among the temporary files.
    """
    if against is None and kv == "auto":
        raise UsageError("The model would be compared with itself.", hint="Add --quant int4, --kv q8 or --against MODEL.")
    if device not in DEVICES:
        raise UsageError(f"{device!r} cannot compute.", hint=f"--device is one of {', '.join(DEVICES)}.")
    if device == "cuda":
        require_gpu("Comparing on the GPU", "`rimuru bench kl` without --device compares on the CPU.")
    report = progress or (lambda stage, done, total: None)
    judged_dir = against or model_dir
    read = SHIPPED_TEXT.read_text(encoding="utf-8") if text is None else text
    tokenizer = Tokenizer.from_dir(model_dir)
    ids = tokenizer.encode(read, add_special_tokens=True)
    if against is not None and _plain_ids(Tokenizer.from_dir(against), read) != _plain_ids(tokenizer, read):
        raise UsageError(
            f"{against.name} has another tokenizer than {model_dir.name}: its token ids mean other words, so they cannot be compared.",
            hint="Compare a model with a quantised or retrained version of itself.",
        )
    sums = {"the reference's": _Sums(), "its own": _Sums()}
    with tempfile.TemporaryFile() as spool, _saying_full():
        parts, engine = _opened(model_dir, EngineConfig(device=DEVICES[device], context=_WINDOW + 1))
        with engine:
            size, windows = _windows(ids[:tokens], engine.info.context_limit - 1)
            dictates = isinstance(parts.runner, ModelRunner)
            routings: list[Routing] = []
            vocab, shape = parts.model.config.vocab_size, _choices(parts)
            for number, window in enumerate(windows):
                reading = _read(parts, engine, window, record=dictates)
                routings.append(reading.routing)
                _spool(parts, reading, len(window), vocab, spool)
                report("the model reads", number + 1, len(windows))
        parts, engine = _opened(judged_dir, EngineConfig(device=DEVICES[device], context=_WINDOW + 1, kv=kv))
        with engine:
            if not dictates or _choices(parts) != shape:
                del sums["the reference's"]  # of another model's experts nothing can be said
            if parts.model.config.vocab_size != vocab:
                raise UsageError(f"{judged_dir.name} has another vocabulary than {model_dir.name}, so they cannot be compared.")
            if engine.info.context_limit <= size:
                raise DoesNotFitError(f"{judged_dir.name} has room for {engine.info.context_limit} tokens; {size + 1} are needed.")
            for place, (routing, total) in enumerate(sums.items()):
                spool.seek(0)
                for number, window in enumerate(windows):
                    dictated = routings[number] if routing == "the reference's" else None
                    reading = _read(parts, engine, window, dictated=dictated)
                    _compare(parts, reading, window, vocab, spool, total)
                    report("what is judged reads", place * len(windows) + number + 1, len(windows) * len(sums))
        precision = f"{engine.info.weight_dtype}, KV {engine.info.kv_dtype}"
    rows = [total.row(judged_dir.name, routing) for routing, total in sums.items()]
    return {
        "bench": "kl",
        "model": model_dir.name,
        "judged": judged_dir.name,
        "judged_precision": precision,
        "device": device,
        "text": "the text that ships" if text is None else "the user's",
        "tokens": sum(map(len, windows)),
        "window": size,
        "mean_kl": rows[0]["mean_kl"],
        "mean_kl_own_experts": rows[-1]["mean_kl"],
        "top1_agreement": rows[0]["top1_agreement"],
        "perplexity": rows[0]["perplexity"],
        "reference_perplexity": next(iter(sums.values())).reference_perplexity,
        "rows": rows,
    }


def _windows(ids: Sequence[int], context: int) -> tuple[int, list[Sequence[int]]]:
    """Tokens a window, and the windows; a last one that is very short is left out.

    Raises:
        UsageError: the text is too short.
    """
    size = min(_WINDOW, context)
    windows = [ids[start : start + size] for start in range(0, len(ids), size)]
    if len(windows) > 1 and len(windows[-1]) < _SHORTEST:
        windows.pop()
    if not windows or len(windows[0]) < 2:
        raise UsageError(f"A text of {len(ids)} tokens is too short to compare anything.", hint="Give a longer one with --text.")
    return size, windows


def _plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Without what some files put before a text, and others of the same model do not."""
    return tokenizer.encode(text, add_special_tokens=False)


def _choices(parts: Parts) -> tuple[object, ...]:
    """What has to be alike for one model's experts to be another's."""
    config = parts.model.config
    return config.moe_layers, config.num_experts, config.top_k


def _opened(model_dir: Path, config: EngineConfig) -> tuple[Parts, Engine]:
    parts = load_parts(model_dir, config, None)
    # Every window is read whole, also one that begins like another.
    parts.blocks.match = lambda tokens: Match([], None, 0)  # type: ignore[method-assign]
    return parts, watched(Engine(parts, config))


def _read(parts: Parts, engine: Engine, window: Sequence[int], *, record: bool = False, dictated: Routing | None = None) -> _Reading:
    """Let an engine read a window; `record`: write down the routing; `dictated`: the experts that it is to use."""
    reading = _Reading()
    with _observed(parts, reading, len(window), record, dictated):
        engine.submit(window, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        while engine.has_work:
            engine.step()
    return reading


@contextmanager
def _observed(parts: Parts, reading: _Reading, length: int, record: bool, dictated: Routing | None) -> Iterator[None]:
    """Look over the model's shoulder while it reads one text of `length` tokens."""
    model = parts.model
    forward, positions = model.forward, torch.empty(0, dtype=torch.int64)

    def observe(token_ids: Tensor, context: ForwardContext) -> Tensor:
        nonlocal positions
        positions = context.positions.to("cpu", torch.int64)
        hidden = forward(token_ids, context)
        if reading.hidden is None:
            reading.hidden = hidden.new_full((length, hidden.shape[-1]), math.nan)
        inside = positions < length
        reading.hidden[positions[inside]] = hidden[: len(positions)][inside]
        return hidden

    def route(moe: SparseMoe, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = router_logits(x, moe.router)
        if dictated is None:
            weights, ids = topk_gating(logits, moe.top_k, moe.renormalize)
            if record:
                reading.routing.setdefault(moe.layer, ids.new_zeros(length, ids.shape[1]))[positions] = ids
            return weights, ids
        ids = dictated[moe.layer][positions]
        weights = logits.float().softmax(-1).gather(-1, ids)
        return (weights / weights.sum(-1, keepdim=True) if moe.renormalize else weights), ids

    routers = []
    if record or dictated is not None:
        assert isinstance(model, MoeDecoder), "all models are of this kind"
        routers = [layer.mlp for layer in model.layers if isinstance(layer.mlp, SparseMoe)]
    setattr(model, "forward", observe)  # noqa: B010
    for moe in routers:
        setattr(moe, "route", partial(route, moe))  # noqa: B010
    try:
        yield
    finally:
        del model.forward
        for moe in routers:
            del moe.route


def _spool(parts: Parts, reading: _Reading, length: int, vocab: int, spool: IO[bytes]) -> None:
    """Write the logits of a window to a file: those of a large vocabulary would not fit into memory beside a model."""
    for logits in _logits(parts, reading, length, vocab):
        spool.write(logits.numpy().data.cast("B"))


def _compare(parts: Parts, reading: _Reading, window: Sequence[int], vocab: int, spool: IO[bytes], sums: _Sums) -> None:
    """Compare a window with what the file has next."""
    start = 0
    for got in _logits(parts, reading, len(window), vocab):
        data = bytearray(spool.read(got.numel() * 4))
        want = torch.frombuffer(data, dtype=torch.float32).view(-1, vocab)
        sums.add(want, got, window[start + 1 : start + 1 + len(got)])
        start += len(got)


def _logits(parts: Parts, reading: _Reading, length: int, vocab: int) -> Iterator[Tensor]:
    """Logits float32 [some, vocab] of all places, on the host."""
    assert reading.hidden is not None and not bool(reading.hidden.isnan().any(-1).all()), "a window was read"
    with torch.inference_mode():
        for start in range(0, length, _ROWS):
            yield parts.model.logits(reading.hidden[start : start + _ROWS]).float().cpu().contiguous()


@contextmanager
def _saying_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        import errno

        if error.errno not in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
            raise
        raise NoSpaceError(
            f"There is no room for the model's answers among the temporary files in {tempfile.gettempdir()}.",
            hint="Make room there, or compare fewer --tokens.",
        ) from error
