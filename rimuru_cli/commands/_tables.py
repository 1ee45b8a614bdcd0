"""How measurements are laid out for people; with --json they are printed as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rimuru_cli.output import Output, format_bytes, format_share, print_report, rows_table, table


def print_link(report: Mapping[str, Any], out: Output) -> None:
    """Print the rates of `rimuru bench link`."""
    if out.json:
        out.emit(report)
        return
    out.note(f"Device: {report['device'] or 'none'}", "dim")
    rows = [[row["what"], row["how"], format_bytes(row["bytes"]), row["gb_per_s"]] for row in report["rows"]]
    out.line(table(["what", "how", "bytes", "GB/s"], rows))
    for notice in report["notices"]:
        out.note(f"note: {notice}")


def print_token_rows(report: Mapping[str, Any], out: Output) -> None:
    """Print the rows of `rimuru bench pp tg` under llama-bench's column names, with memory, routing and hit rate beside them."""
    if out.json:
        out.emit(report)
        return
    headers = ["model", "size", "params", "backend", "vram", "vram used", "resident", "test", "routing", "top k", "hit rate", "link", "t/s"]
    rows = [
        [
            row["model"],
            format_bytes(row["size"]),
            parameters_in_words(row["params"]),
            row["backend"],
            "no cap" if row["vram_cap"] is None else format_bytes(row["vram_cap"]),
            format_bytes(row["vram_used"]) if row["vram_used"] else "-",
            format_share(row["resident_share"]),
            row["test"] + (f" x {row['sequences']}" if row.get("sequences", 1) > 1 else ""),
            row.get("routing", "-"),
            row["top_k"],
            format_share(row.get("hit_rate")),
            f"{row['stream_gb_s']} of {row['copy_engine_gb_s']} GB/s" if "stream_gb_s" in row else "-",
            row["t/s"],
        ]
        for row in report["rows"]
    ]
    out.line(table(headers, rows))
    out.note(
        "Weights are random. Uniform routing is the worst case for a cache of experts; a recorded one has a conversation's locality.", "dim"
    )


def print_load(report: Mapping[str, Any], out: Output) -> None:
    """Print the rates of `rimuru bench load`."""
    if out.json:
        out.emit(report)
        return
    locked = f"{format_bytes(report['locked_bytes'])} page-locked for {report['device']}" if report["device"] else "not page-locked: no GPU"
    out.note(f"{report['threads']} threads; {locked}", "dim")
    out.line(
        table(["what", "bytes", "s", "GB/s"], [[r["what"], format_bytes(r["bytes"]), r["seconds"], r["gb_per_s"]] for r in report["rows"]])
    )
    out.note(f"Loading reaches {format_share(report['share'])} of plain reading.")
    for notice in report["notices"]:
        out.note(f"note: {notice}")


def print_elastic(report: Mapping[str, Any], out: Output) -> None:
    """Print both runs of `rimuru bench elastic`."""
    if out.json:
        out.emit(report)
        return
    out.note(f"One conversation, growing to {report['context_limit']:,} tokens", "bold")
    headers = [
        "context",
        "computed",
        "prompt t/s",
        "t/s",
        "residents",
        "hit rate",
        "experts",
        "KV",
        "free",
        "handed over",
        "ms/GiB",
        "VRAM",
    ]
    rows = [
        [
            row["context"],
            row["computed"],
            row["prompt t/s"],
            row["generation t/s"],
            row["resident_experts"],
            format_share(row["hit_rate"]),
            format_bytes(row["bytes_by_kind"].get("expert", 0) + row["bytes_by_kind"].get("buffer", 0)),
            format_bytes(row["bytes_by_kind"].get("kv", 0)),
            format_bytes(row["free_bytes"]),
            format_bytes(row["handed_over_bytes"]),
            _or_dash(row["ms_per_gib"]),
            _bytes_or_dash(row["vram_used"]),
        ]
        for row in report["rows"]
    ]
    out.line(table(headers, rows))
    moved = report["ceiling"]
    out.note("\nA ceiling that moves in the middle of an answer", "bold")
    parts = [
        [row["part"], row["tokens"], _or_dash(row["generation t/s"]), format_share(row["hit_rate"]), row["resident_experts"]]
        for row in moved["parts"]
    ]
    out.line(table(["part of the answer", "tokens", "t/s", "hit rate", "residents"], parts))
    out.line()
    headers = ["ceiling", "to", "given back", "taken", "retired", "moved", "ms", "ms/GiB", "VRAM before", "VRAM after"]
    rows = [
        [
            name,
            format_bytes(change["memory_bytes"]),
            format_bytes(change["returned_bytes"]),
            format_bytes(change["taken_bytes"]),
            change["retired_experts"],
            format_bytes(change["moved_bytes"]),
            round(1e3 * change["seconds"], 1),
            _or_dash(change["ms_per_gib"]),
            _bytes_or_dash(change["vram_used_before"]),
            _bytes_or_dash(change["vram_used_after"]),
        ]
        for name in ("lowered", "raised")
        if (change := moved.get(name)) is not None
    ]
    out.line(table(headers, rows))
    if moved["same_text"]:
        out.note(f"Both answers are the same {moved['tokens']} tokens.")
    else:
        out.note(f"THE ANSWERS DIFFER from token {moved['first_difference']} on.", "red")


def _or_dash(value: object) -> object:
    return "-" if value is None else value


def _bytes_or_dash(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)


def print_kernels(report: Mapping[str, Any], out: Output) -> None:
    """Print the reports of `rimuru bench kernels`, one op after the other."""
    if out.json:
        out.emit(report)
        return
    for op, part in report.items():
        if not isinstance(part, Mapping):
            continue
        out.note(f"\n{op}", "bold")
        if op == "moe":
            out.line(rows_table([_moe_row(row) for row in part["rows"]]))
        else:
            print_report(part, out)


def _moe_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the MoE kernel: the placements in pages as their mean, beside contiguous weights and torch's grouped products."""
    us, overhead = row["us"], row["overhead_percent"]
    paged = [us[name] for name in overhead]
    return {
        "shape": row["shape"],
        "tokens": row["tokens"],
        "pages us": sum(paged) / max(1, len(paged)),
        "contiguous us": us.get("contiguous"),
        "grouped_mm us": us.get("torch._grouped_mm"),
        "floor us": row.get("floor_us"),
        "× floor": row.get("times_floor"),
        "overhead us": row.get("overhead_us"),
        "overhead %": round(sum(overhead.values()) / max(1, len(overhead)), 2),
        "spread %": row.get("spread_percent"),
        "noise %": row.get("noise_percent"),
    }


def print_doctor(facts: Mapping[str, Any], out: Output) -> None:
    """Print what `rimuru doctor` found: a line a topic, then the problems with what to do about each."""
    if out.json:
        out.emit(facts)
        return
    lines = _doctor_lines(facts)
    width = max(len(label) for label, _ in lines)
    for label, text in lines:
        out.line(f"{label.ljust(width)}  {text}")
    for sentence in facts["therefore"]:
        out.line(f"{'therefore'.ljust(width)}  {sentence}")
    out.line()
    for problem in facts["problems"]:
        out.line(f"problem: {problem['what']}")
        out.line(f"   hint: {problem['hint']}")
    if not facts["problems"]:
        out.line("No problems found.")


def _doctor_lines(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    system, versions, gpu, compute, memory = (facts[key] for key in ("system", "versions", "gpu", "compute", "memory"))
    cuda = f" (CUDA {versions['torch_cuda']})" if versions["torch_cuda"] else " (built without CUDA)"
    lines = [
        ("system", f"{system['os']} · {_plural(system['processors'], 'processor')}"),
        (
            "versions",
            f"rimuru {versions['rimuru']} · Python {versions['python']} · torch {versions['torch']}{cuda} "
            f"· triton {versions['triton'] or 'not installed'}",
        ),
    ]
    if gpu is None:
        lines.append(("GPU", "none that PyTorch can use"))
    else:
        more = f" · {gpu['count']} cards, the first is used" if gpu["count"] > 1 else ""
        lines.append(("GPU", f"{gpu['name']} · compute capability {gpu['compute_capability']} · driver {gpu['driver'] or 'unknown'}{more}"))
        lines.append(("VRAM", f"{format_bytes(gpu['vram_bytes'])}, {format_bytes(gpu['vram_free_bytes'])} free"))
    used = "the GPU, with Triton kernels" if compute["backend"] == "triton" else "the CPU, with PyTorch"
    lines.append(("computes on", f"{used} ({compute['reason']})"))
    lines.append(("RAM", f"{format_bytes(memory['ram_bytes'])}, {format_bytes(memory['ram_free_bytes'])} free"))
    lines += _measured_lines(facts)
    for disk in facts["disks"]:
        free = "unknown" if disk["free_bytes"] is None else format_bytes(disk["free_bytes"])
        lines.append(("disk", f"{free} free · {disk['what']} in {disk['path']}"))
    return lines


def _measured_lines(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    if facts["link"] is None:
        return [("link, memory", "not measured (--quick)")]
    best, lines = facts["link"]["best"], []
    if facts["gpu"] is not None:
        pageable = f" · pageable memory {_rate(best['host_to_device_pageable'])} to it"
        lines.append(("link", f"{_rate(best['host_to_device'])} to the GPU, {_rate(best['device_to_host'])} back{pageable}"))
        lines.append(("VRAM rate", f"{_rate(best['copy_on_device'])} read and written"))
    lines.append(("RAM rate", f"{_rate(best['host_read'])} read"))
    pinned = facts["pinned"]
    if pinned is not None:
        limit = facts["memory"]["lock_limit_bytes"]
        ulimit = "" if limit is None else f" · ulimit -l {format_bytes(limit)}"
        end = "before the driver refused" if pinned["refused"] else "and no refusal"
        lines.append(
            ("page-locked", f"{format_bytes(pinned['granted_bytes'])} of {format_bytes(pinned['asked_bytes'])} tried, {end}{ulimit}")
        )
    return lines


def _rate(gb_per_s: float | None) -> str:
    return "not measured" if gb_per_s is None else f"{gb_per_s:.1f} GB/s"


def parameters_in_words(number: int) -> str:
    """A count of parameters as llama-bench writes it: 30532122624 -> '30.53 B'."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)


def _plural(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
