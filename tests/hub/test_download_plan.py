"""What a pull finds out before it begins: names, commits, space, doors that are closed, what speaks against it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import file_download
from loopback_hub import GOOD_TOKEN, Fault, LoopbackHub, etag_of
from loopback_models import model_files, wanted
from loopback_pulls import Ear, planned, pull
from loopback_setup import assert_pulled, connect

from rimuru_cli.hub import download_plan
from rimuru_cli.hub.download import Download
from rimuru_cli.hub.download_plan import finished_plan
from rimuru_cli.hub.fit import FitVerdict
from rimuru_cli.hub.pull_manifest import renamed_to
from rimuru_cli.hub.remote_files import RemoteFile
from rimuru_cli.hub.repository_cache import RepositoryCache
from rimuru_cli.hub.resolve import resolve_model
from rimuru_models.config import ModelConfig
from rimuru_models.errors import CheckpointError, NoSpaceError, NotFoundError
from rimuru_models.index import CheckpointIndex

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


def test_a_second_pull_asks_once_and_reads_nothing(server: LoopbackHub) -> None:
    pull()
    server.log.clear()
    plan, _ = planned()
    assert plan.complete and plan.missing_bytes == 0
    assert [request.path for request in server.log] == ["/api/models/org/name/revision/main"]
    server.log.clear()
    finished = finished_plan("org/name", plan.origin.commit)
    assert finished is not None and finished.complete and not server.log


def test_a_pinned_commit_a_branch_and_a_tag(server: LoopbackHub, cache: Path) -> None:
    older = server.repositories["org/name"].refs["main"]
    changed = {**FILES, SHARD: FILES[SHARD][:-1] + bytes([FILES[SHARD][-1] ^ 1])}
    newer = server.add("org/name", changed)
    server.repositories["org/name"].refs["v1.0"] = older
    pinned, _ = pull(revision=older)
    assert pinned.path.name == older and not (cache / "models--org--name" / "refs" / "main").exists()
    with pytest.raises(NotFoundError, match="another version of it is") as caught:
        resolve_model("org/name")
    assert f"org/name@{older}" in str(caught.value.hint)
    server.log.clear()
    latest, ear = pull()
    assert latest.path.name == newer and {request.file for request in server.bodies()} == {SHARD}
    assert_pulled(latest.path, changed)
    assert_pulled(pinned.path, FILES)
    assert ear.statuses[-1].received_bytes == len(FILES[SHARD])
    pull(revision="v1.0")
    assert resolve_model("org/name@v1.0").path == pinned.path
    assert resolve_model("org/name").path == latest.path


@pytest.mark.parametrize(
    ("state", "token", "words"),
    [
        ({"gated": True}, None, "gated: its licence"),
        ({"gated": True}, "hf_of_somebody", "account of your token"),
        ({"private": True}, None, "or it is private"),
        ({"private": True}, "hf_of_somebody", "may not see it"),
        ({"disabled": True}, None, "disabled"),
        ({}, "hf_expired", "does not accept your token"),
    ],
)
def test_closed_doors(
    server: LoopbackHub, cache: Path, monkeypatch: pytest.MonkeyPatch, state: dict[str, bool], token: str | None, words: str
) -> None:
    vars(server.repositories["org/name"]).update(state)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(NotFoundError, match=words) as caught:
        planned()
    assert caught.value.exit_code == 3 and caught.value.hint
    assert token is None or token not in caught.value.what + caught.value.hint
    assert not cache.exists(), "not a trace in the cache"


def test_gated_with_access(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repositories["org/name"].gated = True
    monkeypatch.setenv("HF_TOKEN", GOOD_TOKEN)
    assert_pulled(pull()[0].path, FILES)


def test_a_renamed_repository(server: LoopbackHub, cache: Path) -> None:
    older = pull()[0].path  # under the name it had then
    server.repositories["org/new-name"] = server.repositories.pop("org/name")
    server.add("org/name", {}, renamed_to="org/new-name")
    server.log.clear()
    plan, hub = planned()
    assert plan.renamed and plan.origin.repository == "org/new-name"
    pulled = Download(plan, hub, Ear()).run()
    assert pulled.path.parts[-3] == "models--org--new-name"
    assert_pulled(pulled.path, FILES)
    assert not any(request.file == SHARD for request in server.bodies()), "what was fetched under the old name is not fetched again"
    assert renamed_to("org/name") == "org/new-name"
    shutil.rmtree(cache / "models--org--name")
    assert resolve_model("org/name").path == pulled.path and resolve_model("org/name").name == "org/new-name"
    assert not older.exists()


def test_too_little_space_before(monkeypatch: pytest.MonkeyPatch, server: LoopbackHub, cache: Path) -> None:
    total = sum(len(data) for data in wanted(FILES).values())

    def usage(path: Path) -> Any:
        return shutil._ntuple_diskusage(10**12, 10**12, total - 1234)  # type: ignore[attr-defined]

    monkeypatch.setattr(download_plan.shutil, "disk_usage", usage)
    with pytest.raises(NoSpaceError, match=r"\(1234 bytes\) are missing") as caught:
        planned()
    assert caught.value.exit_code == 5 and "HF_HOME" in str(caught.value.hint)
    assert not cache.exists()
    shard = RemoteFile(SHARD, len(FILES[SHARD]), etag_of(FILES[SHARD]))
    part = RepositoryCache.of("org/name").part(shard.etag)
    part.parent.mkdir(parents=True)
    part.write_bytes(FILES[SHARD][:2000])
    assert planned()[0].missing_bytes == total - 2000, "what is there already needs no space"


def test_a_model_that_does_not_fit_is_an_objection(server: LoopbackHub) -> None:
    def too_large(name: str, config: ModelConfig, index: CheckpointIndex | None = None) -> FitVerdict:
        return FitVerdict(False, None, "does not fit", f"{name} needs 99 GiB.", "buy more", {})

    plan, _ = planned(check_fit=too_large)
    assert [(o.text, o.hint, o.exit_code) for o in plan.objections] == [("org/name needs 99 GiB.", "buy more", 6)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}}, "LlamaForCausalLM is not supported"),
        ({"config": {"quantization_config": {"quant_method": "aqlm"}}}, "aqlm"),
    ],
)
def test_a_model_that_cannot_run_is_an_objection(server: LoopbackHub, change: dict[str, Any], words: str) -> None:
    server.add("org/odd", model_files(**change))
    plan, _ = planned("org/odd")
    assert len(plan.objections) == 1 and words in plan.objections[0].text and plan.objections[0].exit_code == 1
    assert not any(request.file and request.file.endswith(".safetensors") for request in server.log), "no need to ask for headers then"


def test_a_header_that_arrives_damaged_is_read_again(server: LoopbackHub) -> None:
    server.faults[SHARD] = [Fault("corrupt", at=9)]
    plan, _ = planned()
    assert plan.verdict is not None and plan.objections == ()


def test_a_header_that_is_broken_on_the_hub_is_an_objection(server: LoopbackHub) -> None:
    server.add("org/torn", {**model_files(shards=1), "model.safetensors": b"\xff" * 600})
    plan, _ = planned("org/torn")
    assert "not a safetensors file" in plan.objections[0].text, "all of it has been read, and its checksum is right"


def test_a_model_without_a_tokenizer_is_an_objection(server: LoopbackHub) -> None:
    server.add("org/mute", {name: data for name, data in FILES.items() if name != "tokenizer.json"})
    assert "tokenizer.json" in planned("org/mute")[0].objections[0].text


@pytest.mark.parametrize(
    "entry",
    [
        {"type": "file", "path": "../../evil.safetensors", "size": 5, "oid": "0" * 40},
        {"type": "file", "path": "x.json", "size": 5, "oid": "../../../../evil"},
        {"type": "file", "path": "x.json", "size": -5, "oid": "0" * 40},
        {"type": "file", "path": "x.json", "size": 5, "oid": "0" * 40, "lfs": {"oid": "/etc/passwd", "size": 5}},
        {"type": "file", "path": "CONFIG.json", "size": 5, "oid": "0" * 40},
    ],
    ids=lambda entry: f"{entry['path']}-{entry.get('lfs', entry)['oid'][:9]}-{entry['size']}",
)
def test_a_tree_that_means_no_good_is_refused(server: LoopbackHub, cache: Path, entry: dict[str, Any]) -> None:
    server.repositories["org/name"].tree_extra = [entry]
    with pytest.raises(CheckpointError):
        planned()
    assert not cache.exists()


def test_a_tree_in_many_pages(server: LoopbackHub) -> None:
    server.page = 2
    assert_pulled(pull()[0].path, FILES)
    assert len([request for request in server.log if "/tree/" in request.path]) == -(-len(FILES) // 2)


def test_what_is_fetched_for_the_plan_is_not_fetched_again(server: LoopbackHub) -> None:
    plan, hub = planned()
    looked = server.sent()
    assert 0 < looked < 500_000 and set(plan.beginnings) == {name for name in FILES if name.startswith("model") or name == "config.json"}
    Download(plan, hub, Ear()).run()
    assert server.sent() == plan.total_bytes
