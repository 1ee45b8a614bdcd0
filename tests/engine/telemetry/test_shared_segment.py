"""Frames in shared memory: never torn, for one user only, and nothing is left where there is no room."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rimuru_cli.engine.telemetry import segment as words
from rimuru_cli.engine.telemetry.layout import DamagedTables
from rimuru_cli.engine.telemetry.segment import Segment

SLOT = 1 << 16

WRITER = """
import sys, time
from pathlib import Path
from rimuru_cli.engine.telemetry.segment import STATE, CLOSED, Segment
segment = Segment.create(Path(sys.argv[1]), int(sys.argv[2]), {}, {})
end = time.monotonic() + float(sys.argv[3])
number = 0
while time.monotonic() < end:
    number += 1
    half = 4 * (1 + number * 7919 % 8000)
    segment.write([(0, bytes([number % 251]) * half), (half, bytes([number % 251]) * half)], 2 * half)
segment.set(STATE, CLOSED)
print(number)
"""


def test_readers_never_see_a_torn_frame(tmp_path: Path) -> None:
    """Another process writes as fast as it can, far faster than any engine; every frame that is read is whole and the right one."""
    path = tmp_path / "x.engine"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(SLOT), "1.5"], stdout=subprocess.PIPE, text=True) as writer:
        deadline = time.monotonic() + 60
        segment = None
        while segment is None and time.monotonic() < deadline:
            segment = Segment.open(path) if path.exists() else None
        assert segment is not None
        last = seen = 0
        while segment.get(words.STATE) == words.ALIVE and writer.poll() is None:
            found = segment.read(after=last)
            if found is None:
                continue
            number, data = found
            assert number > last
            assert data == bytes([number % 251]) * (8 * (1 + number * 7919 % 8000))
            last, seen = number, seen + 1
        written = int(writer.communicate()[0])
        segment.close()
    assert written > 100 and seen > 10


def test_a_frame_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    segment = Segment.create(tmp_path / "x.engine", SLOT, {}, {})
    assert segment.read() is None
    segment.write([(0, b"one")], 3)
    segment.write([(0, b"two")], 3)
    with pytest.raises(RuntimeError):
        segment.write(_breaks_off(), 5)  # an engine that is interrupted in the middle
    assert segment.read() == (2, b"two") and segment.read(after=2) is None
    segment.write([(0, b"three")], 5)
    assert segment.read(after=2) == (3, b"three")


def _breaks_off() -> list[tuple[int, bytes]]:
    class Broken(list[tuple[int, bytes]]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            yield 0, b"thr"
            raise RuntimeError

    return Broken()


def test_readers_and_engine_share_their_words(tmp_path: Path) -> None:
    engine = Segment.create(tmp_path / "x.engine", SLOT, {"model": "m"}, {words.PID: 5})
    reader = Segment.open(tmp_path / "x.engine")
    assert reader is not None and reader.card == {"model": "m"} and reader.get(words.PID) == 5
    assert engine.asked(0) is None
    reader.ask(1 << 40, 77)
    assert engine.asked(0) == (77, 1 << 40) and engine.asked(77) is None
    engine.close()
    engine.close()
    assert reader.get(words.STATE) == words.ALIVE
    reader.close()


@pytest.mark.skipif(os.name != "posix", reason="modes are a matter of POSIX")
def test_only_this_user_may_open_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Segment.create(tmp_path / "x.engine", SLOT, {}, {}).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x.engine").stat().st_mode) == 0o600


def test_an_existing_file_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "x.engine").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        Segment.create(tmp_path / "x.engine", SLOT, {}, {})
    assert (tmp_path / "x.engine").read_bytes() == b"mine"


def test_links_are_not_followed(tmp_path: Path) -> None:
    Segment.create(tmp_path / "real", SLOT, {}, {}).close()
    try:
        (tmp_path / "x.engine").symlink_to(tmp_path / "real")
    except OSError:
        pytest.skip("no links here")
    if hasattr(os, "O_NOFOLLOW"):
        with pytest.raises(OSError):
            Segment.open(tmp_path / "x.engine")


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fdopen

    class Full:
        def __init__(self, descriptor: int) -> None:
            self._file = real(descriptor, "r+b", buffering=0)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *exc_info: object) -> None:
            self._file.close()

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdopen", lambda descriptor, *args, **kwargs: Full(descriptor))
    with pytest.raises(OSError, match="No space"):
        Segment.create(tmp_path / "x.engine", SLOT, {}, {})
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data", [b"", b"x" * 5000, b"\0" * 5000, b"\0" * 200_000])
def test_other_files_are_none_of_ours(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.engine").write_bytes(data)
    assert Segment.open(tmp_path / "x.engine") is None


def test_absurd_numbers_are_refused(tmp_path: Path) -> None:
    segment = Segment.create(tmp_path / "x.engine", SLOT, {}, {})
    segment.write([(0, b"one")], 3)
    segment.set(12 + 1, 1 << 50)  # the length of the frame
    with pytest.raises(DamagedTables):
        segment.read()
    segment.set(words.SLOT_BYTES, 5)
    assert Segment.open(tmp_path / "x.engine") is None
