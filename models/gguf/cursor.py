"""Reading forward through the header of a GGUF file without leaving it. No torch."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from rimuru_models.errors import CheckpointError

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9
REDOWNLOAD = "The file is damaged or was not downloaded completely: download it again."
_MAX_NESTING = 3
# Elements of all arrays that are walked over one by one: twenty times the largest vocabularies. No model has arrays in arrays, and those
# are slow.
_MAX_WALKED, _MAX_INNER = 1 << 23, 1 << 17


class Array(NamedTuple):
    """An array of the metadata that nobody has asked for yet."""

    kind: int
    length: int
    start: int


class NeedsMoreError(CheckpointError):
    """The header goes on beyond the bytes that are there, although the file is longer; `at_least`: bytes that are needed at least."""

    def __init__(self, where: str, at_least: int) -> None:
        super().__init__(f"the header of {where} has more than the {at_least - 1} bytes that were read.")
        self.at_least = at_least


class Cursor:
    """Reads forward and refuses to leave the file.

    Args:
        data: the file, or its beginning.
        file_bytes: size of the whole file.
        where: names it.
    """

    def __init__(self, data: bytes, file_bytes: int, where: str) -> None:
        self.data = data
        self.file_bytes = file_bytes
        self.where = where
        self.position = 0
        self._walked = 0

    def broken(self, why: str) -> CheckpointError:
        """An error to raise; `why` is a phrase without a full stop."""
        return CheckpointError(f"{self.where} is not a usable GGUF file: {why}.", hint=REDOWNLOAD)

    def take(self, length: int, what: str) -> int:
        """Move over `length` bytes and return where they start."""
        start = self.position
        if length > self.file_bytes - start:
            raise self.broken(f"{what} at byte {start} needs {length} bytes, the file has {self.file_bytes - start} left")
        self.position = start + length
        if self.position > len(self.data):
            raise NeedsMoreError(self.where, self.position)
        return start

    def scalar(self, code: str, what: str) -> Any:
        """A number, by its code of `struct`."""
        form = "<" + code
        return struct.unpack_from(form, self.data, self.take(struct.calcsize(form), what))[0]

    def count(self, what: str, limit: int) -> int:
        """A u64 of at most `limit`."""
        value = int(self.scalar("Q", what))
        if value > limit:
            raise self.broken(f"{what} is {value}, more than the {limit} that are possible")
        return value

    def text(self, what: str, limit: int | None = None) -> str:
        """A string, of at most `limit` bytes."""
        length = int(self.scalar("Q", what))
        if limit is not None and length > limit:
            raise self.broken(f"{what} at byte {self.position} has {length} bytes, more than the {limit} that are possible")
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self.broken(f"{what} at byte {start} is not UTF-8") from None

    def flag(self, what: str) -> bool:
        """A bool, which is a byte of 0 or 1."""
        byte = self.data[self.take(1, what)]
        if byte > 1:
            raise self.broken(f"{what} is {byte}, neither true nor false")
        return byte == 1

    def scalar_of(self, kind: int, what: str) -> Any:
        """A value of a type that is no array."""
        if kind == STRING:
            return self.text(what)
        if kind == BOOL:
            return self.flag(what)
        if kind not in SCALARS:
            raise self.broken(f"{what} has the unknown type {kind}")
        return self.scalar(SCALARS[kind], what)

    def value(self, key: str) -> Any:
        """One metadata value: a number, a bool, a string, or an `Array`."""
        kind, what = int(self.scalar("I", f"the type of {key!r}")), f"the value of {key!r}"
        return self.array(what, 1) if kind == ARRAY else self.scalar_of(kind, what)

    def array(self, what: str, depth: int) -> Array:
        """Walk over an array, checking that all of it is there."""
        if depth > _MAX_NESTING:
            raise self.broken(f"{what} nests arrays too deeply")
        kind = int(self.scalar("I", f"the element type of {what}"))
        smallest = 8 if kind == STRING else 12 if kind == ARRAY else struct.calcsize("<" + self._code(kind, what))
        length = self.count(f"the length of {what}", (self.file_bytes - self.position) // smallest)
        found = Array(kind, length, self.position)
        if kind == STRING:
            self._walk(length, what)
            self._skip_strings(length, what)
        elif kind == ARRAY:
            self._walk(length * (_MAX_WALKED // _MAX_INNER), what)
            for _ in range(length):
                self.array(what, depth + 1)
        else:
            self.take(length * smallest, what)
        return found

    def _walk(self, count: int, what: str) -> None:
        self._walked += count
        if self._walked > _MAX_WALKED:
            raise self.broken(f"{what} has more elements than are possible")

    def _skip_strings(self, count: int, what: str) -> None:
        """Walk over strings without making them: a vocabulary has several hundred thousand."""
        data, position, end, available = self.data, self.position, self.file_bytes, len(self.data)
        read = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if position + 8 > available:
                self.position = position
                self.take(8, what)  # says whether the file is too short, or only what was read of it
            length = read(data, position)[0]
            position += 8
            if length > end - position:
                raise self.broken(f"{what} has a string of {length} bytes at byte {position}, the file has {end - position} left")
            position += length
        self.take(position - self.position, what)

    def _code(self, kind: int, what: str) -> str:
        if kind not in SCALARS:
            raise self.broken(f"{what} has elements of the unknown type {kind}")
        return SCALARS[kind]


def made(cursor: Cursor, kind: int, length: int, key: str) -> list[Any]:
    """The elements of an array that has been walked over before."""
    if kind == STRING:
        return [cursor.text(f"array {key!r}") for _ in range(length)]
    if kind == ARRAY:
        inner = []
        for _ in range(length):
            element = int(cursor.scalar("I", key))
            inner.append(made(cursor, element, int(cursor.scalar("Q", key)), key))
        return inner
    if kind == BOOL:
        return [cursor.flag(f"array {key!r}") for _ in range(length)]
    code = SCALARS[kind]
    return list(struct.unpack_from(f"<{length}{code}", cursor.data, cursor.take(length * struct.calcsize("<" + code), key)))
