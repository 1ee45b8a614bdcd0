from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from rimuru_cli.hub import embedded, snapshot
from rimuru_cli.hub.resolve import ResolvedModel, resolve_model
from rimuru_models.errors import NotFoundError, UsageError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "f" * 40


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty Hugging Face cache, and an empty working folder."""
    cache, work = tmp_path / "hf" / "hub", tmp_path / "here"
    cache.mkdir(parents=True)
    work.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(work)
    return cache


def model(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}", encoding="utf-8")
    return folder


def cached(hub: Path, repository: str, *names: str, commit: str = COMMIT, ref: str | None = "main") -> Path:
    home = hub / ("models--" + repository.replace("/", "--"))
    if ref:
        (home / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (home / "refs" / ref).write_text(commit, encoding="utf-8")
    return model(home / "snapshots" / commit, *names)


@pytest.mark.parametrize("name", [None, "rimuru-demo", "Rimuru-Demo", "smollm2-135m-instruct-moe-32x48-TOP20"])
def test_no_name_or_its_own_means_the_demonstration_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str | None) -> None:
    asked: list[object] = []
    monkeypatch.setattr(embedded, "ensure", lambda progress: asked.append(progress) or tmp_path)

    def progress(stage: str, done: int, total: int) -> None: ...

    assert resolve_model(name, progress=progress) == ResolvedModel("rimuru-demo", tmp_path, None, True)
    assert asked == [progress]


def test_folders_absolute_relative_and_with_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path.cwd()
    target = model(here / "my models" / "Tiny")
    expected = ResolvedModel("Tiny", target, None, False)
    assert resolve_model(str(target)) == expected
    assert resolve_model("my models/Tiny") == expected
    assert resolve_model("./my models/Tiny/") == expected
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.setenv("USERPROFILE", str(here))
    assert resolve_model("~/my models/Tiny") == expected
    monkeypatch.chdir(target)
    assert resolve_model(".").name == "Tiny"


def test_a_folder_beats_a_repository_and_dot_slash_beats_the_demonstration_model(hub: Path) -> None:
    cached(hub, "org/name")
    folder = model(Path.cwd() / "org" / "name")
    assert resolve_model("org/name").path == folder
    folder = model(Path.cwd() / "rimuru-demo")
    assert resolve_model("./rimuru-demo") == ResolvedModel("rimuru-demo", folder, None, False)


def test_a_folder_without_config_says_what_it_lacks() -> None:
    here = Path.cwd()
    model(here / "plain", "model.safetensors")
    with pytest.raises(NotFoundError, match=r"no config\.json"):
        resolve_model("./plain")
    model(here / "outer" / "inner")
    with pytest.raises(NotFoundError) as caught:
        resolve_model("outer")
    assert str(here / "outer" / "inner") in str(caught.value.hint)


def test_a_folder_that_only_has_the_name_of_a_repository_does_not_hide_it() -> None:
    (Path.cwd() / "org" / "name").mkdir(parents=True)
    with pytest.raises(NotFoundError, match="not a model folder") as caught:
        resolve_model("org/name")
    assert "org/name@main" in str(caught.value.hint)
    with pytest.raises(NotFoundError) as caught:
        resolve_model("./org/name")
    assert "@main" not in str(caught.value.hint), "a path was meant"


def test_a_file_is_not_a_model() -> None:
    model(Path.cwd() / "m")
    with pytest.raises(UsageError, match="is a file"):
        resolve_model("m/model.safetensors")


@pytest.mark.parametrize("name", ["./Qwen3-30B-A3", "../here/qwen3-30b-a3b", "./Qwen3_30B_A3B"])
def test_a_path_that_does_not_exist_offers_its_neighbours(name: str) -> None:
    model(Path.cwd() / "Qwen3-30B-A3B-x")
    with pytest.raises(NotFoundError, match="There is no folder") as caught:
        resolve_model(name)
    assert "Qwen3-30B-A3B-x" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["/no/such/folder", "C:\\no\\such", "c:/no/such", ".\\no", "~nobody-of-that-name/x", "./" + "x" * 5000])
def test_paths_that_do_not_exist(name: str) -> None:
    with pytest.raises(NotFoundError, match="There is no folder"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["tiny-Q4_O.gguf", "./tiny-Q4_O.gguf", "models/tiny-Q4_O.gguf", "../here/models/tiny-Q4_O.gguf"])
def test_a_gguf_file_that_does_not_exist_is_a_file(name: str) -> None:
    beside = Path(name).absolute().with_name("tiny-Q4_0.gguf")
    beside.parent.mkdir(exist_ok=True)
    beside.touch()
    with pytest.raises(NotFoundError, match="There is no file") as caught:
        resolve_model(name)
    assert "tiny-Q4_0.gguf" in str(caught.value.hint)


def test_a_repository_may_be_called_like_a_file() -> None:
    with pytest.raises(NotFoundError, match="nor in the Hugging Face cache"):
        resolve_model("org/tiny.gguf")


BAD = [
    "",
    "  ",
    "two words/name",
    "org/na me",
    "org/../name",
    "a/b/c",
    "org/name@",
    "org/name@../x",
    "org/name@-x",
    "org//name",
    "org/",
    "@main",
]
BAD += [
    "org/name\n",
    "a\x00b",
    "org/\x1b[31m",
    "org/\x9b31m",
    "org/-name",
    "org/na--me",
    "org/x.git",
    "örg/name",
    "x" * 300,
    "org/name@" + "r" * 300,
    "*",
]


@pytest.mark.parametrize("name", BAD)
def test_names_that_cannot_be_one(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_model(name)
    assert caught.value.hint
    assert caught.value.what.isprintable()


def test_a_single_unknown_word_is_not_found_and_offers_what_there_is(hub: Path) -> None:
    cached(hub, "Qwen/Qwen3-30B-A3B")
    with pytest.raises(NotFoundError) as caught:
        resolve_model("qwen3-30b-a3b")
    assert caught.value.hint == "did you mean Qwen/Qwen3-30B-A3B?"
    with pytest.raises(NotFoundError) as caught:
        resolve_model("rimuru-dmeo")
    assert caught.value.hint == "did you mean rimuru-demo?"


def test_a_downloaded_repository_is_found_with_its_commit(hub: Path) -> None:
    newest = cached(hub, "org/name")
    older = cached(hub, "org/name", commit=OLDER, ref="refs/pr/1")
    assert resolve_model("org/name") == ResolvedModel("org/name", newest, COMMIT, False)
    assert resolve_model("org/name@main").path == newest
    assert resolve_model("org/name@refs/pr/1") == ResolvedModel("org/name", older, OLDER, False)
    assert resolve_model(f"org/name@{OLDER}").path == older


def test_a_repository_that_is_not_there_names_the_command(hub: Path) -> None:
    with pytest.raises(NotFoundError, match="org/name is neither") as caught:
        resolve_model("org/name")
    assert caught.value.hint == "type `rimuru pull org/name`"
    cached(hub, "org/name")
    with pytest.raises(NotFoundError, match="org/name@v2") as caught:
        resolve_model("org/name@v2")
    assert "rimuru pull org/name@v2" in str(caught.value.hint)
    with pytest.raises(NotFoundError) as caught:
        resolve_model("Org/Nmae")
    assert "did you mean org/name?" in str(caught.value.hint)


def test_no_hugging_face_cache_at_all(hub: Path) -> None:
    hub.rmdir()
    with pytest.raises(NotFoundError, match="neither"):
        resolve_model("org/name")


def test_an_incomplete_snapshot_names_the_missing_files(hub: Path) -> None:
    folder = cached(hub, "org/name", "config.json", "tokenizer.json", "model-00001-of-00003.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00003.safetensors", "b": "model-00002-of-00003.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(NotFoundError, match=r"lacks model-00002-of-00003\.safetensors\.") as caught:
        resolve_model("org/name")
    assert "rimuru pull org/name" in str(caught.value.hint)
    (folder / "model-00002-of-00003.safetensors").write_text("", encoding="utf-8")
    assert resolve_model("org/name").path == folder


def test_missing_config_of_a_snapshot(hub: Path) -> None:
    cached(hub, "org/name", "model.safetensors", "tokenizer.json")
    with pytest.raises(NotFoundError, match=r"config\.json|neither"):
        resolve_model("org/name")


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
def test_a_link_to_a_blob_that_is_gone_is_missing(hub: Path) -> None:
    folder = cached(hub, "org/name")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(hub / "blobs" / "gone")
    with pytest.raises(NotFoundError, match=r"lacks model\.safetensors"):
        resolve_model("org/name")


MISSING: dict[tuple[str, ...], list[str]] = {
    ("config.json", "tokenizer.json", "model.safetensors"): [],
    ("config.json", "tokenizer.model", "odd name.safetensors"): [],
    ("config.json", "tokenizer.json", "pytorch_model.bin"): [],
    ("config.json", "model.safetensors"): ["tokenizer.json"],
    ("tokenizer.json",): ["config.json", "model.safetensors"],
    ("config.json", "tokenizer.json", "m-00002-of-00003.safetensors"): [
        "m-00001-of-00003.safetensors",
        "m-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ],
}


@pytest.mark.parametrize("names", MISSING)
def test_missing_files(tmp_path: Path, names: tuple[str, ...]) -> None:
    assert snapshot.missing_files(model(tmp_path / "m", *names)) == MISSING[names]


@pytest.mark.parametrize("index", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../../secret"}}', "[" * 5000])
def test_a_broken_index_is_left_to_the_checkpoint_reader(tmp_path: Path, index: str) -> None:
    folder = model(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    assert snapshot.missing_files(folder) == []
