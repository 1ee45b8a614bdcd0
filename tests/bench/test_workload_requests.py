"""Lists of requests: from statistics, from lines of lengths, from ShareGPT conversations."""

from __future__ import annotations

import json
import math
import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru_cli.bench.workload.requests import MEAN_ANSWER, MEAN_PROMPT, RequestSpec, generate_requests, load_requests
from rimuru_models.errors import NotFoundError, UsageError


def test_lengths_have_the_published_means() -> None:
    specs = generate_requests(20_000, longest=1 << 20)
    assert np.mean([s.prompt_tokens for s in specs]) == pytest.approx(MEAN_PROMPT, rel=0.04)
    assert np.mean([s.answer_tokens for s in specs]) == pytest.approx(MEAN_ANSWER, rel=0.04)


def test_the_same_seed_draws_the_same_requests_and_another_seed_others() -> None:
    assert generate_requests(50, rate=2.0, seed=3) == generate_requests(50, rate=2.0, seed=3)
    assert generate_requests(50, rate=2.0, seed=3) != generate_requests(50, rate=2.0, seed=4)


def test_lengths_do_not_depend_on_the_arrivals() -> None:
    fast, slow = generate_requests(50, rate=9.0), generate_requests(50, rate=1.0, arrivals="bursty")
    assert [(s.prompt_tokens, s.answer_tokens) for s in fast] == [(s.prompt_tokens, s.answer_tokens) for s in slow]


@pytest.mark.parametrize("arrivals", ["poisson", "bursty"])
def test_arrivals_keep_the_rate_and_bursts_vary_more(arrivals: str) -> None:
    specs = generate_requests(8000, rate=4.0, arrivals=arrivals)  # type: ignore[arg-type]
    times = np.array([s.arrival for s in specs])
    assert times[0] == 0.0 and (np.diff(times) >= 0).all()
    assert len(times) / times[-1] == pytest.approx(4.0, rel=0.06)
    variation = np.diff(times).std() / np.diff(times).mean()
    # Gamma gaps of shape a vary by 1 / sqrt(a): 1 for Poisson arrivals, 2 for the default burstiness.
    assert variation == pytest.approx(1.0 if arrivals == "poisson" else 2.0, rel=0.1)


def test_an_infinite_rate_brings_all_at_once() -> None:
    assert {s.arrival for s in generate_requests(10, rate=math.inf)} == {0.0}


@pytest.mark.parametrize("longest", [1, 3, 40])
def test_no_length_is_longer_than_asked(longest: int) -> None:
    specs = generate_requests(200, longest=longest)
    assert all(1 <= n <= longest for s in specs for n in (s.prompt_tokens, s.answer_tokens))


@pytest.mark.parametrize("bad", [{"count": 0}, {"rate": 0.0}, {"rate": math.nan}, {"burstiness": 0.0}, {"longest": 0}])
def test_nonsense_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        generate_requests(**{"count": 5, **bad})  # type: ignore[arg-type]


def test_lines_of_lengths_with_arrivals_are_sorted(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(
        '{"arrival": 2, "prompt_tokens": 5, "answer_tokens": 6}\n\n{"arrival": 0.5, "prompt_tokens": 7, "answer_tokens": 8}\n', "utf-8"
    )
    assert load_requests(path) == [RequestSpec(0.5, 7, 8), RequestSpec(2.0, 5, 6)]


def test_lines_without_arrivals_get_them(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"prompt_tokens": 5, "answer_tokens": 6}\n' * 20, "utf-8")
    specs = load_requests(path, rate=1.0)
    assert len(specs) == 20 and specs[-1].arrival > 1.0


def test_sharegpt_takes_the_first_exchange_and_skips_what_has_none(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 80}, {"from": "human", "value": "z"}]
    rows = [{"conversations": turns}, {"conversations": turns[:1]}, {"conversations": [{"value": ""}, {"value": "y"}]}, 7, {"id": 1}]
    path.write_text(json.dumps(rows), "utf-8")
    assert load_requests(path) == [RequestSpec(0.0, 10, 20)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[1, 2",
        "nonsense",
        "3",
        '{"prompt_tokens": 0, "answer_tokens": 1}',
        '{"prompt_tokens": 1.5, "answer_tokens": 1}',
        '{"prompt_tokens": true, "answer_tokens": 1}',
        '{"prompt_tokens": 1}',
        '{"prompt_tokens": 1, "answer_tokens": 1, "arrival": -1}',
        '{"prompt_tokens": 1, "answer_tokens": 1, "arrival": NaN}',
        "[" * 100_000,
        '{"prompt_tokens": 1e400, "answer_tokens": 1}',
        '{"prompt_tokens": 1' + "0" * 5000 + ', "answer_tokens": 1}',
        '{"prompt_tokens": 16777217, "answer_tokens": 1}',
        '{"prompt_tokens": [[[[]]]], "answer_tokens": 1}',
        '{"conversations": []}',
        '[{"conversations": {"value": "x"}}, null, [[]], "x", {"conversations": [1, 2]}]',
        '{"prompt_tokens": 1, "answer_tokens": 1}\n{"prompt_tokens": 1, "answer_tokens": 1, "arrival": 1}',
    ],
)
def test_a_broken_file_is_refused_in_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "requests"
    path.write_text(text, "utf-8")
    with pytest.raises(UsageError, match=r"requests|Line 1") as refused:
        load_requests(path)
    assert len(refused.value.what) < 500, "what is wrong is named, not repeated"


def test_binary_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError):
        load_requests(tmp_path / "binary")
    with pytest.raises(NotFoundError):
        load_requests(tmp_path / "none")
    with pytest.raises(UsageError):
        load_requests(tmp_path)


def test_devices_are_not_read(tmp_path: Path) -> None:
    device = Path("/dev/zero")
    if not device.exists():
        device = tmp_path  # where there are no devices in the file system, a folder is no file either
    with pytest.raises(UsageError, match=r"is (no file|a folder)"):
        load_requests(device)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_what_a_program_writes_into_a_pipe_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text('{"prompt_tokens": 5, "answer_tokens": 6}\n', "utf-8"))
    writer.start()
    assert load_requests(pipe) == [RequestSpec(0.0, 5, 6)]
    writer.join()


def test_a_byte_order_mark_and_windows_line_ends_are_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt_tokens": 5, "answer_tokens": 6}\r\n\r\n')
    assert load_requests(path) == [RequestSpec(0.0, 5, 6)]


def test_a_rate_for_requests_that_say_when_they_come_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"arrival": 2, "prompt_tokens": 5, "answer_tokens": 6}', "utf-8")
    with pytest.raises(UsageError, match="rate means nothing"):
        load_requests(path, rate=3.0)


def test_some_of_a_file_and_nothing_too_long(tmp_path: Path) -> None:
    """A data set of conversations has some that no model takes, and far more than anybody serves."""
    path, said = tmp_path / "sharegpt.json", list[str]()
    lengths = [*range(1, 41), 5000]
    path.write_text(json.dumps([{"conversations": [{"value": "x" * 4 * n}, {"value": "y" * 4}]} for n in lengths]), "utf-8")
    chosen = load_requests(path, count=8, longest=4000, seed=3, note=said.append)
    assert len(chosen) == 8 and len({spec.prompt_tokens for spec in chosen}) == 8
    assert chosen == load_requests(path, count=8, longest=4000, seed=3)
    assert chosen != load_requests(path, count=8, longest=4000, seed=4)
    assert said == ["1 of 41 requests are longer than 4,000 tokens and are left out."]
    assert len(load_requests(path, count=500)) == 41
    with pytest.raises(UsageError, match="keeps within 0"):
        load_requests(path, longest=0)


def test_of_requests_with_arrivals_the_first_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text("".join(f'{{"arrival": {9 - n}, "prompt_tokens": {n + 1}, "answer_tokens": 6}}\n' for n in range(9)), "utf-8")
    assert [spec.prompt_tokens for spec in load_requests(path, count=2)] == [9, 8]


@given(st.binary(max_size=200))
@settings(max_examples=60, deadline=None)
def test_whatever_a_file_holds_is_read_or_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)
        try:
            specs = load_requests(path)
        except UsageError:
            return
        assert all(spec.prompt_tokens >= 1 and spec.answer_tokens >= 1 and spec.arrival >= 0 for spec in specs)
