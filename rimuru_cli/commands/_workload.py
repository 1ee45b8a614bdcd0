"""`rimuru bench workload`: its flags, and how its report is laid out."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rimuru_cli.commands import _options as options
from rimuru_cli.output import Output, format_bytes, format_share, shows_blocks, table, terminal_columns
from rimuru_models.errors import UsageError

if TYPE_CHECKING:
    from rimuru_cli.bench.workload.requests import RequestSpec

ARRIVALS = ("poisson", "bursty", "at-once")
ROUTINGS = ("recorded", "uniform")
_DEFAULT_POLICIES = ["static", "fixed", "elastic", "paced"]
_MOST_REQUESTS = 100_000


def workload(
    requests: Annotated[
        Path | None,
        typer.Option(
            "--requests",
            metavar="FILE",
            help="JSON lines with prompt_tokens, answer_tokens and perhaps arrival (seconds); or a ShareGPT JSON.",
            show_default="generated",
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            "--count",
            metavar="N",
            min=1,
            max=_MOST_REQUESTS,
            help="Requests to generate, or to take of a file.",
            show_default="200; a file: all",
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="R", help="Requests a second on average.", show_default="all at the start")
    ] = None,
    arrivals: Annotated[
        str | None, typer.Option("--arrivals", metavar="|".join(ARRIVALS), help="When they come.", show_default="poisson")
    ] = None,
    longest: Annotated[
        int | None,
        typer.Option("--longest", metavar="TOKENS", min=1, help="Longest prompt, and longest answer.", show_default="1024; a file: any"),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="S", min=0, help="Draws the same requests again.")] = 0,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="static, fixed, fixed:20%, elastic, paced; changed by :no-profile, :no-live, :no-hysteresis, :eol=N, :paced; repeat it.",
            show_default="static, fixed, elastic, paced",
        ),
    ] = None,
    model_shape: Annotated[
        str, typer.Option("--model-shape", metavar="NAME", help="qwen1.5-moe-a2.7b, qwen3-30b-a3b, qwen3.5-35b-a3b, …; tiny: anywhere.")
    ] = "qwen1.5-moe-a2.7b",
    vram: Annotated[
        str | None, typer.Option("--vram", "--memory", metavar="SIZE", help="Ceiling: 24GiB or 50%.", show_default="32GiB, tiny: none")
    ] = None,
    sequences: Annotated[int, typer.Option("--sequences", metavar="N", min=1, max=1024, help="Most requests at once.")] = 300,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Work out times from measured costs instead of computing; on any machine.")
    ] = False,
    routing: Annotated[
        str | None,
        typer.Option(
            "--routing",
            metavar="|".join(ROUTINGS),
            help="With --simulate: experts chosen as in a recorded conversation, or evenly, as random weights do.",
            show_default="recorded",
        ),
    ] = None,
    case_study: Annotated[
        bool, typer.Option("--case-study", help="The paper's: 300 requests at once, every policy, and what elastic sharing is worth.")
    ] = False,
    limits: Annotated[
        bool, typer.Option("--limits", help="With --case-study: also sweep how many experts of a layer may be absent.")
    ] = False,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write the curves as a picture.", show_default=False)] = None,
    json: options.JsonFlag = False,
) -> None:
    """Serve many requests under several memory policies: throughput, waiting times, requests at once, what the pool held."""
    from rimuru_cli.chat.interrupt import loading_libraries
    from rimuru_cli.settings import parse_size

    out = Output(json=json)
    size = None if vram is None else parse_size(vram)
    listed = {"--requests": requests, "--count": count, "--rate": rate, "--arrivals": arrivals, "--longest": longest, "--policy": policy}
    _check(listed, case_study=case_study, limits=limits, svg=svg)
    if routing is not None and (routing not in ROUTINGS or not simulate):
        raise UsageError(
            f"--routing is one of {', '.join(ROUTINGS)}, not {routing!r}."
            if routing not in ROUTINGS
            else "--routing belongs to --simulate: what runs for real chooses by itself."
        )
    with loading_libraries():
        from rimuru_cli.bench.synthetic import SMALL_SHAPES
        from rimuru_cli.bench.workload import case_study as study
        from rimuru_cli.bench.workload.chart import render_svg
        from rimuru_cli.bench.workload.policies import parse_policies
        from rimuru_cli.bench.workload.run import Setting, device_bytes, run_policies

    ceiling = None if model_shape in SMALL_SHAPES else study.CEILING
    if size is not None:
        ceiling = size.of(device_bytes(simulate))
    setting = Setting(model_shape, ceiling, simulate, sequences=sequences, seed=seed, uniform=routing == "uniform")
    policies = [one for word in policy or _DEFAULT_POLICIES for one in parse_policies(word)]
    specs = [] if case_study else _requests(requests, count, rate, arrivals, longest, seed, out)
    with out.progress("items") as progress:
        if case_study:
            report = study.run_case_study(setting, count=count or study.COUNT, limits=limits, progress=progress)
        else:
            report = run_policies(specs, list(dict.fromkeys(policies)), setting, progress=progress)
    failed: OSError | None = None
    if svg is not None:
        # What took so long is shown whatever becomes of the picture.
        try:
            _replace(svg, render_svg(study.with_limits(report, setting)))
            report = {**report, "svg": str(svg)}
        except OSError as error:
            failed = error
    print_workload(report, out)
    if failed is not None:
        raise failed


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all; what a link leads to, and devices and pipes as they are."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _check(listed: Mapping[str, object], *, case_study: bool, limits: bool, svg: Path | None) -> None:
    """Refuse flags that contradict one another, before anything takes time."""
    if case_study:
        given = [flag for flag, value in listed.items() if value and flag != "--count"]
        if given:
            raise UsageError(f"The case study has its own requests and policies; leave {given[0]} away.")
    elif limits:
        raise UsageError("--limits belongs to --case-study.", hint="Or name them: --policy paced:eol=12 --policy paced:eol=24")
    arrivals = listed["--arrivals"]
    if arrivals is not None and arrivals not in ARRIVALS:
        raise UsageError(f"--arrivals is one of {', '.join(ARRIVALS)}, not {arrivals!r}.")
    if arrivals == "bursty" and listed["--rate"] is None:
        raise UsageError("Bursts need a rate.", hint="--rate 5 brings five requests a second on average.")
    if svg is not None and (svg.is_dir() or not svg.parent.is_dir()):
        raise UsageError(f"{svg} cannot be written: {'it is a folder' if svg.is_dir() else 'its folder does not exist'}.")


def _requests(
    path: Path | None, count: int | None, rate: float | None, arrivals: str | None, longest: int | None, seed: int, out: Output
) -> Sequence[RequestSpec]:
    from rimuru_cli.bench.workload.requests import generate_requests, load_requests

    when: Any = arrivals or "poisson"
    often = math.inf if rate is None else rate
    if not often > 0:
        raise UsageError(f"--rate must be above 0, not {often:g}.")
    if path is not None:
        return load_requests(path, rate=often, arrivals=when, seed=seed, count=count, longest=longest, note=out.note)
    return generate_requests(count or 200, rate=often, arrivals=when, seed=seed, longest=longest or 1024)


def print_workload(report: Mapping[str, Any], out: Output) -> None:
    """Print a row per policy, the requests at once over time, and what the case study found."""
    if out.json:
        out.emit(report)
        return
    where = f"simulated on {report['device']}" if report["simulated"] else report["device"]
    cap = "no cap" if report["vram_cap"] is None else format_bytes(report["vram_cap"])
    out.note(
        f"{report['requests']:,} requests ({report['prompt_tokens']:,} + {report['answer_tokens']:,} tokens), {report['model']}, {cap}, "
        f"{where}",
        "bold",
    )
    _print_rows(report["rows"], out)
    if report["simulated"]:
        served = [row for row in report["rows"] if "error" not in row]
        pace = sum(row["seconds"] for row in served) / max(1e-9, sum(row["wall_seconds"] for row in served))
        out.note(f"Times are worked out, not measured; the simulation ran {pace:,.{0 if pace >= 10 else 1}f} times as fast.", "dim")
    _print_curves(report["rows"], out)
    if "ratios" in report:
        _print_study(report, out)


def _print_rows(rows: Sequence[Mapping[str, Any]], out: Output) -> None:
    headers = [
        "policy",
        "tok/s",
        "requests/s",
        "TTFT p50",
        "p99",
        "TPOT p50",
        "p99",
        "at once",
        "peak",
        "steps",
        "preempted",
        "hits",
        "link",
    ]
    lines = []
    for row in rows:
        if "error" in row:
            out.note(f"note: {row['policy']}: {row['error']}")
            continue
        ttft, tpot = row["ttft_ms"], row["tpot_ms"]
        lines.append(
            [
                row["policy"],
                f"{row['throughput']:,.1f}",
                f"{row['request_throughput']:.2f}",
                _time(ttft.get("p50")),
                _time(ttft.get("p99")),
                _time(tpot.get("p50")),
                _time(tpot.get("p99")),
                f"{row['mean_concurrency']:.1f}",
                row["peak_concurrency"],
                row["steps"],
                row["preemptions"],
                format_share(row["hit_rate"]),
                format_bytes(row["link_bytes"]),
            ]
        )
    out.line(table(headers, lines))


def _time(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "-"
    return (
        f"{milliseconds / 1e3:,.1f} s"
        if milliseconds >= 1e4
        else f"{milliseconds:,.0f} ms"
        if milliseconds >= 100
        else f"{milliseconds:.1f} ms"
    )


def _print_curves(rows: Sequence[Mapping[str, Any]], out: Output) -> None:
    served = [row for row in rows if "error" not in row]
    name = max(len(row["policy"]) for row in served)
    width = min(80, terminal_columns(out.stdout) - name - 2)
    if width < 8:
        return
    end, top = max(row["curves"]["seconds"][-1] for row in served), max(row["peak_concurrency"] for row in served)
    out.note(f"\nRequests at once, 0 to {end:,.1f} s; a full column is {top}", "bold")
    for row in served:
        out.line(f"{row['policy']:<{name}}  {sparkline(row['curves']['seconds'], row['curves']['running'], end, top, width)}")


def sparkline(x: Sequence[float], y: Sequence[float], end: float, top: float, width: int) -> str:
    """A curve as one line of `width` characters from x = 0 to `end`: the highest value of each stretch, as a share of `top`."""
    levels = " ▁▂▃▄▅▆▇█" if shows_blocks() else " .:-=+*#@"
    highest = [0.0] * width
    place = -1
    for moment, value in zip(x, y, strict=True):
        following = min(width - 1, int(moment / end * width)) if end > 0 else 0
        # A stretch in which nothing was written down is as what comes next.
        for column in range(max(0, min(place + 1, following)), following + 1):
            highest[column] = max(highest[column], value)
        place = following
    scale = (len(levels) - 1) / top if top > 0 else 0.0
    return "".join(levels[math.ceil(value * scale - 1e-9)] for value in highest).rstrip()


def _print_study(report: Mapping[str, Any], out: Output) -> None:
    found, paper = report["policies"], report.get("paper")
    out.note("\nThe best of each kind", "bold")
    headers = ["kind", "policy", "tok/s", "steps", "peak"] + (["paper's steps", "paper's peak"] if paper else [])
    rows = [
        [kind, row["policy"], f"{row['throughput']:,.1f}", row["steps"], row["peak_concurrency"]]
        + ([paper[figure].get(kind, "-") for figure in ("steps", "peak_concurrency")] if paper else [])
        for kind, row in found.items()
    ]
    out.line(table(headers, rows))
    for line in report["assumed"]:
        out.note(f"assumed: {line}", "dim")
    for kind, swept in report.get("limits", {}).items():
        out.note(f"\nMost absent experts of a layer: {kind}", "bold")
        _print_rows(swept["rows"], out)
        chosen = "no limit" if swept["chosen"] is None else str(swept["chosen"])
        own = kind == "paced" and swept["chosen"] == swept["default"]
        out.note(f"chosen: {chosen}{', as rimuru does by itself' if own else ''}")
