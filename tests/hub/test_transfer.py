"""One file over a bad connection: whatever happens on the way, the bytes are right, and none is asked for twice."""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopback_hub import Fault, LoopbackHub, etag_of
from loopback_setup import connect

from rimuru_cli.hub import transfer
from rimuru_cli.hub.patience import Cancelled, UnreachableError
from rimuru_cli.hub.remote import Hub
from rimuru_cli.hub.remote_files import RemoteFile
from rimuru_cli.hub.transfer import Origin, PartFile, Tally, Transfer
from rimuru_models.errors import NotFoundError, RimuruError, VerificationError

DATA = random.Random(1).randbytes(50_000)
NAME = "model.safetensors"
FILE = RemoteFile(NAME, len(DATA), etag_of(DATA))


@pytest.fixture(scope="module")
def server() -> Iterator[LoopbackHub]:
    with LoopbackHub(store=True) as hub:
        hub.add("org/name", {NAME: DATA, "small.json": b"{}", "empty.txt": b""})
        yield hub


@pytest.fixture(autouse=True)
def fresh(server: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.log.clear()
    server.faults.clear()
    server.lasting.clear()
    connect(monkeypatch, server, tmp_path / "cache", read_seconds=1)


class Run:
    """One process's worth of fetching."""

    def __init__(self, server: LoopbackHub, file: RemoteFile = FILE) -> None:
        self.notices: list[str] = []
        self.waits: list[float] = []
        self.hub = Hub(notice=self.notices.append, wait=self._wait)
        self.tally = Tally()
        self.file = file
        commit = server.repositories["org/name"].refs["main"]
        self.transfer = Transfer(self.hub, Origin("org/name", commit), self.tally)

    def _wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return False

    def fetch(self, part: Path, counted: int = 0) -> str:
        return self.transfer.fetch(self.file, part, counted)


def ranges(server: LoopbackHub) -> list[tuple[int, int]]:
    return [(request.start, request.sent) for request in server.bodies(NAME)]


def test_a_whole_file(server: LoopbackHub, tmp_path: Path) -> None:
    run = Run(server)
    assert run.fetch(tmp_path / "p") == hashlib.sha256(DATA).hexdigest()
    assert (tmp_path / "p").read_bytes() == DATA
    assert (run.tally.done, run.tally.received, run.notices) == (len(DATA), len(DATA), [])
    assert ranges(server) == [(0, len(DATA))]


def test_small_and_empty_files(server: LoopbackHub, tmp_path: Path) -> None:
    for name, data in (("small.json", b"{}"), ("empty.txt", b"")):
        run = Run(server, RemoteFile(name, len(data), etag_of(data)))
        assert run.fetch(tmp_path / name) == hashlib.sha256(data).hexdigest()
        assert (tmp_path / name).read_bytes() == data


@pytest.mark.parametrize("have", [0, 1, 4096, 49_999, 50_000])
def test_goes_on_where_the_file_ends(server: LoopbackHub, tmp_path: Path, have: int) -> None:
    (tmp_path / "p").write_bytes(DATA[:have])
    run = Run(server)
    run.fetch(tmp_path / "p", counted=have)
    assert (tmp_path / "p").read_bytes() == DATA
    assert server.sent(NAME) == len(DATA) - have == run.tally.received
    assert run.tally.done == len(DATA) - have, "what was counted before is not counted again"


def test_closed_early_again_and_again(server: LoopbackHub, tmp_path: Path) -> None:
    server.faults[NAME] = [Fault("close", at=5000) for _ in range(9)]
    run = Run(server)
    run.fetch(tmp_path / "p")
    assert (tmp_path / "p").read_bytes() == DATA
    assert server.sent(NAME) == len(DATA), "not one byte twice"
    assert run.waits == [0.5] * 9, "each attempt brought something, so none counts as in vain"


def test_reset(server: LoopbackHub, tmp_path: Path) -> None:
    server.faults[NAME] = [Fault("reset", at=at) for at in (0, 1, 9000, 20_000)]
    run = Run(server)
    run.fetch(tmp_path / "p")
    assert (tmp_path / "p").read_bytes() == DATA
    # A reset may swallow what was on its way; what had been written is never asked for again.
    assert run.tally.received == len(DATA)
    starts = [start for start, _ in ranges(server)]
    assert starts == sorted(starts)


def test_a_connection_that_goes_silent(server: LoopbackHub, tmp_path: Path) -> None:
    server.faults[NAME] = [Fault("stall", at=10_000, seconds=30)]
    run = Run(server)
    run.fetch(tmp_path / "p")
    assert (tmp_path / "p").read_bytes() == DATA
    assert "stopped answering" in run.notices[0]
    assert ranges(server)[1][0] == 10_000


def test_a_server_that_ignores_range(server: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(DATA[:30_000])
    server.lasting[NAME] = Fault("whole")
    run = Run(server)
    run.fetch(tmp_path / "p", counted=30_000)
    assert (tmp_path / "p").read_bytes() == DATA
    assert run.tally.received == 20_000, "what came again was not taken twice"


def test_a_server_that_ignores_range_and_breaks_off(server: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(DATA[:30_000])
    server.faults[NAME] = [Fault("close", at=10_000), Fault("whole"), Fault("whole")]
    run = Run(server)
    run.fetch(tmp_path / "p", counted=30_000)
    assert (tmp_path / "p").read_bytes() == DATA


@pytest.mark.parametrize("fault", [Fault("wrong range"), Fault("gzip")], ids=["wrong-range", "gzip"])
def test_an_answer_that_is_not_the_part_asked_for(server: LoopbackHub, tmp_path: Path, fault: Fault) -> None:
    (tmp_path / "p").write_bytes(DATA[:30_000])
    server.faults[NAME] = [fault]
    run = Run(server)
    run.fetch(tmp_path / "p", counted=30_000)
    assert (tmp_path / "p").read_bytes() == DATA
    assert len(server.bodies(NAME)) == 2


def test_a_whole_file_that_is_compressed_against_orders(server: LoopbackHub, tmp_path: Path) -> None:
    server.lasting[NAME] = Fault("gzip")
    Run(server).fetch(tmp_path / "p")
    assert (tmp_path / "p").read_bytes() == DATA


def test_an_answer_that_claims_to_be_complete_and_is_short(server: LoopbackHub, tmp_path: Path) -> None:
    server.faults[NAME] = [Fault("short", at=12_345), Fault("close", at=10), Fault("short", at=20)]
    run = Run(server)
    run.fetch(tmp_path / "p")
    assert (tmp_path / "p").read_bytes() == DATA
    assert "sent 12345 bytes of a file that has 50000" in run.notices[0]
    assert run.tally.received == len(DATA)


def test_a_part_that_is_shorter_than_it_says(server: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(DATA[:100])
    server.lasting[NAME] = Fault("short", at=5000)
    with pytest.raises(UnreachableError, match="sent 5000 bytes as bytes 100 to 49999"):
        Run(server).fetch(tmp_path / "p")
    assert (tmp_path / "p").read_bytes() == DATA[:100]


def test_a_page_in_place_of_the_file_leaves_nothing_behind(server: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(DATA[:100])
    server.lasting[NAME] = Fault("short whole", at=5000)
    with pytest.raises(UnreachableError, match="sent 5000 bytes"):
        Run(server).fetch(tmp_path / "p")
    assert (tmp_path / "p").read_bytes() == DATA[:100]


def test_errors_of_the_server_and_rate_limits(server: LoopbackHub, tmp_path: Path) -> None:
    server.faults[NAME] = [
        Fault("status", status=503),
        Fault("status", status=429, headers={"Retry-After": "17"}),
        Fault("close", at=10),
        Fault("status", status=403),  # the store's: a signed address that has expired
    ]
    run = Run(server)
    run.fetch(tmp_path / "p")
    assert (tmp_path / "p").read_bytes() == DATA
    assert run.waits == [0.5, 17, 0.5, 1]
    assert len([request for request in server.log if request.server == "hub"]) == 5, "every attempt asks the hub for a new address"


def test_gives_up_in_the_end_and_keeps_what_there_is(server: LoopbackHub, tmp_path: Path) -> None:
    server.faults[NAME] = [Fault("close", at=7000)]
    server.lasting[NAME] = Fault("status", status=500)
    run = Run(server)
    with pytest.raises(UnreachableError, match="HTTP 500"):
        run.fetch(tmp_path / "p")
    assert (tmp_path / "p").read_bytes() == DATA[:7000]
    assert len(run.waits) == transfer.ATTEMPTS - 1


def test_a_file_that_is_not_there(server: LoopbackHub, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no file gone"):
        Run(server, RemoteFile("gone", 5, "0" * 40)).fetch(tmp_path / "p")


@pytest.mark.parametrize("junk", [b"x" * 30_000, DATA[:10] + b"!" + DATA[11:], DATA + b"more"], ids=["other", "changed", "longer"])
def test_a_beginning_that_is_not_of_this_file(server: LoopbackHub, tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "p").write_bytes(junk)
    run = Run(server)
    run.fetch(tmp_path / "p", counted=len(junk) if len(junk) <= len(DATA) else 0)
    assert (tmp_path / "p").read_bytes() == DATA
    assert run.tally.done == len(DATA) - (len(junk) if len(junk) <= len(DATA) else 0)


def test_damage_on_the_way_is_found_and_mended(server: LoopbackHub, tmp_path: Path) -> None:
    server.faults[NAME] = [Fault("corrupt", at=777)]
    run = Run(server)
    run.fetch(tmp_path / "p")
    assert (tmp_path / "p").read_bytes() == DATA
    assert run.tally.done == len(DATA)
    assert any("damaged" in notice for notice in run.notices)


def test_damage_that_stays_is_refused_and_nothing_is_left(server: LoopbackHub, tmp_path: Path) -> None:
    server.lasting[NAME] = Fault("corrupt", at=777)
    run = Run(server)
    with pytest.raises(VerificationError, match="wrong checksum twice") as caught:
        run.fetch(tmp_path / "p")
    assert caught.value.exit_code == 4 and NAME in caught.value.what
    assert not (tmp_path / "p").exists() and run.tally.done == 0


def test_cancelled_in_the_middle_keeps_what_there_is(server: LoopbackHub, tmp_path: Path) -> None:
    run = Run(server)
    server.faults[NAME] = [Fault("stall", at=20_000, seconds=0.5)]
    before = run.tally.arrived

    def arrived(num_bytes: int) -> None:
        before(num_bytes)
        run.hub.cancelled.set()

    run.tally.arrived = arrived  # type: ignore[method-assign]
    with pytest.raises(Cancelled):
        run.fetch(tmp_path / "p")
    kept = (tmp_path / "p").read_bytes()
    assert 0 < len(kept) < len(DATA) and DATA.startswith(kept)


@pytest.mark.skipif(not hasattr(transfer.os, "posix_fallocate"), reason="open files cannot be deleted there")
def test_a_part_that_another_program_deletes(server: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_LOOK_BYTES", 1)
    run = Run(server)
    before = run.tally.arrived

    def arrived(num_bytes: int) -> None:
        before(num_bytes)
        (tmp_path / "p").unlink(missing_ok=True)

    run.tally.arrived = arrived  # type: ignore[method-assign]
    with pytest.raises(RimuruError, match="deleted"):
        run.fetch(tmp_path / "p")


def test_two_writers_of_one_part_do_not_harm_each_other(tmp_path: Path) -> None:
    # On file systems where locks do nothing: same bytes, same places.
    with PartFile(tmp_path / "p") as first, PartFile(tmp_path / "p") as second:
        first.write(0, DATA[:100])
        second.write(0, DATA[:50])
        second.write(50, DATA[50:300])
        first.write(100, DATA[100:200])
    assert (tmp_path / "p").read_bytes() == DATA[:300]


cuts = st.one_of(
    st.builds(Fault, st.sampled_from(["close", "reset", "short"]), at=st.integers(0, len(DATA))),
    st.builds(Fault, st.just("status"), status=st.sampled_from([500, 502, 503, 429])),
    st.builds(Fault, st.sampled_from(["whole", "wrong range", "gzip"])),
)


class Killed(BaseException):
    """The process is gone, between two writes."""


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(faults=st.lists(cuts, max_size=8), kills=st.lists(st.integers(0, len(DATA)), max_size=4))
def test_any_sequence_of_cuts_resets_and_kills(server: LoopbackHub, tmp_path: Path, faults: list[Fault], kills: list[int]) -> None:
    """The bytes are right in the end; every request begins where the file on the disk ended; every byte is taken from the network once."""
    part = tmp_path / "part"
    part.unlink(missing_ok=True)
    server.log.clear()
    server.faults[NAME] = list(faults)
    taken: list[tuple[int, int]] = []
    for kill in itertools.chain(kills, itertools.repeat(None, 5)):
        run = Run(server)
        have = part.stat().st_size if part.exists() else 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PartFile, "write", _recording(taken, None if kill is None else have + kill))
            try:
                run.fetch(part, counted=have)
                break
            except (Killed, UnreachableError):  # the next pull goes on
                continue
    assert part.read_bytes() == DATA
    assert [start for start, _ in taken] == [0, *(start + size for start, size in taken[:-1])][: len(taken)], "in order, none twice"
    assert sum(size for _, size in taken) == len(DATA)
    if all(fault.kind in ("close", "status") for fault in faults) and not kills:
        assert server.sent(NAME) == len(DATA)


def _recording(taken: list[tuple[int, int]], kill_at: int | None) -> Callable[[PartFile, int, bytes], None]:
    """A `write` that notes what it is given, and dies when the file has reached a size; in the middle of a write, as a real kill may."""
    write = PartFile.write

    def record(self: PartFile, offset: int, data: bytes) -> None:
        if kill_at is not None and offset + len(data) > kill_at:
            data = data[: max(0, kill_at - offset)]
            write(self, offset, data)
            if data:
                taken.append((offset, len(data)))
            raise Killed
        write(self, offset, data)
        taken.append((offset, len(data)))

    return record


def test_tally_adds_up_from_many_threads() -> None:
    tally = Tally(5)

    def work() -> None:
        for _ in range(1000):
            tally.arrived(3)
            tally.correct(-1)
            tally.has_checked(2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tally.done, tally.received, tally.checked) == (5 + 8000, 12_000, 8000)
