"""Frames as bytes, in shared memory and in recordings: JSON for what has names, raw arrays for the tables.

    u32 length of the JSON | u32 zero | JSON | arrays, each from a multiple of 8 on, little-endian, in the JSON's order

Whatever reads this trusts nothing: a recording may come from a stranger. Every name, type, shape and size is checked, and anything odd is a
`DamagedTables`.
"""

from __future__ import annotations

import json
import math
import struct
import types
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from rimuru_cli.engine.telemetry.assemble import Head
from rimuru_cli.engine.telemetry.frame import AdjusterRecord, CeilingAnswer, Counters, EngineIdentity
from rimuru_cli.engine.telemetry.layout import DamagedTables
from rimuru_cli.engine.telemetry.tables import Tables

Array = NDArray[Any]
T = TypeVar("T")

MOST_EVENTS = 64
_PREFIX = struct.Struct("<II")
_MOST_JSON = 4 << 20
_MOST_TEXT = 4096
_MOST_ITEMS = 4096
_MOST_INT = 1 << 62

# Names of the arrays, their number format and dimensions. The formats are part of the file format.
TABLE_TYPES: dict[str, tuple[str, int]] = {
    "entries": ("<i4", 3),
    "scores": ("<f4", 2),
    "hits": ("<i8", 2),
    "layers": ("<i8", 2),
    "loading": ("<i4", 2),
    "buffers": ("<i4", 1),
    "blocks": ("<i4", 2),
    "block_owner": ("<i4", 1),
    "block_first": ("<i4", 1),
    "states": ("<i4", 2),
    "running": ("<i4", 1),
}
OPTIONAL_TABLES = frozenset({"hits", "layers"})
_KINDS = (EngineIdentity, Counters, AdjusterRecord, CeilingAnswer)
_HINTS: dict[type, dict[str, Any]] = {kind: get_type_hints(kind) for kind in _KINDS}
_NEEDED: dict[type, set[str]] = {kind: {field.name for field in fields(kind) if field.default is MISSING} for kind in _KINDS}


class HeadWriter:
    """Writes heads as JSON. What seldom changes (the engine, events) is written out once."""

    def __init__(self) -> None:
        self._engine: EngineIdentity | None = None
        self._engine_json = ""
        self._events: tuple[AdjusterRecord, ...] = ()
        self._events_json = "[]"

    def json(self, head: Head, *, brief: bool = False) -> str:
        """The members of the head as one JSON object; `brief` leaves out the engine if it is the same as last time."""
        same = head.engine is self._engine
        if not same:
            self._engine, self._engine_json = head.engine, _dumps(asdict(head.engine))
        if head.events != self._events:
            self._events, self._events_json = head.events, _dumps([asdict(event) for event in head.events])
        rest = {
            "number": head.number,
            "time": head.time,
            "busy": head.busy,
            "kv_layers": head.kv_layers,
            "answer": None if head.answer is None else asdict(head.answer),
            "counters": vars(head.counters),
        }
        engine = "" if brief and same else f',"engine":{self._engine_json}'
        return f'{_dumps(rest)[:-1]}{engine},"events":{self._events_json}}}'


def pieces_of(head_json: str, arrays: Sequence[tuple[str, Array]]) -> tuple[list[tuple[int, bytes | memoryview]], int]:
    """A frame's bytes as (offset, piece) and their total length; nothing is copied but the JSON.

    Args:
        head_json: from `HeadWriter.json`.
        arrays: names and C-contiguous arrays in the formats of `TABLE_TYPES`.
    """
    described = _dumps([[name, array.dtype.str, array.shape] for name, array in arrays])
    text = f'{head_json[:-1]},"arrays":{described}}}'.encode()
    pieces: list[tuple[int, bytes | memoryview]] = [(0, _PREFIX.pack(len(text), 0)), (_PREFIX.size, text)]
    at = _aligned(_PREFIX.size + len(text))
    for _, array in arrays:
        if array.size:
            pieces.append((at, array.data.cast("B")))
        at = _aligned(at + array.nbytes)
    return pieces, at


def joined(pieces: Sequence[tuple[int, bytes | memoryview]], total: int) -> bytearray:
    """The pieces in one buffer."""
    out = bytearray(total)
    for offset, piece in pieces:
        out[offset : offset + len(piece)] = piece
    return out


def array_items(tables: Tables) -> list[tuple[str, Array]]:
    """The tables that there are, by name, as `pieces_of` takes them."""
    return [
        (name, np.ascontiguousarray(getattr(tables, name), dtype=dtype))
        for name, (dtype, _) in TABLE_TYPES.items()
        if getattr(tables, name) is not None
    ]


def split(data: bytes | bytearray | memoryview, formats: dict[str, tuple[str, int]]) -> tuple[dict[str, Any], dict[str, Array]]:
    """The JSON object and the arrays of a frame's bytes. Arrays are views of `data`.

    Args:
        formats: permitted arrays: names, number formats, dimensions.

    Raises:
        DamagedTables: it is not one.
    """
    view = memoryview(data)
    if len(view) < _PREFIX.size:
        raise DamagedTables("a frame is too short")
    length, zero = _PREFIX.unpack_from(view)
    if zero or length > min(_MOST_JSON, len(view) - _PREFIX.size):
        raise DamagedTables("a frame is longer than its bytes")
    try:
        head = json.loads(bytes(view[_PREFIX.size : _PREFIX.size + length]))
    except (ValueError, RecursionError) as error:
        raise DamagedTables("a frame has no readable head") from error
    described = head.pop("arrays", None) if isinstance(head, dict) else None
    if not isinstance(described, list) or len(described) > len(formats):
        raise DamagedTables("a frame has no list of arrays")
    arrays: dict[str, Array] = {}
    at = _aligned(_PREFIX.size + length)
    for item in described:
        name, dtype, shape = _array_of(item, formats)
        count = math.prod(shape)
        size = count * dtype.itemsize
        if name in arrays or at + size > len(view):
            raise DamagedTables(f"the array {name} is not there whole")
        arrays[name] = np.frombuffer(view, dtype, count, at).reshape(shape) if count else np.zeros(shape, dtype)
        at = _aligned(at + size)
    return head, arrays


def _array_of(item: object, formats: dict[str, tuple[str, int]]) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
    if not (isinstance(item, list) and len(item) == 3 and isinstance(item[0], str) and item[0] in formats and isinstance(item[2], list)):
        raise DamagedTables("a frame has an array of no known name")
    name, (dtype, dimensions) = item[0], formats[item[0]]
    shape = item[2]
    if item[1] != dtype or len(shape) != dimensions or not all(type(n) is int and 0 <= n <= 1 << 31 for n in shape):
        raise DamagedTables(f"the array {name} has not the right form")
    if math.prod(n for n in shape if n) > _MOST_INT >> 4:  # empty, but numpy looks at the other dimensions, too
        raise DamagedTables(f"the array {name} has too many dimensions of too many numbers")
    return name, np.dtype(dtype), tuple(shape)


def head_of(raw: dict[str, Any], engine: EngineIdentity | None = None) -> Head:
    """The head from its JSON object; `engine` is meant where it names none.

    Raises:
        DamagedTables: something is missing, too much, or of another type.
    """
    events = raw.get("events")
    if not isinstance(events, list) or len(events) > MOST_EVENTS:
        raise DamagedTables("events are not a list of at most 64")
    answer = raw.get("answer")
    parts = {
        **raw,
        "engine": engine if engine is not None and "engine" not in raw else _build(EngineIdentity, raw.get("engine")),
        "counters": _build(Counters, raw.get("counters")),
        "events": tuple(_build(AdjusterRecord, event) for event in events),
        "answer": None if answer is None else _build(CeilingAnswer, answer),
    }
    kv_layers = parts.get("kv_layers")
    parts["kv_layers"] = _checked("kv_layers", tuple[int, ...], kv_layers)
    for name, kind in (("number", int), ("time", float), ("busy", bool)):
        parts[name] = _checked(name, kind, parts.get(name))
    if set(parts) != {field.name for field in fields(Head)}:
        raise DamagedTables("a frame's head has other members")
    return Head(**parts)


def tables_of(arrays: dict[str, Array]) -> Tables:
    """Tables from named arrays. Raises DamagedTables if one is missing."""
    missing = TABLE_TYPES.keys() - arrays.keys() - OPTIONAL_TABLES
    if missing:
        raise DamagedTables(f"there is no table {sorted(missing)[0]}")
    return Tables(**{name: arrays.get(name) for name in TABLE_TYPES})  # type: ignore[arg-type]


def _build(kind: type[T], raw: object) -> T:
    """A frozen dataclass of plain values from a JSON object, every member checked; those with a default may be missing, as they are in
    older recordings."""
    hints = _HINTS[kind]
    if not isinstance(raw, dict) or not _NEEDED[kind] <= raw.keys() <= hints.keys():
        raise DamagedTables(f"{kind.__name__} has other members")
    return kind(**{name: _checked(name, hints[name], value) for name, value in raw.items()})


def _checked(name: str, hint: Any, value: Any) -> Any:
    """The value as its type demands (lists become tuples, ints pass as floats)."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        inner = [option for option in get_args(hint) if option is not type(None)]
        return None if value is None else _checked(name, inner[0], value)
    if origin is Literal:
        good = isinstance(value, str) and value in get_args(hint)
    elif origin is tuple:
        if isinstance(value, (list, tuple)) and len(value) <= _MOST_ITEMS:
            return tuple(_checked(name, get_args(hint)[0], item) for item in value)
        good = False
    elif hint is float:
        if type(value) in (int, float) and abs(value) < _MOST_INT:
            return float(value)
        good = False
    elif hint is int:
        good = type(value) is int and abs(value) < _MOST_INT
    elif hint is str:
        if isinstance(value, str) and len(value) <= _MOST_TEXT:
            return printable(value)
        good = False
    else:
        good = type(value) is hint
    if not good:
        raise DamagedTables(f"{name} is not what it should be")
    return value


def printable(text: str) -> str:
    """The text on one line and without anything that a terminal would obey or could not encode."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _aligned(at: int) -> int:
    return (at + 7) & ~7
