"""Figures of a run, worked out by hand."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from rimuru_cli.bench.workload.chart import Line, Panel, render_svg, ticks
from rimuru_cli.bench.workload.metrics import RequestRecord, StepRecord, curves, statistics, summarise
from rimuru_cli.bench.workload.requests import RequestSpec


def _step(end: float, running: int, uses: int = 0, hits: int = 0) -> StepRecord:
    return StepRecord(end, 1, running, running, running, 0, {"kv": 256, "free": 0}, 3, uses, hits, 10)


def test_figures_follow_their_definitions() -> None:
    first = RequestRecord(RequestSpec(1.0, 10, 3), [2.0, 2.5, 3.5])
    second = RequestRecord(RequestSpec(2.0, 20, 1), [4.0])
    report = summarise([first, second], [_step(2.0, 1, 8, 6), _step(4.0, 2, 8, 2)], preemptions=0)
    assert report["seconds"] == 3.0  # first arrival to last token
    assert report["throughput"] == pytest.approx(4 / 3)
    assert report["request_throughput"] == pytest.approx(2 / 3)
    assert report["total_token_throughput"] == pytest.approx(34 / 3)
    assert report["ttft_ms"]["mean"] == pytest.approx(1500.0)
    assert report["tpot_ms"] == {name: pytest.approx(750.0) for name in ("mean", "p50", "p95", "p99")}
    assert report["itl_ms"]["mean"] == pytest.approx(750.0)
    assert (report["steps"], report["peak_concurrency"], report["completed"]) == (2, 2, 2)
    assert report["hit_rate"] == 0.5 and report["link_bytes"] == 20


def test_a_request_cut_short_is_not_completed() -> None:
    report = summarise([RequestRecord(RequestSpec(0.0, 10, 3), [2.0])], [_step(2.0, 1)], preemptions=1)
    assert (report["completed"], report["preemptions"], report["hit_rate"]) == (0, 1, None)
    assert report["tpot_ms"] == {}


def test_percentiles_interpolate() -> None:
    assert statistics([0.0, 1.0]) == {"mean": 0.5, "p50": 0.5, "p95": pytest.approx(0.95), "p99": pytest.approx(0.99)}


def test_curves_keep_both_ends_and_all_kinds() -> None:
    steps = [_step(float(i), i) for i in range(1000)]
    series = curves(steps, points=10)
    assert len(series["seconds"]) == 10 and series["seconds"][0] == 0.0 and series["seconds"][-1] == 999.0
    assert series["kv_bytes"] == [256] * 10
    assert curves([]) == {}
    assert curves(steps[:1])["running"] == [0]


@pytest.mark.parametrize("high", [0.0, 3e-9, 0.7, 1.0, 37.0, 2100.0, 3.2e10])
def test_ticks_are_few_and_reach_the_top(high: float) -> None:
    marks = ticks(high)
    assert marks[0] == 0.0 and 2 <= len(marks) <= 6 and marks[-1] >= high * (1 - 1e-9)


def test_the_picture_is_well_formed_and_escapes_names() -> None:
    text = render_svg([Panel("a < b", "s", "n & m", [Line("<x>", [0, 1, 2], [0, 5, 1]), Line("empty", [], [])]), Panel("none", "", "", [])])
    root = ElementTree.fromstring(text)
    lines = root.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2 and len(str(lines[0].get("points")).split()) == 3
    assert "<x>" in "".join(root.itertext())
