"""The paper's case study (arXiv 2610.40305): Qwen1.5-MoE-A2.7B on one card of 32 GB, more requests than it can hold.

Known of its setting: the model, the card's memory, chat requests, the link (PCIe 5.0). Assumed by us, because it is not said: `ASSUMED`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rimuru_cli.bench.workload.chart import Line, Panel
from rimuru_cli.bench.workload.policies import SHARES, Policy
from rimuru_cli.bench.workload.requests import RequestSpec, generate_requests
from rimuru_cli.bench.workload.run import Progress, Setting, run_policies
from rimuru_cli.engine.config import EngineConfig
from rimuru_models.errors import UsageError

SHAPE, CEILING = "qwen1.5-moe-a2.7b", 32 << 30
COUNT, LONGEST = 300, 1024
ASSUMED = (
    "all requests are there at the start",
    f"lengths as published of ShareGPT, no prompt and no answer longer than {LONGEST} tokens, every answer generated to its length",
    "all requests may run at once if memory allows it, in steps of at most as many tokens as the longest request has (and 4096)",
    "the ceiling covers everything: weights, cache, workspace, the driver's context",
)
PAPER = {
    "peak_concurrency": {"static": 34, "fixed": 74, "elastic": 90},
    "steps": {"static": 2100, "fixed": 1300, "elastic": 1000},
}
_KINDS = (("experts", "expert"), ("KV cache", "kv"), ("states", "states"), ("free", "free"), ("buffers", "buffer"))
_SWEEP = 6
_TIE = 0.99
"""Limits that reach this share of the best throughput are as good; of those the one that offloads most is taken."""


def run_case_study(setting: Setting, *, count: int = COUNT, limits: bool = False, progress: Progress | None = None) -> dict[str, Any]:
    """Static, every fixed share that fits, elastic and paced on the same requests; and static with paced's admission.

    Args:
        count: requests.
        limits: also sweep the limit on absent experts (`expert_offload_limit`).

    Returns:
        As `run_policies`, and "policies": by kind the figures of each, where "fixed" is the share with the highest throughput; "ratios";
        "assumed"; "paper", what the paper saw, for its model and card; "limits" (rows and "chosen", per policy) if asked for.

    Raises:
        UsageError, DoesNotFitError: as `run_policies`.
    """
    if count < 1:
        raise UsageError("A case study needs at least one request.")
    specs = generate_requests(count, longest=LONGEST, seed=setting.seed)
    fixed = [Policy("fixed", share) for share in SHARES]
    report = run_policies(
        specs, [Policy("static"), *fixed, Policy("elastic"), Policy("paced"), Policy("static", admission=True)], setting, progress=progress
    )
    policies = best_of_kind(report["rows"])
    study = {**report, "case_study": True, "policies": policies, "ratios": ratios(policies), "assumed": list(ASSUMED)}
    if (setting.shape, setting.ceiling) == (SHAPE, CEILING):
        study["paper"] = PAPER
    if limits:
        study["limits"] = {kind: sweep_limits(kind, specs, setting, progress=progress) for kind in ("elastic", "paced")}
    return study


def best_of_kind(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each kind of policy that fits, unchanged, the row with the highest throughput, without its curves."""
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        known = best.get(row["kind"])
        if "error" not in row and row.get("plain", True) and (known is None or row["throughput"] > known["throughput"]):
            best[row["kind"]] = {name: value for name, value in row.items() if name != "curves"}
    return best


def ratios(policies: dict[str, dict[str, Any]]) -> dict[str, float]:
    """What the elastic policies are worth beside the others; only of what fits."""
    found = {}
    for kind in ("elastic", "paced"):
        for other in ("static", "fixed"):
            if kind in policies and other in policies:
                for figure in ("steps", "peak_concurrency", "throughput"):
                    found[f"{kind}_{figure}_of_{other}"] = policies[kind][figure] / policies[other][figure]
    return found


def sweep_limits(kind: str, specs: Sequence[RequestSpec], setting: Setting, *, progress: Progress | None = None) -> dict[str, Any]:
    """How sensitive a policy is to the most experts of a layer that may be absent.

    Returns:
        "rows" as of `run_policies` with "eol"; "chosen": the limit to take for this shape, None: no limit; "default": the engine's own.
    """
    most = setting.model.num_experts
    values = [round(most * step / _SWEEP) for step in range(1, _SWEEP)]
    policies = [Policy(kind, eol=eol) for eol in values] + [Policy(kind)]
    rows = run_policies(specs, policies, setting, progress=progress)["rows"]
    rows = [{**{k: v for k, v in row.items() if k != "curves"}, "eol": eol} for row, eol in zip(rows, [*values, None], strict=True)]
    return {"rows": rows, "chosen": choose_limit(rows), "default": EngineConfig().expert_offload_limit}


def choose_limit(rows: Sequence[dict[str, Any]]) -> int | None:
    """The largest limit whose throughput is within 1 % of the best; None, no limit, counts as the largest."""
    fitting = [row for row in rows if "error" not in row]
    best = max(row["throughput"] for row in fitting)
    good = [row["eol"] for row in fitting if row["throughput"] >= _TIE * best]
    return None if None in good else max(good)


def panels(report: dict[str, Any]) -> list[Panel]:
    """Pictures of a report: requests at once over time and over steps, throughput beside concurrency, and what the pool holds."""
    rows = [row for row in report["rows"] if "error" not in row]
    policies = report.get("policies")
    if policies:
        names = [policies[kind]["policy"] for kind in policies]
        rows = [row for row in rows if row["policy"] in names]
    rows = rows[:6]
    over_time = [Line(row["policy"], row["curves"]["seconds"], row["curves"]["running"]) for row in rows]
    over_steps = [Line(row["policy"], row["curves"]["step"], row["curves"]["running"]) for row in rows]
    answered = [Line(row["policy"], row["curves"]["seconds"], row["curves"]["tokens"]) for row in rows]
    pictures = [
        Panel("Requests at once", "seconds", "requests", over_time),
        Panel("Requests at once", "forward steps", "requests", over_steps),
        Panel("Tokens generated", "seconds", "tokens", answered),
    ]
    for row in rows:
        if row["kind"] in ("elastic", "paced"):
            series = row["curves"]
            lines = [
                Line(name, series["seconds"], [value / 2**30 for value in series[f"{kind}_bytes"]])
                for name, kind in _KINDS
                if kind != "states" or any(series["states_bytes"])
            ]
            pictures.append(Panel(f"The pool under {row['policy']}", "seconds", "GiB", lines))
    return pictures


def limit_panel(study: dict[str, Any], figure: str, label: str) -> Panel:
    """One figure over the limit on absent experts."""
    lines = []
    experts = study["num_experts"]
    for kind, swept in study["limits"].items():
        rows = [row for row in swept["rows"] if "error" not in row]
        lines.append(Line(kind, [experts if row["eol"] is None else row["eol"] for row in rows], [row[figure] for row in rows]))
    return Panel(label, "most absent experts of a layer", label, lines)


def with_limits(study: dict[str, Any], setting: Setting) -> list[Panel]:
    """All pictures of a case study."""
    if "limits" not in study:
        return panels(study)
    sized = {**study, "num_experts": setting.model.num_experts}
    return [*panels(study), limit_panel(sized, "throughput", "tokens/s"), limit_panel(sized, "steps", "forward steps")]


def default_setting(simulate: bool, seed: int = 0) -> Setting:
    """The paper's card and model."""
    return replace(Setting(SHAPE, CEILING, simulate), seed=seed)
