from __future__ import annotations

import json
import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cached_models import put_in_cache
from huggingface_hub import constants
from loopback_models import CONFIG, model_files
from tiny_demo import write_tiny_demo

from rimuru_cli.hub import embedded, library, paths, usage
from rimuru_cli.hub.library import LibraryModel, find_models
from rimuru_cli.hub.pull_manifest import PulledFile, PullManifest
from rimuru_models.index import model_identity


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "hf" / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


def only() -> LibraryModel:
    (model,) = find_models()
    return model


def by_name() -> dict[str, LibraryModel]:
    return {model.name: model for model in find_models()}


def write_profile(identity: str, layers: int = 2, experts: int = 4) -> None:
    rows = [{"moe_layer": i, "order": list(range(experts)), "probabilities": [1 / experts] * experts} for i in range(layers)]
    value = {"format": "rimuru-hotset", "version": 1, "model": "x", "identity": identity, "created": "2026-01-02T03:04:05+00:00"}
    value |= {"tokens": 99, "top_k": 2, "num_moe_layers": layers, "num_experts": experts, "layers": rows}
    paths.profiles_dir().mkdir(parents=True, exist_ok=True)
    (paths.profiles_dir() / f"{identity[:32]}.json").write_text(json.dumps(value), encoding="utf-8")


def test_nothing_at_all(cache: Path) -> None:
    assert find_models() == []
    cache.mkdir(parents=True)
    assert find_models() == []


def test_a_complete_model_of_the_cache(cache: Path) -> None:
    snapshot = put_in_cache(cache, "org/small", model_files(extra=False))
    model = only()
    assert (model.name, model.kind, model.path, model.repository) == ("org/small", "cache", snapshot, "org/small")
    assert (model.revision, model.refs, model.status) == (snapshot.name, ("main",), "ready")
    assert model.size_bytes == sum(len(data) for data in model_files(extra=False).values())
    assert (model.inspection.architecture, model.inspection.precision, model.inspection.why_not) == ("MixtralForCausalLM", "F32", None)
    assert model.profile is None and model.unfinished_bytes == 0


def test_real_files_in_a_snapshot_count_like_links(cache: Path) -> None:
    put_in_cache(cache, "org/small", model_files(extra=False), links=False)
    assert only().status == "ready"
    assert only().size_bytes == sum(len(data) for data in model_files(extra=False).values())


def test_files_of_the_same_content_are_counted_once(cache: Path) -> None:
    files = model_files(extra=False)
    put_in_cache(cache, "org/small", files | {"COPY_OF_LICENSE": files["LICENSE"]})
    assert only().size_bytes == sum(len(data) for data in files.values())


def test_revisions_have_names_that_can_be_typed(cache: Path) -> None:
    main = put_in_cache(cache, "org/small", model_files(seed=1))
    tagged = put_in_cache(cache, "org/small", model_files(seed=2), ref="v2")
    bare = put_in_cache(cache, "org/small", model_files(seed=3), ref=None)
    found = by_name()
    assert {name: model.path for name, model in found.items()} == {
        "org/small": main,
        "org/small@v2": tagged,
        f"org/small@{bare.name}": bare,
    }


def test_without_a_main_branch_the_commit_is_what_to_type(cache: Path) -> None:
    snapshot = put_in_cache(cache, "org/small", model_files(), ref=None)
    assert only().name == f"org/small@{snapshot.name}"


def test_a_repository_without_organisation_is_named_by_its_folder(cache: Path) -> None:
    snapshot = put_in_cache(cache, "small", model_files())
    assert only().name == str(snapshot)


def test_a_shard_that_is_missing_makes_it_incomplete(cache: Path) -> None:
    files = model_files(extra=False)
    del files["model-00002-of-00003.safetensors"]
    put_in_cache(cache, "org/small", files)
    assert only().status == "incomplete"
    assert only().inspection.why_not == "it lacks model-00002-of-00003.safetensors"


def test_a_link_to_a_blob_that_is_gone_makes_it_incomplete(cache: Path) -> None:
    snapshot = put_in_cache(cache, "org/small", model_files(extra=False))
    (snapshot / "model-00001-of-00003.safetensors").resolve().unlink()
    assert only().status == "incomplete"


def test_what_a_pull_brought_and_is_not_there_any_more_makes_it_incomplete(cache: Path) -> None:
    files = model_files(extra=False)
    snapshot = put_in_cache(cache, "org/small", files)
    records = {name: PulledFile(len(data), "x", "y", 1) for name, data in files.items()}
    PullManifest.now("org/small", snapshot.name, "main", records).write()
    assert only().status == "ready"
    (snapshot / "chat_template.jinja").unlink()
    assert (only().status, only().inspection.why_not) == ("incomplete", "it lacks chat_template.jinja")
    snapshot_file = snapshot / "LICENSE"
    snapshot_file.unlink()
    snapshot_file.write_bytes(b"short")
    assert only().inspection.why_not == "it lacks chat_template.jinja, LICENSE"


def test_an_unfinished_download_without_a_snapshot_shows(cache: Path) -> None:
    blobs = cache / "models--org--begun" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{'a' * 64}.incomplete").write_bytes(b"x" * 1000)
    (blobs / ("b" * 64)).write_bytes(b"y" * 10)
    model = only()
    assert (model.name, model.status, model.size_bytes, model.unfinished_bytes) == ("org/begun", "incomplete", 10, 1000)
    assert model.inspection.why_not == "its download was cut short"


def test_parts_beside_a_snapshot_are_counted_once_with_main(cache: Path) -> None:
    put_in_cache(cache, "org/small", model_files(seed=1))
    put_in_cache(cache, "org/small", model_files(seed=2), ref="v2")
    (cache / "models--org--small" / "blobs" / "abc.incomplete").write_bytes(b"x" * 7)
    found = by_name()
    assert (found["org/small"].unfinished_bytes, found["org/small@v2"].unfinished_bytes) == (7, 0)


def test_an_empty_repository_folder_is_nothing(cache: Path) -> None:
    (cache / "models--org--gone" / "refs").mkdir(parents=True)
    assert find_models() == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"architectures": ["BertModel"], "model_type": "bert"}, "the architecture BertModel is not supported"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantised"),
        ({"hidden_size": -1}, "hidden_size"),
    ],
)
def test_what_rimuru_cannot_run_says_why(cache: Path, change: dict[str, object], why: str) -> None:
    put_in_cache(cache, "org/other", model_files(extra=False) | {"config.json": json.dumps(CONFIG | change).encode()})
    assert only().status == "unusable"
    assert why in (only().inspection.why_not or "")
    assert not (only().inspection.why_not or "").endswith(".")


def test_pickles_only(cache: Path) -> None:
    put_in_cache(cache, "org/pickled", {"config.json": json.dumps(CONFIG).encode(), "pytorch_model.bin": b"x", "tokenizer.json": b"{}"})
    assert only().status == "unusable"
    assert "pickled" in (only().inspection.why_not or "")


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_config_that_is_none(cache: Path, text: bytes) -> None:
    put_in_cache(cache, "org/broken", model_files(extra=False) | {"config.json": text})
    assert only().status == "unusable"


def test_gguf_files_are_named_for_what_they_are(cache: Path) -> None:
    put_in_cache(cache, "org/gguf", {"model-Q4_K_M.gguf": b"GGUF", "README.md": b"#"})
    assert (only().status, only().inspection.precision) == ("unusable", "GGUF")


def test_quantisation_and_declared_formats(cache: Path) -> None:
    for number, (change, expected) in enumerate(
        [
            ({"torch_dtype": "bfloat16"}, "BF16"),
            ({"torch_dtype": None, "dtype": "torch.float16"}, "F16"),
            ({"torch_dtype": None}, "F32"),  # by the first file
            ({"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}, "FP8"),
            ({"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "gptq", "bits": 4}}, "int4"),
            ({"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "hqq"}}, "hqq"),
            ({"torch_dtype": "bfloat16", "quantization_config": {}}, "quantised"),
        ]
    ):
        put_in_cache(cache, f"org/m{number}", model_files() | {"config.json": json.dumps(CONFIG | change).encode()})
        assert by_name()[f"org/m{number}"].inspection.precision == expected


def test_other_kinds_of_repositories_and_files_are_passed_over(cache: Path) -> None:
    put_in_cache(cache, "org/small", model_files())
    (cache / "datasets--org--data" / "snapshots" / "x").mkdir(parents=True)
    (cache / ".locks" / "models--org--small").mkdir(parents=True)
    (cache / "CACHEDIR.TAG").write_text("x", encoding="utf-8")
    (cache / "models--org--file").write_text("x", encoding="utf-8")
    assert [model.name for model in find_models()] == ["org/small"]


def test_a_profile_belongs_to_one_model(cache: Path) -> None:
    first = put_in_cache(cache, "org/one", model_files(seed=1, shards=1))
    put_in_cache(cache, "org/two", model_files(seed=1) | {"config.json": json.dumps(CONFIG | {"rope_theta": 5e5}).encode()})
    write_profile(model_identity(first))
    found = by_name()
    assert found["org/one"].profile is not None and found["org/one"].profile.tokens == 99
    assert found["org/one"].profile.coverage == {0.1: 0.25, 0.25: 0.25, 0.5: 0.5}
    assert found["org/two"].profile is None


def test_headers_are_read_only_where_a_profile_could_fit(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_cache(cache, "org/one", model_files())
    write_profile("a" * 64, layers=3)

    def refuse(folder: Path) -> str:
        raise AssertionError("the profile is of another shape")

    monkeypatch.setattr(library, "model_identity", refuse)
    assert only().profile is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "rimuru-hotset", "version": 1, "layers": []}', "\x00"])
def test_a_damaged_profile_is_none(cache: Path, text: str) -> None:
    put_in_cache(cache, "org/one", model_files())
    paths.profiles_dir().mkdir(parents=True)
    (paths.profiles_dir() / "x.json").write_text(text, encoding="utf-8")
    assert only().profile is None


def test_last_used_is_what_rimuru_noted_and_else_what_the_system_knows(cache: Path) -> None:
    old = put_in_cache(cache, "org/old", model_files(seed=1))
    new = put_in_cache(cache, "org/new", model_files(seed=2))
    a_year_ago = datetime.now(UTC) - timedelta(days=365)
    for path in old.glob("*.safetensors"):
        os.utime(path.resolve(), (a_year_ago.timestamp(), a_year_ago.timestamp()))
    usage.record_use(new)
    found = find_models()
    assert [model.name for model in found] == ["org/new", "org/old"]
    assert found[0].last_used is not None and datetime.now(UTC) - found[0].last_used < timedelta(minutes=1)
    assert found[1].last_used is not None and abs(found[1].last_used - a_year_ago) < timedelta(seconds=2)


def test_local_folders_that_were_used_are_listed_while_they_exist(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my models" / "Größe"
    folder.mkdir(parents=True)
    for name, data in model_files(extra=False).items():
        (folder / name).write_bytes(data)
    assert find_models() == []
    usage.record_use(folder)
    model = only()
    assert (model.name, model.kind, model.status) == (str(folder), "folder", "ready")
    shutil.rmtree(folder)
    assert find_models() == []


def test_a_snapshot_that_was_used_is_listed_once(cache: Path) -> None:
    snapshot = put_in_cache(cache, "org/small", model_files())
    usage.record_use(snapshot)
    assert [model.kind for model in find_models()] == ["cache"]


def test_a_cache_that_is_reached_through_a_link_is_listed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_in_cache(tmp_path / "disk", "org/small", model_files())
    (tmp_path / "link").symlink_to(tmp_path / "disk", target_is_directory=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "link"))
    usage.record_use(next((tmp_path / "link" / "models--org--small" / "snapshots").iterdir()))
    assert only().kind == "cache"
    assert only().last_used is not None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 1, "path": "relative", "used_at": "2026-01-01T00:00:00+00:00"}'])
def test_notes_that_make_no_sense_are_passed_over(text: str) -> None:
    (paths.data_dir() / "used").mkdir(parents=True)
    (paths.data_dir() / "used" / "x.json").write_text(text, encoding="utf-8")
    assert usage.last_uses() == {}


def test_noting_a_use_never_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where a folder should be", encoding="utf-8")
    monkeypatch.setenv("RIMURU_HOME", str(tmp_path / "home"))
    usage.record_use(tmp_path)
    usage.forget(tmp_path)
    assert usage.last_uses() == {}


def test_the_demonstration_model_and_what_was_left_of_others(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = write_tiny_demo(tmp_path / "demo")
    monkeypatch.setattr(embedded.Recipe, "packaged", lambda: tiny.recipe)
    monkeypatch.setenv(embedded.GGUF_VARIABLE, str(tiny.gguf))
    folder = embedded.ensure()
    shutil.copytree(folder, folder.with_name("rimuru-demo-0123456789ab"))
    folder.with_name(".building-feed").mkdir()
    found = by_name()
    assert set(found) == {"rimuru-demo", "rimuru-demo@0123456789ab", "rimuru-demo@building-feed"}
    assert (found["rimuru-demo"].status, found["rimuru-demo"].kind) == ("ready", "demo")
    assert found["rimuru-demo@0123456789ab"].inspection.why_not == "built by another version of rimuru"
    (folder / "manifest.json").unlink()
    assert by_name()["rimuru-demo"].status == "incomplete"


def test_a_repository_that_cannot_be_read_is_listed_with_the_reason(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_cache(cache, "org/small", model_files())
    closed = cache / "models--org--closed"
    (closed / "snapshots").mkdir(parents=True)
    listdir = os.listdir

    def refuse(path: str | Path = ".") -> list[str]:
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    look = by_name()["org/closed"].inspection
    assert (look.status, look.why_not) == ("unusable", "its folder cannot be read (Permission denied)")
    assert by_name()["org/small"].status == "ready"
