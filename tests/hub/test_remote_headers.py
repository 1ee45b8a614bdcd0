from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from loopback_hub import Fault, LoopbackHub, etag_of
from loopback_models import model_files, wanted
from loopback_setup import connect

from rimuru_cli.hub import patience
from rimuru_cli.hub.patience import UnreachableError
from rimuru_cli.hub.remote_headers import remote_checkpoint
from rimuru_models.errors import CheckpointError, NotFoundError, RimuruError, UsageError
from rimuru_models.index import open_index

FILES = model_files(config={"intermediate_size": 512})
SHARDS = sorted(name for name in FILES if name.startswith("model-"))


@pytest.fixture
def server() -> Iterator[LoopbackHub]:
    with LoopbackHub(store=True) as hub:
        hub.add("org/name", FILES)
        hub.add("org/single", model_files(shards=1))
        yield hub


@pytest.fixture(autouse=True)
def cache(server: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    connect(monkeypatch, server, tmp_path / "hub", read_seconds=2)
    monkeypatch.setattr(patience, "FIRST_WAIT_SECONDS", 0.001)
    return tmp_path / "hub"


def test_sees_what_is_there_after_a_download(server: LoopbackHub, tmp_path: Path, cache: Path) -> None:
    seen = remote_checkpoint("org/name")
    for name, data in FILES.items():
        if "/" not in name and name != "consolidated.safetensors":
            (tmp_path / "m").mkdir(exist_ok=True)
            (tmp_path / "m" / name).write_bytes(data)
    local = open_index(tmp_path / "m")
    assert {name: info for name, (_, info) in seen.index.tensors.items()} == {name: info for name, (_, info) in local.tensors.items()}
    assert {path.name: header for path, header in seen.index.headers.items()} == {path.name: h for path, h in local.headers.items()}
    assert seen.config_values == json.loads(FILES["config.json"])
    assert seen.file_bytes == {name: len(data) for name, data in wanted(FILES).items()}
    assert seen.file_etags == {name: etag_of(data) for name, data in wanted(FILES).items()}
    assert seen.total_bytes == sum(seen.file_bytes.values())
    assert (seen.repository, seen.commit) == ("org/name", server.repositories["org/name"].refs["main"])
    assert not cache.exists(), "nothing is written"
    assert all(request.headers.get("range") == "bytes=0-131071" for request in server.bodies() if request.file in SHARDS)
    assert all(request.sent <= 131072 for request in server.bodies())


def test_a_header_longer_than_the_first_guess(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from rimuru_cli.hub import beginnings

    monkeypatch.setattr(beginnings, "_FIRST_GUESS", 10)
    assert remote_checkpoint("org/single").index.total_bytes > 0
    assert [(r.start, r.headers["range"][:9]) for r in server.bodies("model.safetensors")] == [(0, "bytes=0-9"), (10, "bytes=10-")]


def test_a_server_without_ranges_sends_no_more_than_it_must(server: LoopbackHub) -> None:
    server.lasting[SHARDS[0]] = Fault("whole")
    server.bytes_per_s = 5_000_000
    assert remote_checkpoint("org/name").index.tensors
    assert server.sent(SHARDS[0]) < len(FILES[SHARDS[0]])


def test_mends_what_breaks_on_the_way(server: LoopbackHub) -> None:
    server.api_faults = [Fault("status", status=500), Fault("status", status=429, headers={"Retry-After": "0"})]
    server.faults[SHARDS[1]] = [Fault("close", at=100), Fault("reset", at=5), Fault("status", status=503)]
    server.faults["config.json"] = [Fault("close", at=3), Fault("corrupt", at=0)]
    assert remote_checkpoint("org/name").index.tensors


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (b"\xff" * 8 + b"x" * 400, "announces a header"),
        (b"x" * 5, "too short"),
        ((2).to_bytes(8, "little") + b"[]" + b"x" * 400, "not a JSON object"),
        ((4000).to_bytes(8, "little") + b"{}" + b"x" * 400, "announces a header"),
    ],
)
def test_broken_headers(server: LoopbackHub, damage: bytes, words: str) -> None:
    server.add("org/broken", {**model_files(shards=1), "model.safetensors": damage})
    with pytest.raises(CheckpointError, match=words):
        remote_checkpoint("org/broken")


def test_headers_that_are_far_too_large_are_not_read(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from rimuru_cli.hub import beginnings

    monkeypatch.setattr(beginnings, "_MOST_IN_ALL", 200_000)
    with pytest.raises(CheckpointError, match="far larger"):
        remote_checkpoint("org/name")


@pytest.mark.parametrize("index", [b"{", b"[]", b'{"weight_map": {"a": "../x.safetensors"}}', b'{"weight_map": {"a": "gone.safetensors"}}'])
def test_broken_indexes(server: LoopbackHub, index: bytes) -> None:
    server.add("org/broken", {**FILES, "model.safetensors.index.json": index})
    with pytest.raises(CheckpointError):
        remote_checkpoint("org/broken")


@pytest.mark.parametrize("config", [b"{", b"[]", b'{"architectures": ["GPT2LMHeadModel"]}', b"\xff"])
def test_configs_that_cannot_be_used(server: LoopbackHub, config: bytes) -> None:
    server.add("org/broken", {**FILES, "config.json": config})
    with pytest.raises(CheckpointError, match="config"):
        remote_checkpoint("org/broken")


def test_missing_and_gated(server: LoopbackHub) -> None:
    with pytest.raises(NotFoundError, match="no model org/nothing"):
        remote_checkpoint("org/nothing")
    with pytest.raises(NotFoundError, match="no branch, tag or commit 'v9'"):
        remote_checkpoint("org/name", "v9")
    server.repositories["org/name"].gated = True
    with pytest.raises(NotFoundError, match="gated"):
        remote_checkpoint("org/name")


def test_no_network(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.close()
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:\d+ cannot be reached"):
        remote_checkpoint("org/name")


def test_offline(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UnreachableError, match="HF_HUB_OFFLINE is set"):
        remote_checkpoint("org/name")
    assert not server.log


def test_a_hub_that_always_says_wait(server: LoopbackHub) -> None:
    server.lasting_api = Fault("status", status=429, headers={"Retry-After": "3600"})
    with pytest.raises(UnreachableError, match=r"limits how often .* in 60 min") as caught:
        remote_checkpoint("org/name")
    assert "hf auth login" in str(caught.value.hint) and len(server.log) == 1


@pytest.mark.parametrize("endpoint", ["ftp://x", "hub.example", "http://", "https://user:secret@"])
def test_addresses_that_are_none(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(UsageError, match="HF_ENDPOINT"):
        remote_checkpoint("org/name")


def test_something_else_answers(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", server.url + "/org/name/resolve/main/README.md?")
    with pytest.raises(RimuruError, match="does not answer like a Hugging Face hub"):
        remote_checkpoint("org/name")


@pytest.mark.parametrize("token", ["hf_\u00fcber", "hf_a\x00b", "hf_a b\x7f"])
def test_tokens_that_are_none(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    from huggingface_hub.utils import _headers

    monkeypatch.setenv("HF_TOKEN", "set")
    monkeypatch.setattr(_headers, "get_token", lambda: token)
    with pytest.raises(UsageError, match="token has characters") as caught:
        remote_checkpoint("org/name")
    assert "hf_a" not in str(caught.value) and "ber" not in str(caught.value).replace("Hugging", "")
