"""Frames as bytes: they come back as they were, and nothing odd gets through."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_engine import SCENARIOS, SyntheticEngine

from rimuru_cli.engine.telemetry.assemble import FrameAssembler, Head
from rimuru_cli.engine.telemetry.layout import DamagedTables
from rimuru_cli.engine.telemetry.tables import Tables
from rimuru_cli.engine.telemetry.wire import TABLE_TYPES, HeadWriter, array_items, head_of, joined, pieces_of, split, tables_of


def small(**more: Any) -> SyntheticEngine:
    return SyntheticEngine(200, layers=4, experts=16, top_k=2, **more)


def packed(head: Head, tables: Tables) -> bytearray:
    return joined(*pieces_of(HeadWriter().json(head), array_items(tables)))


def unpacked(data: bytes | bytearray) -> tuple[Head, Tables]:
    raw, arrays = split(data, TABLE_TYPES)
    return head_of(raw), tables_of(arrays)


@pytest.fixture(scope="module")
def sample() -> tuple[Head, Tables]:
    engine = small(hybrid=True)
    for scenario in SCENARIOS:
        engine.next(scenario)
    return engine.head(True), engine.tables()


@pytest.mark.parametrize("hybrid", [False, True])
def test_round_trip(hybrid: bool) -> None:
    engine = small(hybrid=hybrid)
    engine.request_ceiling(engine.identity.least_ceiling_bytes)
    for scenario in SCENARIOS:
        engine.next(scenario)
        head, tables = engine.head(True), engine.tables()
        assert head.answer is not None and head.answer.ok
        again, arrays = unpacked(packed(head, tables))
        assert again == head
        for name in TABLE_TYPES:
            assert np.array_equal(getattr(arrays, name), getattr(tables, name)), name


def test_tables_that_are_not_counted_stay_out(sample: tuple[Head, Tables]) -> None:
    head, tables = sample
    _, arrays = unpacked(packed(head, replace(tables, hits=None, layers=None)))
    assert arrays.hits is None and arrays.layers is None


def test_text_cannot_command_a_terminal(sample: tuple[Head, Tables]) -> None:
    head, tables = sample
    evil = replace(head, engine=replace(head.engine, model="a\x1b[2Jb\nc\u202ed", notices=("\ud800",)))
    again, _ = unpacked(
        joined(*pieces_of(HeadWriter().json(evil).encode("utf-8", "surrogatepass").decode("utf-8", "replace"), array_items(tables)))
    )
    assert again.engine.model == "a\ufffd[2Jb c\ufffdd"
    assert all(text.isprintable() for text in again.engine.notices)


@given(st.binary(max_size=200))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(DamagedTables):
        unpacked(data)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_bytes_are_a_frame_or_refused(sample: tuple[Head, Tables], data: st.DataObject) -> None:
    whole = bytes(packed(*sample))
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        broken = whole[:at]
    else:
        flipped = data.draw(st.integers(1, 255))
        broken = whole[:at] + bytes([whole[at] ^ flipped]) + whole[at + 1 :]
    try:
        FrameAssembler().frame(*unpacked(broken))
    except DamagedTables:
        return


def _edited(sample: tuple[Head, Tables], change: Any) -> bytes:
    whole = packed(*sample)
    length, _ = struct.unpack_from("<II", whole)
    raw = json.loads(bytes(whole[8 : 8 + length]))
    change(raw)
    text = json.dumps(raw).encode()
    start, new = (8 + length + 7) & ~7, (8 + len(text) + 7) & ~7
    return struct.pack("<II", len(text), 0) + text.ljust(new - 8, b" ") + bytes(whole[start:])


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.pop("engine"),
        lambda raw: raw.update(more=1),
        lambda raw: raw["engine"].update(pool_bytes=1e300),
        lambda raw: raw["engine"].update(pool_bytes=1 << 70),
        lambda raw: raw["engine"].update(pool_bytes=-5),
        lambda raw: raw["engine"].update(expert_page_bytes=0),
        lambda raw: raw["engine"].update(kv_page_bytes=1 << 40),
        lambda raw: raw["engine"].update(num_experts=17),
        lambda raw: raw["engine"].update(tiles=0),
        lambda raw: raw["engine"].update(role="root"),
        lambda raw: raw["engine"].update(moe_layers=[99999, 1, 2, 3]),
        lambda raw: raw["engine"].update(notices="x"),
        lambda raw: raw["counters"].update(step=True),
        lambda raw: raw["counters"].update(prefill_rate=float("nan")),
        lambda raw: raw.update(events=[{}]),
        lambda raw: raw.update(events=[raw["events"][0]] * 65),
        lambda raw: raw.update(kv_layers=[]),
        lambda raw: raw.update(busy=1),
        lambda raw: raw["arrays"][0].__setitem__(1, "|O"),
        lambda raw: raw["arrays"][0].__setitem__(2, [1 << 31, 1 << 31, 3]),
        lambda raw: raw["arrays"][0].__setitem__(2, [4, 16]),
        lambda raw: raw["arrays"][0].__setitem__(2, [0, 1 << 31, 1 << 31]),
        lambda raw: raw["arrays"].append(raw["arrays"][0]),
        lambda raw: raw["engine"].update(huge_page_bytes=0),
        lambda raw: raw["engine"].update(huge_page_bytes=1),
        lambda raw: raw["counters"].update(step=1 << 31),
        lambda raw: raw["counters"].update(tables_step=1 << 40),
        lambda raw: raw["counters"].update(step=-1),
        lambda raw: raw["arrays"].__delitem__(0),
    ],
)
def test_every_member_is_checked(sample: tuple[Head, Tables], change: Any) -> None:
    FrameAssembler().frame(*unpacked(_edited(sample, lambda raw: None)))
    with pytest.raises(DamagedTables):
        FrameAssembler().frame(*unpacked(_edited(sample, change)))


def test_a_frame_of_another_shape_starts_anew(sample: tuple[Head, Tables]) -> None:
    """Under the name and pool of the last one, as only a forger writes it."""
    head, tables = sample
    assembler = FrameAssembler()
    assembler.frame(head, tables)
    fewer = replace(head, engine=replace(head.engine, num_experts=8))
    assert tables.hits is not None
    cut = replace(tables, entries=tables.entries[:, :8], scores=tables.scores[:, :8], hits=tables.hits[:, :8])
    assert assembler.frame(fewer, cut).experts.resident.shape == (4, 8)


def test_counters_of_an_older_recording_lack_what_was_not_counted_then(sample: tuple[Head, Tables]) -> None:
    head = replace(sample[0], counters=replace(sample[0].counters, states_not_kept=3))
    raw = json.loads(HeadWriter().json(head))
    assert head_of(raw).counters.states_not_kept == 3
    del raw["counters"]["states_not_kept"]
    assert head_of(raw).counters.states_not_kept == 0
    del raw["counters"]["swaps"]
    with pytest.raises(DamagedTables, match="other members"):
        head_of(raw)
