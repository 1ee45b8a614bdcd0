from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from cached_models import files_of, put_in_cache
from huggingface_hub import constants, scan_cache_dir
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback_models import model_files
from tiny_demo import write_tiny_demo

from rimuru_cli.hub import embedded, in_use, removal, usage
from rimuru_cli.hub.library import find_models, size_on_disk
from rimuru_cli.hub.pull_manifest import PulledFile, PullManifest
from rimuru_cli.hub.removal import Removal, carry_out, plan_removal
from rimuru_models.errors import NotFoundError, RimuruError, UsageError

WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder, work = tmp_path / "hf" / "hub", tmp_path / "here"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


def disk_bytes(folder: Path) -> int:
    return size_on_disk(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def remove(name: str, cache: Path) -> Removal:
    """Delete it and check that as much was freed as was said, but for references and other small notes."""
    before = disk_bytes(cache)
    planned = plan_removal(name)
    assert disk_bytes(cache) == before, "planning changes nothing"
    carry_out(planned)
    assert 0 <= before - disk_bytes(cache) - planned.freed_bytes < 1000
    return planned


@pytest.mark.parametrize("links", [True, False])
def test_a_whole_repository(cache: Path, links: bool) -> None:
    snapshot = put_in_cache(cache, "org/small", model_files(seed=1), links=links)
    put_in_cache(cache, "org/other", model_files(seed=2))
    usage.record_use(snapshot)
    planned = remove("org/small", cache)
    assert [model.name for model in planned.models] == ["org/small"]
    assert planned.kept_bytes == 0
    assert not (cache / "models--org--small").exists()
    assert [model.name for model in find_models()] == ["org/other"]
    assert usage.last_uses() == {}


def test_one_revision_leaves_what_others_need(cache: Path) -> None:
    first, second = model_files(shards=1, seed=1), model_files(shards=1, seed=2)
    main = put_in_cache(cache, "org/small", first)
    tagged = put_in_cache(cache, "org/small", second, ref="v2")
    planned = remove(f"org/small@{tagged.name}", cache)
    shared = sum(len(second[name]) for name in second if second[name] == first.get(name))
    assert planned.freed_bytes == sum(len(second[name]) for name in second if second[name] != first.get(name))
    assert planned.kept_bytes == shared > 0
    assert not tagged.exists() and not (cache / "models--org--small" / "refs" / "v2").exists()
    assert find_models()[0].status == "ready"
    assert files_of(main) == set(first)
    assert not scan_cache_dir(cache).warnings


@pytest.mark.parametrize("how", ["ref", "commit", "beginning"])
def test_revisions_by_branch_commit_or_its_beginning(cache: Path, how: str) -> None:
    put_in_cache(cache, "org/small", model_files(seed=1))
    tagged = put_in_cache(cache, "org/small", model_files(seed=2), ref="feature/x")
    word = {"ref": "feature/x", "commit": tagged.name, "beginning": tagged.name[:8]}[how]
    remove(f"org/small@{word}", cache)
    assert not tagged.exists()
    assert [model.name for model in find_models()] == ["org/small"]


def test_without_a_revision_all_of_them_go(cache: Path) -> None:
    put_in_cache(cache, "org/small", model_files(seed=1))
    put_in_cache(cache, "org/small", model_files(seed=2), ref="v2")
    assert len(remove("org/small", cache).models) == 2
    assert files_of(cache) == set()


def test_a_renamed_repository_with_the_same_commit_stays(cache: Path) -> None:
    for name in ("old/name", "new/name"):
        put_in_cache(cache, name, model_files())
    remove("old/name", cache)
    assert [model.name for model in find_models()] == ["new/name"]
    assert find_models()[0].status == "ready"


def test_an_unfinished_download(cache: Path) -> None:
    blobs = cache / "models--org--begun" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{'a' * 64}.incomplete").write_bytes(b"x" * 5000)
    (blobs / ("b" * 64)).write_bytes(b"y" * 700)
    planned = plan_removal("org/begun")
    assert planned.freed_bytes == 5700
    carry_out(planned)
    assert not blobs.parent.exists()


def test_parts_go_with_the_last_revision(cache: Path) -> None:
    put_in_cache(cache, "org/small", model_files())
    (cache / "models--org--small" / "blobs" / "abc.incomplete").write_bytes(b"x" * 5000)
    assert plan_removal("org/small").freed_bytes == sum(map(len, model_files().values())) + 5000
    remove("org/small", cache)
    assert files_of(cache) == set()


def test_parts_go_when_nothing_that_stays_is_unfinished(cache: Path) -> None:
    put_in_cache(cache, "org/small", model_files(seed=1))
    broken = {name: data for name, data in model_files(seed=2).items() if not name.startswith("model-00003")}
    unfinished = put_in_cache(cache, "org/small", broken, ref="v2")
    part = cache / "models--org--small" / "blobs" / "abc.incomplete"
    part.write_bytes(b"x" * 5000)
    remove("org/small@v2", cache)
    assert not part.exists() and not unfinished.exists()


def test_parts_stay_while_another_revision_is_unfinished(cache: Path) -> None:
    broken = {name: data for name, data in model_files(seed=1).items() if not name.startswith("model-00003")}
    put_in_cache(cache, "org/small", broken)
    put_in_cache(cache, "org/small", model_files(seed=2), ref="v2")
    part = cache / "models--org--small" / "blobs" / "abc.incomplete"
    part.write_bytes(b"x" * 5000)
    remove("org/small@v2", cache)
    assert part.exists()


@pytest.mark.parametrize("whole", [True, False])
def test_a_repository_that_huggingface_hub_calls_broken(cache: Path, whole: bool) -> None:
    main = put_in_cache(cache, "org/small", model_files(seed=1, shards=1))
    tagged = put_in_cache(cache, "org/small", model_files(seed=2, shards=1), ref="v2")
    (tagged / WEIGHTS).resolve().unlink()
    (cache / "models--org--small" / "refs" / "lost").write_text("c" * 40, encoding="utf-8")
    assert scan_cache_dir(cache).warnings
    remove("org/small" if whole else "org/small@v2", cache)
    if whole:
        assert files_of(cache) == set()
    else:
        assert not tagged.exists() and find_models()[0].status == "ready"
        assert files_of(main) == set(model_files(seed=1, shards=1))


def test_what_rimuru_noted_of_a_pull_goes_too(cache: Path) -> None:
    snapshot = put_in_cache(cache, "org/small", model_files())
    files = {name: PulledFile(len(data), "x", hashlib.sha256(data).hexdigest(), 1) for name, data in model_files().items()}
    PullManifest.now("org/small", snapshot.name, "main", files).write()
    PullManifest.now("org/small", "e" * 40, "v2", files).write()  # of a revision that was deleted by hand
    other = put_in_cache(cache, "org/small", model_files(seed=9), ref="v9")
    PullManifest.now("org/small", other.name, "v9", files).write()
    carry_out(plan_removal("org/small@v9"))
    assert {manifest.commit for manifest in PullManifest.all_of("org/small")} == {snapshot.name, "e" * 40}
    carry_out(plan_removal("org/small"))
    assert PullManifest.all_of("org/small") == []


@pytest.mark.parametrize("left", ["blobs", "snapshots", "refs", "part of a snapshot"])
def test_a_removal_that_was_killed_can_be_finished(cache: Path, left: str) -> None:
    snapshot = put_in_cache(cache, "org/small", model_files(extra=False))
    home = cache / "models--org--small"
    (home / "blobs" / "x.incomplete").write_bytes(b"x" * 100)
    for name in ("blobs", "snapshots", "refs"):
        if name != left and left != "part of a snapshot":
            shutil.rmtree(home / name)
    if left == "part of a snapshot":
        (snapshot / "config.json").unlink()
        (snapshot / "model-00001-of-00003.safetensors").resolve().unlink()
    if left == "refs":
        assert find_models() == [], "nothing that takes room"
        return
    assert [model.status for model in find_models()] in (["incomplete"], ["unusable"])
    carry_out(plan_removal(find_models()[0].name))
    assert files_of(cache) == set()


@pytest.mark.parametrize("name", ["org/smal", "org/none", "none/small@main", "org/small@v9", "org/small@0000000"])
def test_what_is_not_here(cache: Path, name: str) -> None:
    put_in_cache(cache, "org/small", model_files())
    with pytest.raises(NotFoundError):
        plan_removal(name)
    assert find_models()[0].status == "ready"


@pytest.mark.parametrize(
    "name", ["", "..", "../..", "org", "a/b/c", "org/sm\x00all", "org/../x", "models--org--small", "org/small@../../x"]
)
def test_names_that_cannot_be_one_delete_nothing(cache: Path, name: str) -> None:
    put_in_cache(cache, "org/small", model_files())
    before = files_of(cache)
    with pytest.raises((UsageError, NotFoundError)):
        plan_removal(name)
    assert files_of(cache) == before


def test_local_folders_are_not_ours_to_delete(cache: Path) -> None:
    folder = Path.cwd() / "org" / "small"
    folder.mkdir(parents=True)
    usage.record_use(folder)
    for name in ("org/small", str(folder), "./org/small"):
        with pytest.raises(UsageError, match="did not make") as caught:
            plan_removal(name)
        assert caught.value.hint == "delete it by hand"
    snapshot = put_in_cache(cache, "org/small", model_files())
    with pytest.raises(UsageError) as caught:
        plan_removal("org/small")
    assert f"org/small@{snapshot.name}" in (caught.value.hint or "")
    assert folder.is_dir() and snapshot.is_dir()


def test_a_snapshot_may_be_named_by_its_folder(cache: Path) -> None:
    snapshot = put_in_cache(cache, "small", model_files())
    remove(str(snapshot), cache)
    assert files_of(cache) == set()


HOLDER = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not tell what is mapped")
def test_not_while_a_process_has_it_mapped(cache: Path) -> None:
    snapshot = put_in_cache(cache, "org/small", model_files(shards=1))
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(snapshot / WEIGHTS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "mapped\n"
    planned = plan_removal("org/small")
    with pytest.raises(RimuruError, match=rf"in use by .*\(process {process.pid}\)"):
        carry_out(planned)
    assert find_models()[0].status == "ready"
    process.communicate("")
    carry_out(planned)
    assert files_of(cache) == set()


def test_our_own_mapping_is_not_a_user(cache: Path) -> None:
    snapshot = put_in_cache(cache, "org/small", model_files(shards=1))
    with (snapshot / WEIGHTS).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert in_use.users_of([snapshot / WEIGHTS]) == []
    assert in_use.users_of([]) == []


LOCKER = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_not_while_somebody_downloads_it(cache: Path) -> None:
    put_in_cache(cache, "org/small", model_files())
    lock = cache / ".locks" / "models--org--small" / "abc.lock"
    lock.parent.mkdir(parents=True)
    (lock.parent / "free.lock").touch()
    process = subprocess.Popen([sys.executable, "-c", LOCKER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(RimuruError, match="being downloaded by another process"):
        carry_out(plan_removal("org/small"))
    assert find_models()[0].status == "ready"
    process.communicate("")
    carry_out(plan_removal("org/small"))
    assert find_models() == []


def test_what_the_system_refuses_to_delete_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    put_in_cache(cache, "org/small", model_files())

    def refuse(path: Path) -> None:
        raise PermissionError(13, "used by another process", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(RimuruError, match="could be deleted") as caught:
        carry_out(plan_removal("org/small"))
    assert "models--org--small is still there" in caught.value.what
    assert caught.value.hint is not None
    assert "Traceback" not in capfd.readouterr().err


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny = write_tiny_demo(tmp_path / "demo")
    monkeypatch.setattr(embedded.Recipe, "packaged", lambda: tiny.recipe)
    monkeypatch.setenv(embedded.GGUF_VARIABLE, str(tiny.gguf))
    return embedded.ensure()


def test_the_demonstration_model_can_go_and_come_back(demo: Path) -> None:
    planned = plan_removal("rimuru-demo")
    assert planned.freed_bytes == disk_bytes(demo)
    carry_out(planned)
    assert not demo.exists()
    with pytest.raises(NotFoundError, match="not built"):
        plan_removal("Rimuru-Demo")
    assert embedded.ensure() == demo


def test_builds_of_other_versions_and_leftovers_of_dead_ones_can_go(demo: Path) -> None:
    old, left = demo.with_name("rimuru-demo-0123456789ab"), demo.with_name(".building-feed")
    shutil.copytree(demo, old)
    left.mkdir()
    (left / "x").write_bytes(b"x" * 100)
    carry_out(plan_removal("rimuru-demo@building-feed"))
    assert old.exists() and demo.exists() and not left.exists()
    carry_out(plan_removal("rimuru-demo@0123456789ab"))
    assert not old.exists() and embedded.is_ready()
    with pytest.raises(NotFoundError):
        plan_removal("rimuru-demo@0123456789ab")


def test_a_demonstration_model_that_cannot_be_deleted_is_said(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path, progress: object = None) -> None:
        raise PermissionError(13, "in use", str(folder / WEIGHTS))

    monkeypatch.setattr(embedded, "remove", refuse)
    with pytest.raises(RimuruError, match=r"model\.safetensors is still there"):
        carry_out(plan_removal("rimuru-demo"))


@pytest.mark.skipif(os.name != "posix", reason="the shared store of blobs needs links")
def test_blobs_in_the_shared_store_are_swept_only_with_their_last_user(cache: Path) -> None:
    from huggingface_hub.utils import _shared_blobs

    data = b"weights" * 1000
    xet_hash = hashlib.sha256(data).hexdigest()
    payload = _shared_blobs.shared_blob_path(cache, xet_hash)
    payload.parent.mkdir(parents=True)
    payload.write_bytes(data)
    (payload.parents[1] / _shared_blobs.SHARED_BLOBS_MARKER_NAME).write_text("1\n", encoding="utf-8")
    lines = []
    for name in ("org/one", "org/two"):
        snapshot = put_in_cache(cache, name, model_files(shards=1))
        blob = (snapshot / WEIGHTS).resolve()
        blob.unlink()
        blob.symlink_to(os.path.relpath(payload, blob.parent))
        lines.append(blob.relative_to(cache).as_posix())
    _shared_blobs.shared_blob_manifest_path(cache, xet_hash).write_text("\n".join(lines) + "\n", encoding="utf-8")
    small = sum(len(content) for name, content in model_files(shards=1).items() if name != WEIGHTS)
    first = plan_removal("org/one")
    assert (first.freed_bytes, first.kept_bytes) == (small, len(data))
    carry_out(first)
    assert payload.exists()
    last = plan_removal("org/two")
    assert last.freed_bytes == small + len(data)
    carry_out(last)
    assert not payload.exists()


def test_a_plan_names_folders_and_not_what_is_beside_them(cache: Path) -> None:
    snapshot = put_in_cache(cache, "org/small", model_files(seed=1))
    put_in_cache(cache, "org/small", model_files(seed=2), ref="v2")
    assert plan_removal("org/small@main").folders == (snapshot,)
    assert plan_removal("org/small").folders == (cache / "models--org--small",)
    assert json.dumps([str(folder) for folder in removal.plan_removal("org/small").folders])


NAMES = ["config.json", "a.safetensors", "b.safetensors", "sub/c.json"]
REVISIONS = st.lists(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3), min_size=1), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(revisions=REVISIONS, victims=st.sets(st.integers(0, 3)), links=st.booleans(), broken=st.booleans())
def test_whatever_is_deleted_the_others_keep_every_byte(
    revisions: list[dict[str, int]], victims: set[int], links: bool, broken: bool
) -> None:
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        cache = Path(place) / "hub"
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        contents = [bytes([number]) * (2000 + number) for number in range(4)]
        wanted = {}
        for number, names in enumerate(revisions):
            commit, files = f"{number:040x}", {name: contents[which] for name, which in names.items()}
            wanted[put_in_cache(cache, "org/small", files, ref=f"v{number}", commit=commit, links=links)] = files
        if broken:  # huggingface_hub's scan then passes over the whole repository
            (cache / "models--org--small" / "refs" / "lost").write_text("c" * 40, encoding="utf-8")
        for snapshot in [one for number, one in enumerate(wanted) if number in victims]:
            before = disk_bytes(cache)
            planned = plan_removal(f"org/small@{snapshot.name}")
            carry_out(planned)
            assert 0 <= before - disk_bytes(cache) - planned.freed_bytes < 500
            del wanted[snapshot]
            assert not snapshot.exists()
            for kept, files in wanted.items():
                assert {name: (kept / name).read_bytes() for name in files_of(kept)} == files
        if not wanted:
            assert files_of(cache) == set()
