"""Words and small pictures for people: the banner, the timings under an answer, the pool. Everything here returns text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rimuru_cli.engine.stats import CEILING_LOWERED
from rimuru_cli.output import bar, format_bytes, format_share

if TYPE_CHECKING:
    from rimuru_cli.engine.request import Timings
    from rimuru_cli.engine.stats import EngineInfo, Snapshot

# One letter a kind in the pool's bar; the order is the order on the screen.
_KINDS = {
    "expert": ("experts", "E"),
    "buffer": ("loading buffers", "B"),
    "kv": ("KV cache", "K"),
    "ssm": ("SSM states", "S"),
    "conv": ("conv rows", "C"),
}


def banner(info: EngineInfo, snapshot: Snapshot) -> list[str]:
    """What was loaded and how it runs: the lines above the first prompt, without the notices."""
    parts = f"pool {format_bytes(info.pool_bytes)}, dense {format_bytes(info.dense_bytes)}"
    resident = f"{snapshot.resident_experts:,} of {snapshot.total_experts:,} experts resident ({format_share(snapshot.resident_share)})"
    shape = f"{info.num_layers} layers, {info.num_experts} experts, top-{info.top_k}"
    lines = [
        f"{info.model} · {info.architecture} · {shape} · {info.precision}",
        f"{info.device} ({info.backend_reason}) · context {info.context_limit:,} tokens, KV cache {info.kv_dtype}",
        f"memory {format_bytes(info.memory_bytes)} at most: {parts} · {resident}",
    ]
    if info.profile:
        lines.append(f"expert ranking seeded by {info.profile}")
    return lines


def timings_line(timings: Timings, hit_rate: float | None, snapshot: Snapshot) -> str:
    """One line under an answer: prompt and generation speed, time to first token, expert hit rate, how the pool is divided."""
    prompt = f"prompt {timings.prompt_tokens:,} tok"
    if timings.cached_tokens:
        prompt += f" ({timings.cached_tokens:,} cached)"
    # Not computed_tokens: those of the answer are among them.
    prompt += f" {_rate(timings.prompt_tokens - timings.cached_tokens, timings.prompt_seconds)}"
    # The first token comes out of the prompt's last step, so its time belongs to the prompt.
    answer = f"answer {timings.generated_tokens:,} tok {_rate(timings.generated_tokens - 1, timings.generation_seconds)}"
    parts = [prompt, answer, f"TTFT {timings.ttft_seconds:.2f} s", f"hits {format_share(hit_rate)}", pool_split(snapshot)]
    return "[" + " · ".join(parts) + "]"


def pool_split(snapshot: Snapshot) -> str:
    """How the pool is divided, in one phrase: experts, KV and free."""
    total = snapshot.pool_bytes or 1
    experts = snapshot.bytes_by_kind.get("expert", 0) + snapshot.bytes_by_kind.get("buffer", 0)
    shares = {"experts": experts, "KV": snapshot.bytes_by_kind.get("kv", 0)}
    states = snapshot.bytes_by_kind.get("ssm", 0) + snapshot.bytes_by_kind.get("conv", 0)
    if states:
        shares["states"] = states
    shares["free"] = snapshot.free_bytes
    return "pool " + ", ".join(f"{name} {format_share(num / total)}" for name, num in shares.items())


def pool_lines(snapshot: Snapshot, width: int = 48) -> list[str]:
    """The pool's composition as one bar of letters and one line a kind."""
    total = snapshot.pool_bytes or 1
    amounts = [(name, letter, snapshot.bytes_by_kind.get(kind, 0)) for kind, (name, letter) in _KINDS.items()]
    amounts += [("page tails", "-", snapshot.tail_bytes), ("free", ".", snapshot.free_bytes)]
    amounts = [row for row in amounts if row[2] > 0]
    lines = ["[" + _letters(amounts, total, width) + f"] {format_bytes(snapshot.pool_bytes)}"]
    for name, letter, num_bytes in amounts:
        extra = ""
        if letter == "E":
            extra = f"  {snapshot.resident_experts:,} of {snapshot.total_experts:,} experts"
        if letter == "K" and snapshot.cached_kv_bytes:
            extra = f"  {format_bytes(snapshot.cached_kv_bytes)} of it kept for reuse"
        lines.append(f"  {letter} {name:<16} {format_bytes(num_bytes):>10}  {format_share(num_bytes / total):>5}{extra}")
    lines.append(
        f"  expert hit rate so far {format_share(snapshot.hit_rate)}, read from the checkpoint {format_bytes(snapshot.expert_bytes_read)}"
    )
    if snapshot.states_not_kept:
        times = "once" if snapshot.states_not_kept == 1 else f"{snapshot.states_not_kept:,} times"
        lines.append(f"  {times} there was no room to keep a state to resume from, so more of a prompt that comes again will be read again")
    events = [event for event in snapshot.events if event.reason != CEILING_LOWERED]
    if events:
        shrunk, expanded = sum(event.shrunk for event in events), sum(event.expanded for event in events)
        lines.append(f"  lately the adjuster retired {shrunk} experts for the conversation and took {expanded} in")
    return lines


def memory_lines(info: EngineInfo, snapshot: Snapshot, least_bytes: int) -> list[str]:
    """The memory ceiling, how it is divided, and how far it could be lowered now."""
    rest = info.memory_bytes - info.dense_bytes - info.workspace_bytes - info.pool_bytes
    lines = [
        f"memory ceiling {format_bytes(info.memory_bytes)}; at least {format_bytes(least_bytes)} would do now",
        f"  pool {format_bytes(info.pool_bytes)}, dense weights {format_bytes(info.dense_bytes)}, "
        f"workspace {format_bytes(info.workspace_bytes)}, program and unused {format_bytes(max(0, rest))}",
    ]
    if snapshot.withheld_bytes:
        lines.append(f"  {format_bytes(snapshot.withheld_bytes)} are out of use, but not given back")
    if info.pinned_bytes:
        locked = f"  {format_bytes(info.pinned_bytes)} of experts in page-locked main memory"
        lines.append(locked + (f", {format_bytes(info.mapped_bytes)} on disk" if info.mapped_bytes else ""))
    return lines


def context_line(used_tokens: int, info: EngineInfo) -> str:
    """How full the context is, and the largest possible."""
    share = used_tokens / info.context_limit if info.context_limit else 1.0
    line = f"context [{bar(share, 24)}] {used_tokens:,} of {info.context_limit:,} tokens ({format_share(share)})"
    if info.context_limit < info.model_context:
        line += f"; the model itself could hold {info.model_context:,} with more --memory or a larger --context"
    return line


def _rate(tokens: int, seconds: float) -> str:
    return f"at {tokens / seconds:.1f} tok/s" if tokens > 0 and seconds > 0 else "at - tok/s"


def _letters(amounts: list[tuple[str, str, int]], total: int, width: int) -> str:
    """Round shares to `width` letters so that the ends of the parts, not their lengths, are rounded: the sum is always right."""
    text, reached = "", 0
    for _, letter, num_bytes in amounts:
        reached += num_bytes
        text += letter * (round(reached / total * width) - len(text))
    return text[:width].ljust(width, ".")
