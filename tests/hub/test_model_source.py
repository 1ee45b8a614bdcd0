from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cached_models import put_in_cache
from huggingface_hub import constants
from loopback_hub import LoopbackHub
from loopback_models import CONFIG, model_files
from quantised import KINDS, write_quantised_checkpoint
from tiny_demo import write_tiny_demo

from rimuru_cli.hub import embedded
from rimuru_cli.hub.licence import licence_of_card, licence_of_folder, licence_of_text
from rimuru_cli.hub.pull_manifest import PulledFile, PullManifest
from rimuru_cli.hub.show import describe
from rimuru_cli.hub.source import open_source
from rimuru_models.errors import CheckpointError, NotFoundError, RimuruError
from rimuru_models.layout import num_parameters


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder, work = tmp_path / "hf" / "hub", tmp_path / "here"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with LoopbackHub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def in_folder(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def test_a_local_folder(tmp_path: Path) -> None:
    files = model_files(extra=False)
    folder = in_folder(tmp_path / "Größe", files | {".hidden": b"x", ".cache/huggingface/x": b"y"})
    source = open_source(str(folder))
    assert (source.name, source.place, source.path, source.revision) == ("Größe", "folder", folder, None)
    assert source.licence == "Apache-2.0"
    assert [(file.name, file.num_bytes, file.sha256) for file in source.files] == [(name, len(files[name]), None) for name in sorted(files)]
    facts = describe(source)
    assert facts["bytes"] == sum(facts["bytes_by_part"].values()) == source.index.total_bytes
    assert facts["profile"] is None
    assert json.loads(json.dumps(facts)) == facts


def test_parts_of_the_tiny_mixtral_by_hand(tmp_path: Path) -> None:
    facts = describe(open_source(str(in_folder(tmp_path / "m", model_files(extra=False)))))
    vocab, hidden, layers, kv, width, experts = 64, 32, 2, 16, 48, 4
    assert facts["bytes_by_part"] == {
        "embeddings": 4 * vocab * hidden,
        "attention": 4 * layers * (2 * hidden * hidden + 2 * kv * hidden),
        "norms": 4 * (2 * layers + 1) * hidden,
        "router": 4 * layers * experts * hidden,
        "experts": 4 * layers * experts * 3 * hidden * width,
        "output": 4 * vocab * hidden,
    }
    assert (facts["experts"], facts["top_k"], facts["layers"], facts["moe_layers"]) == (4, 2, 2, 2)
    assert (facts["precision"], facts["architecture"], facts["context"]) == ("F32", "MixtralForCausalLM", 256)


def test_the_cache_knows_checksums_by_its_links(cache: Path) -> None:
    files = model_files(extra=False)
    snapshot = put_in_cache(cache, "org/small", files)
    source = open_source("org/small")
    assert (source.place, source.path, source.revision) == ("cache", snapshot, snapshot.name)
    for file in source.files:
        expected = sha256(files[file.name]) if len(files[file.name]) >= 256 else None
        assert file.sha256 == expected, file.name


def test_the_manifest_of_a_pull_knows_all_checksums(cache: Path) -> None:
    files = model_files(extra=False)
    snapshot = put_in_cache(cache, "org/small", files)
    records = {name: PulledFile(len(data), "x", sha256(data), 1) for name, data in files.items()}
    PullManifest.now("org/small", snapshot.name, "main", records).write()
    assert {file.name: file.sha256 for file in open_source("org/small").files} == {name: sha256(data) for name, data in files.items()}


def test_without_links_the_list_of_the_hub_knows_those_of_large_files(cache: Path) -> None:
    files = model_files(extra=False, shards=1)
    snapshot = put_in_cache(cache, "org/small", files, links=False)
    trees = snapshot.parent.parent / "trees"
    trees.mkdir()
    entries = {
        "model.safetensors": {"size": 1, "blob_id": "x", "lfs_sha256": sha256(files["model.safetensors"])},
        "config.json": {"size": 1},
    }
    (trees / f"{snapshot.name}.json").write_text(json.dumps({"format_version": 1, "files": entries}), encoding="utf-8")
    checksums = {file.name: file.sha256 for file in open_source("org/small").files}
    assert checksums["model.safetensors"] == sha256(files["model.safetensors"])
    assert checksums["config.json"] is None
    (trees / f"{snapshot.name}.json").write_text("[]", encoding="utf-8")
    assert {file.sha256 for file in open_source("org/small").files} == {None}


def test_the_demonstration_model_has_its_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = write_tiny_demo(tmp_path / "demo")
    monkeypatch.setattr(embedded.Recipe, "packaged", lambda: tiny.recipe)
    monkeypatch.setenv(embedded.GGUF_VARIABLE, str(tiny.gguf))
    source = open_source("rimuru-demo")
    assert source.place == "demo"
    weights = next(file for file in source.files if file.name == "model.safetensors")
    assert weights.sha256 == tiny.recipe.model_sha256
    parts = describe(source)["bytes_by_part"]
    assert "output" not in parts, "its output matrix is its embeddings"


def test_a_model_that_is_only_on_the_hub(hub: LoopbackHub, cache: Path) -> None:
    files = model_files()
    commit = hub.add("org/far", files)
    source = open_source("org/far")
    assert (source.name, source.place, source.path, source.revision) == ("org/far", "hub", None, commit)
    facts = describe(source)
    assert facts["licence"] == "Apache-2.0"
    here = describe(open_source(str(in_folder(Path.cwd() / "copy", files))))
    for key in ("bytes_by_part", "bytes", "architecture", "parameters", "precision", "experts", "top_k"):
        assert facts[key] == here[key]
    names = {file["name"] for file in facts["files"]}
    assert "config.json" in names and "model-00001-of-00003.safetensors" in names
    assert not any(name.endswith((".bin", ".onnx")) for name in names)
    assert next(f["sha256"] for f in facts["files"] if f["name"].startswith("model-00001")) == sha256(
        files["model-00001-of-00003.safetensors"]
    )
    sent = sum(request.sent for request in hub.log)
    assert sent < sum(map(len, files.values()))
    assert not cache.exists(), "nothing is written"


def test_an_incomplete_download_is_looked_at_on_the_hub(hub: LoopbackHub, cache: Path) -> None:
    files = model_files()
    hub.add("org/far", files)
    put_in_cache(cache, "org/far", {name: data for name, data in files.items() if not name.startswith("model-00003")})
    assert open_source("org/far").place == "hub"


def test_a_licence_that_the_hub_does_not_give_is_no_reason_to_fail(hub: LoopbackHub) -> None:
    from loopback_hub import Fault

    hub.add("org/far", model_files())
    hub.lasting["LICENSE"] = Fault("status", status=403)
    assert open_source("org/far").licence is None


def test_neither_here_nor_there(hub: LoopbackHub) -> None:
    with pytest.raises(NotFoundError):
        open_source("org/nowhere")


def test_offline_says_both(cache: Path) -> None:
    with pytest.raises(NotFoundError, match=r"neither a folder here nor in the Hugging Face cache.*HF_HUB_OFFLINE") as caught:
        open_source("org/far")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("change", "error"),
    [({"architectures": ["BertModel"], "model_type": "bert"}, CheckpointError), ({"hidden_size": 64}, CheckpointError)],
)
def test_what_cannot_be_described_is_refused(tmp_path: Path, change: dict[str, object], error: type[RimuruError]) -> None:
    folder = in_folder(tmp_path / "m", model_files() | {"config.json": json.dumps(CONFIG | change).encode()})
    with pytest.raises(error):
        describe(open_source(str(folder)))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("---\nlicense: apache-2.0\ntags: [x]\n---\n# Card", "apache-2.0"),
        ('---\r\nlicense: "mit"\r\n---\r\n', "mit"),
        ("---\nlicense: other\nlicense_name: tongyi-qianwen\n---\n", "tongyi-qianwen"),
        ("---\nlicense: other\n---\n", "other"),
        ("\ufeff---\nlicense: cc-by-4.0\n---\n", "cc-by-4.0"),
        ("license: mit\n", None),
        ("---\ntags: x\n---\nlicense: mit\n", None),
        ("---\nlicense: \x1b[31mmit\n---\n", None),
        ("", None),
    ],
)
def test_the_front_matter_of_a_card(text: str, name: str | None) -> None:
    assert licence_of_card(text) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("   Apache License\n       Version 2.0, January 2004", "Apache-2.0"),
        ("MIT License\n\nPermission is hereby granted, free of charge,\nto any person obtaining a copy of this software", "MIT"),
        ("LLAMA 3.1 COMMUNITY LICENSE AGREEMENT", "Llama 3.1 Community License"),
        ("Tongyi Qianwen\n\nQwen LICENSE AGREEMENT", "Qwen licence agreement"),
        ("\n  Some   Licence of My Own \nwith text", "Some Licence of My Own"),
        (" \n\n", None),
    ],
)
def test_the_text_of_a_licence(text: str, name: str | None) -> None:
    assert licence_of_text(text) == name


def test_a_card_goes_before_a_licence_file(tmp_path: Path) -> None:
    assert licence_of_folder(tmp_path) is None
    (tmp_path / "LICENSE.txt").write_text("Apache License\nVersion 2.0", encoding="utf-8")
    assert licence_of_folder(tmp_path) == "Apache-2.0"
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---", encoding="utf-8")
    assert licence_of_folder(tmp_path) == "mit"


def test_a_quantised_model_names_its_precision_and_counts_every_byte(tmp_path: Path) -> None:
    folder, _ = write_quantised_checkpoint(tmp_path, "qwen3_moe", KINDS["int4"], num_layers=2, moe_intermediate_size=64)
    source = open_source(str(folder))
    facts = describe(source)
    assert facts["precision"] == "int4 (groups of 32)"
    assert facts["dense_precision"] == "int4 (groups of 32) and F32"
    assert facts["bytes"] == sum(facts["bytes_by_part"].values()) == source.index.total_bytes
    codes, scales, shape = 64 * 64 // 2, 64 * 2 * 2, 2 * 8
    assert facts["bytes_by_part"]["experts"] == 2 * 8 * 3 * (codes + scales + shape)
    assert facts["parameters"] == num_parameters(source.config)
