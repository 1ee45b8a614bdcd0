"""A model from its name to a snapshot: what is fetched, kept, shared, refused, and found again by huggingface_hub as it is."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from huggingface_hub import constants, file_download, hf_hub_download, scan_cache_dir, snapshot_download
from loopback_hub import GOOD_TOKEN, Fault, LoopbackHub, etag_of
from loopback_models import model_files, wanted
from loopback_pulls import Ear, planned, pull
from loopback_setup import assert_pulled, connect

from rimuru_cli.hub import download, repository_cache, transfer
from rimuru_cli.hub.download import Download, Status
from rimuru_cli.hub.library import find_models
from rimuru_cli.hub.pull_manifest import PullManifest
from rimuru_cli.hub.remote_files import RemoteFile
from rimuru_cli.hub.repository_cache import RepositoryCache
from rimuru_cli.hub.resolve import resolve_model
from rimuru_models.errors import NoSpaceError, NotFoundError, RimuruError, VerificationError

FILES = model_files(config={"intermediate_size": 512})
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def server() -> Iterator[LoopbackHub]:
    with LoopbackHub(store=True) as hub:
        hub.add("org/name", FILES)
        yield hub


@pytest.fixture(autouse=True)
def cache(server: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hf" / "hub"
    connect(monkeypatch, server, folder)
    monkeypatch.setattr(file_download, "_are_symlinks_supported_in_dir", {})
    return folder


def test_a_pull_is_what_other_tools_find(server: LoopbackHub, cache: Path) -> None:
    pulled, ear = pull()
    commit = server.repositories["org/name"].refs["main"]
    assert pulled.path == cache / "models--org--name" / "snapshots" / commit
    assert_pulled(pulled.path, FILES)
    assert set(ear.files.values()) == {"fetched"} and set(ear.files) == set(wanted(FILES))
    assert server.sent() == sum(len(data) for data in wanted(FILES).values()) == pulled.received_bytes, "nothing else, and nothing twice"
    assert snapshot_download("org/name", local_files_only=True) == str(pulled.path)
    for name in wanted(FILES):
        assert hf_hub_download("org/name", name, local_files_only=True) == str(pulled.path / name)
    scanned = scan_cache_dir(cache)
    assert not scanned.warnings and not scanned.incomplete_files
    assert [repo.repo_id for repo in scanned.repos] == ["org/name"]
    assert (cache / "CACHEDIR.TAG").is_file()
    assert resolve_model("org/name").path == pulled.path
    assert not list(cache.rglob("*manifest*")), "the shared cache holds nothing of ours"


def test_huggingface_hub_online_fetches_only_what_we_left_out(server: LoopbackHub) -> None:
    pull()
    server.log.clear()
    folder = Path(snapshot_download("org/name", endpoint=server.url))
    assert {request.file for request in server.bodies()} == set(FILES) - set(wanted(FILES))
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == set(FILES)
    server.log.clear()
    assert pull()[0].received_bytes == 0


def test_what_huggingface_hub_fetched_is_used(server: LoopbackHub) -> None:
    snapshot_download("org/name", endpoint=server.url, allow_patterns=["model-*.safetensors", "config.json"])
    server.log.clear()
    pulled, ear = pull()
    assert {request.file for request in server.bodies()} <= set(wanted(FILES)) - {"config.json", SHARD}
    assert ear.files[SHARD] == ear.files["config.json"] == "present"
    assert ear.statuses[-1].checked_bytes > len(FILES[SHARD]), "other tools check sizes only, so we read what they left"
    assert_pulled(pulled.path, FILES)


def test_progress_has_the_true_total_from_the_start(server: LoopbackHub) -> None:
    server.bytes_per_s = 2_000_000
    _, ear = pull()
    total = sum(len(data) for data in wanted(FILES).values())
    assert {status.total_bytes for status in ear.statuses} == {total}
    done = [status.done_bytes for status in ear.statuses]
    assert done == sorted(done) and done[-1] == total
    last = ear.statuses[-1]
    assert (last.files_done, last.files_total) == (len(wanted(FILES)),) * 2


@pytest.mark.parametrize("how", ["flip", "flip in place", "truncate", "delete", "dangle"])
def test_a_damaged_file_is_found_and_only_that_is_fetched_again(server: LoopbackHub, cache: Path, how: str) -> None:
    pulled, _ = pull()
    blob = (pulled.path / SHARD).resolve()
    data = bytearray(blob.read_bytes())
    data[1000] ^= 1
    if how == "flip":
        blob.unlink()
        blob.write_bytes(data)
    elif how == "flip in place":
        blob.write_bytes(data)
    elif how == "truncate":
        blob.write_bytes(data[:500])
    else:
        blob.unlink()
        if how == "dangle":
            blob.symlink_to(cache / "nowhere")
    server.log.clear()
    again, ear = pull()
    assert again.path == pulled.path
    assert_pulled(again.path, FILES)
    assert {request.file for request in server.bodies()} == {SHARD}
    assert ear.files[SHARD] == ("repaired" if how.startswith("flip") else "fetched")
    assert not blob.is_symlink()


def test_damage_that_other_tools_accept_is_found(server: LoopbackHub) -> None:
    server.faults[SHARD] = [Fault("corrupt", at=2000)]
    folder = Path(snapshot_download("org/name", endpoint=server.url))
    assert (folder / SHARD).read_bytes() != FILES[SHARD], "it checks sizes only"
    server.log.clear()
    pulled, ear = pull()
    assert (pulled.path / SHARD).read_bytes() == FILES[SHARD]
    assert {request.file for request in server.bodies()} == {SHARD} and ear.files[SHARD] == "repaired"
    assert any("damaged" in notice for notice in ear.notices)


@pytest.mark.parametrize("place", [0, 9, 300_000])
def test_content_that_is_wrong_on_the_hub_never_gets_a_name(server: LoopbackHub, cache: Path, place: int) -> None:
    server.lasting[SHARD] = Fault("corrupt", at=place)  # the first bytes are read for the plan, too; only the checksum can judge them
    with pytest.raises(VerificationError, match=SHARD):
        pull()
    assert not (cache / "models--org--name" / "blobs" / etag_of(FILES[SHARD])).exists()
    assert not list((cache / "models--org--name" / "snapshots").iterdir())
    with pytest.raises(NotFoundError):
        resolve_model("org/name")


def test_nothing_unfinished_is_ever_visible(server: LoopbackHub, cache: Path) -> None:
    plan, hub = planned()
    server.lasting[SHARD] = Fault("status", status=500)
    with pytest.raises(RimuruError, match="HTTP 500"):
        Download(plan, hub, Ear()).run()
    assert not list((cache / "models--org--name" / "snapshots").iterdir())
    with pytest.raises(NotFoundError, match="not been finished") as caught:
        resolve_model("org/name")
    assert caught.value.hint == "type `rimuru pull org/name`; it goes on where it stopped"
    assert not scan_cache_dir(cache).warnings
    kept = sum(path.stat().st_size for path in (cache / "models--org--name" / "blobs").iterdir())
    del server.lasting[SHARD]
    server.log.clear()
    pulled, _ = pull()
    assert_pulled(pulled.path, FILES)
    assert server.sent() == plan.total_bytes - kept, "what had arrived is not fetched again"


def test_goes_on_with_what_older_and_killed_tools_left(server: LoopbackHub, cache: Path) -> None:
    first, second = (name for name in FILES if name.startswith("model-") and name != SHARD)
    blobs = cache / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{etag_of(FILES[first])}.incomplete").write_bytes(FILES[first][:200_000])
    orphan = blobs / f"{etag_of(FILES[second])}.0123abcd.incomplete"
    orphan.write_bytes(FILES[second][:210_000])
    live = blobs / f"{etag_of(FILES[SHARD])}.89abcdef.incomplete"
    live.write_bytes(FILES[SHARD][:220_000])
    os.utime(orphan, (0, 0))
    pulled, _ = pull()
    assert_pulled(pulled.path, FILES)
    assert min(r.start for r in server.bodies(first)) == 200_000
    assert max(r.start for r in server.bodies(second)) == 210_000 and not orphan.exists()
    assert live.exists() and server.sent(SHARD) == len(FILES[SHARD]), "one that may still be written to is left alone"


def test_the_token_goes_to_the_hub_and_to_nobody_else(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repositories["org/name"].private = True
    monkeypatch.setenv("HF_TOKEN", GOOD_TOKEN)
    pulled, _ = pull()
    assert_pulled(pulled.path, FILES)
    assert {request.server for request in server.log} == {"hub", "store"}
    for request in server.log:
        assert request.headers.get("authorization") == (f"Bearer {GOOD_TOKEN}" if request.server == "hub" else None)
    assert GOOD_TOKEN not in PullManifest.all_of("org/name")[0].path.read_text(encoding="utf-8")


def test_the_disk_fills_up_on_the_way(monkeypatch: pytest.MonkeyPatch, server: LoopbackHub, cache: Path) -> None:
    write = transfer.PartFile.write
    left = 400_000

    def full(self: transfer.PartFile, offset: int, data: bytes) -> None:
        nonlocal left
        left -= len(data)
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, offset, data)

    plan, hub = planned()
    monkeypatch.setattr(transfer.PartFile, "write", full)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 0))  # type: ignore[attr-defined]
    with pytest.raises(NoSpaceError, match=r"bytes\) are missing"):
        Download(plan, hub, Ear()).run()
    monkeypatch.undo()
    connect(monkeypatch, server, cache)
    kept = sum(path.stat().st_size for path in (cache / "models--org--name" / "blobs").iterdir())
    assert 0 < kept <= 400_000
    server.log.clear()
    pulled, _ = pull()
    assert_pulled(pulled.path, FILES)


def test_another_process_has_a_file(server: LoopbackHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_IDLE_SECONDS", 0.2)
    plan, hub = planned()
    plan.cache.prepare()
    etag = etag_of(FILES[SHARD])
    lock = FileLock(cache / ".locks" / "models--org--name" / f"{etag}.lock")
    lock.acquire()
    ear = Ear()
    waiting = threading.Event()
    status = ear.status

    def watch(now: Status) -> None:
        status(now)
        if now.waiting_for == SHARD and now.files_done == now.files_total - 1 and ear.notices and not waiting.is_set():
            waiting.set()
            # The other process finishes it.
            (plan.cache.blob(etag)).write_bytes(FILES[SHARD])
            lock.release()

    ear.status = watch  # type: ignore[method-assign]
    pulled = Download(plan, hub, ear).run()
    assert waiting.is_set() and ear.files[SHARD] == "present"
    assert f"locked {SHARD}" in ear.notices[0] and f"{etag}.lock" in ear.notices[0], "it says whom it waits for"
    assert ear.statuses[-1].done_bytes == plan.total_bytes
    assert_pulled(pulled.path, FILES)


def test_without_links_the_snapshot_holds_the_files(server: LoopbackHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", True)
    pulled, _ = pull()
    assert_pulled(pulled.path, FILES)
    assert not any(path.is_symlink() for path in pulled.path.iterdir())
    assert not list((cache / "models--org--name" / "blobs").iterdir()), "nothing is there twice"
    assert snapshot_download("org/name", local_files_only=True) == str(pulled.path)
    server.log.clear()
    assert planned()[0].complete
    data = bytearray((pulled.path / SHARD).read_bytes())
    data[-1] ^= 1
    (pulled.path / SHARD).write_bytes(data)
    again, ear = pull()
    assert ear.files[SHARD] == "repaired" and {request.file for request in server.bodies()} == {SHARD}
    assert_pulled(again.path, FILES)


def test_without_links_another_commit_uses_what_did_not_change(server: LoopbackHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", True)
    older, _ = pull()
    changed = {**FILES, "generation_config.json": b'{"do_sample": true}'}
    server.add("org/name", changed)
    server.log.clear()
    newer, _ = pull()
    assert {request.file for request in server.bodies()} == {"generation_config.json"}
    assert_pulled(newer.path, changed)
    assert_pulled(older.path, FILES)


def test_two_names_for_the_same_content(server: LoopbackHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {**model_files(shards=1, extra=False), "vocab.json": b"{}", "added_tokens.json": b"{}"}
    server.add("org/twins", files)
    assert_pulled(pull("org/twins")[0].path, files)
    shutil.rmtree(cache)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", True)
    pulled, ear = pull("org/twins")
    assert_pulled(pulled.path, files)
    assert ear.statuses[-1].done_bytes == ear.statuses[-1].total_bytes


def test_headers_that_contradict_each_other_are_an_objection(server: LoopbackHub) -> None:
    index = json.loads(FILES["model.safetensors.index.json"])
    index["weight_map"]["model.norm.weight"] = (
        SHARD if index["weight_map"]["model.norm.weight"] != SHARD else "model-00001-of-00003.safetensors"
    )
    server.add("org/torn", {**FILES, "model.safetensors.index.json": json.dumps(index).encode()})
    plan, _ = planned("org/torn")
    assert "says that it is in" in plan.objections[0].text


def test_a_cache_that_cannot_be_written(server: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    with pytest.raises(RimuruError, match=r"cannot be used: Not a directory \(") as caught:
        pull()
    assert caught.value.exit_code == 1 and "HF_HOME" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("number", "words", "code"),
    [
        (errno.EROFS, "cannot be used: Read-only", 1),
        (errno.EACCES, "cannot be used: Permission", 1),
        (errno.EISDIR, "cannot be used: Is a", 1),
        (errno.EFBIG, "no file as large", 5),
    ],
)
def test_what_the_disk_refuses_is_said(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch, number: int, words: str, code: int) -> None:
    def refuse(self: transfer.PartFile, offset: int, data: bytes) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(transfer.PartFile, "write", refuse)
    with pytest.raises(RimuruError, match=words) as caught:
        pull()
    assert caught.value.exit_code == code and "HF_HOME" in str(caught.value.hint)


def test_a_folder_where_a_file_belongs_is_named(server: LoopbackHub) -> None:
    pulled, _ = pull()
    (pulled.path / "LICENSE").unlink()
    (pulled.path / "LICENSE").mkdir()
    with pytest.raises(RimuruError, match=r"snapshots.*LICENSE is a folder"):
        pull()


def test_parts_of_what_another_tool_finished_go(server: LoopbackHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository_cache, "_STILL_SECONDS", 0.0)
    etag = etag_of(FILES[SHARD])
    snapshot_download("org/name")
    blobs = cache / "models--org--name" / "blobs"
    for name in (f"{etag}.incomplete", f"{etag}.0123abcd.incomplete"):
        (blobs / name).write_bytes(FILES[SHARD][:1000])
        os.utime(blobs / name, (0, 0))
    (blobs / f"{'0' * 64}.incomplete").write_bytes(b"of another commit")
    pull()
    assert [path.name for path in blobs.glob("*.incomplete")] == [f"{'0' * 64}.incomplete"]


def test_what_another_tool_writes_just_now_stays(server: LoopbackHub, cache: Path) -> None:
    blobs = cache / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    busy = blobs / f"{etag_of(FILES[SHARD])}.0123abcd.incomplete"
    busy.write_bytes(FILES[SHARD][:1000])
    pull()
    assert busy.is_file()


def test_keyboard_interrupt_keeps_what_there_is(server: LoopbackHub, cache: Path) -> None:
    server.bytes_per_s = 300_000
    plan, hub = planned()
    ear = Ear()
    original: Callable[[Status], None] = ear.status

    def press(status: Status) -> None:
        original(status)
        if status.received_bytes:
            raise KeyboardInterrupt

    ear.status = press  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        Download(plan, hub, ear).run()
    server.bytes_per_s = None
    parts = {path.name.partition(".")[0]: path.stat().st_size for path in (cache / "models--org--name" / "blobs").glob("*.incomplete")}
    assert parts
    server.log.clear()
    pulled, _ = pull()
    assert_pulled(pulled.path, FILES)
    by_etag = {etag_of(data): name for name, data in FILES.items()}
    for etag, size in parts.items():
        assert all(request.start >= size for request in server.bodies(by_etag[etag]))


def test_without_a_place_for_the_manifest_the_model_is_whole_all_the_same(
    server: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("RIMURU_HOME", str(tmp_path / "file" / "home"))
    pulled, ear = pull()
    assert_pulled(pulled.path, FILES)
    assert "manifest could not be written" in ear.notices[-1]
    assert resolve_model("org/name").path == pulled.path
    server.log.clear()
    again, ear = pull()
    assert again.received_bytes == 0 and set(ear.files.values()) == {"present"}


@pytest.mark.parametrize("links", [1, 4, 9])
def test_a_snapshot_that_was_cut_short_while_it_was_made_shows(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch, links: int) -> None:
    link, left = RepositoryCache.link, links

    def torn(self: RepositoryCache, commit: str, file: RemoteFile, *, keep: bool = False) -> Path:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return link(self, commit, file, keep=keep)

    monkeypatch.setattr(RepositoryCache, "link", torn)
    with pytest.raises(KeyboardInterrupt):
        pull()
    (model,) = find_models()
    assert (model.repository, model.status) == ("org/name", "incomplete")
    monkeypatch.setattr(RepositoryCache, "link", link)
    assert_pulled(pull()[0].path, FILES)
