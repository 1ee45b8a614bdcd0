"""The allocator's benchmark runs and reports what it says it does; how long it took is not asserted."""

from __future__ import annotations

import json

import pytest

from rimuru_cli.bench import allocator as bench


def test_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "POOL_HUGE_PAGES", 60)
    monkeypatch.setattr(bench, "TRACE_OPERATIONS", 2000)
    report = json.loads(json.dumps(bench.run_allocator_bench(repeats=5)))
    assert report["geometry"]["huge_page_bytes"] == 3 << 20 and report["geometry"]["kv_page_bytes"] == 32 << 10
    assert set(report["token_block_us"]) == {"empty", "nearly_full", "half_full"}
    assert all(0 < timing["median"] <= timing["p99"] <= timing["max"] for timing in report["token_block_us"].values())
    assert report["trace"]["operations"] == 2000 and 0 < report["trace"]["refused"] < 2000
    assert report["trace"]["fully_merged"] is True and report["trace"]["operations_per_second"] > 0
