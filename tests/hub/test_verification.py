from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download
from loopback_hub import LoopbackHub
from loopback_models import model_files, wanted
from loopback_setup import connect
from quantised import KINDS, foreign_imports, write_quantised_checkpoint
from tiny_gguf import write_tiny_gguf

from rimuru_cli.hub import embedded
from rimuru_cli.hub.download import Download
from rimuru_cli.hub.download_plan import make_plan
from rimuru_cli.hub.manifest import Manifest, sha256_of
from rimuru_cli.hub.remote import Hub
from rimuru_cli.hub.resolve import resolve_model
from rimuru_cli.hub.verification import verify_model
from rimuru_models.errors import NotFoundError, VerificationError
from rimuru_models.gguf import open_gguf
from rimuru_models.index import open_index

FILES = model_files()
SHARD = "model-00003-of-00003.safetensors"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with LoopbackHub() as hub:
        hub.add("org/name", FILES)
        connect(monkeypatch, hub, tmp_path / "hub")
        yield hub


class Silent:
    def status(self, status: object) -> None: ...
    def file(self, file: object, how: object) -> None: ...
    def notice(self, text: str) -> None: ...


def pull(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pull online, then go offline: `verify` needs no network."""
    hub = Hub()
    folder = Download(make_plan(hub, "org/name", "main", None), hub, Silent()).run().path
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server.log.clear()
    return folder


def damage(path: Path) -> None:
    """Change one byte and keep size and times."""
    path = path.resolve()
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_pulled_model_is_right(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pull(server, monkeypatch)
    seen: list[tuple[str, int, int]] = []
    result = verify_model("org/name", lambda *report: seen.append(report))
    assert (result.name, result.path, result.commit, result.against) == ("org/name", folder, folder.name, "manifest")
    assert {file.name for file in result.files} == set(wanted(FILES)) and result.bad == () and result.error() is None
    total = sum(len(data) for data in wanted(FILES).values())
    assert seen[-1] == ("Checking", total, total)
    assert not server.log


def test_damage_is_named_and_the_next_pull_mends_only_that(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pull(server, monkeypatch)
    damage(folder / SHARD)
    assert resolve_model("org/name").path == folder, "size and time are as they were"
    result = verify_model("org/name")
    assert [(file.name, file.state) for file in result.bad] == [(SHARD, "damaged")]
    assert result.bad[0].found not in (None, result.bad[0].expected)
    error = result.error()
    assert isinstance(error, VerificationError) and error.exit_code == 4
    assert SHARD in error.what and error.hint == "type `rimuru pull org/name`: only that file will be fetched again"
    with pytest.raises(NotFoundError, match=SHARD):
        resolve_model("org/name")  # what is known to be damaged is not loaded
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    pull(server, monkeypatch)
    assert verify_model("org/name").error() is None
    assert resolve_model("org/name").path == folder


def test_only_the_bad_file_is_asked_for(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pull(server, monkeypatch)
    damage(folder / SHARD)
    verify_model("org/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub = Hub()
    server.log.clear()
    Download(make_plan(hub, "org/name", "main", None), hub, Silent()).run()
    assert {request.file for request in server.bodies()} == {SHARD}


def test_missing_and_short_files(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pull(server, monkeypatch)
    (folder / SHARD).resolve().unlink()
    (folder / "LICENSE").resolve().write_bytes(b"short")
    result = verify_model("org/name")
    assert {file.name: file.state for file in result.bad} == {SHARD: "missing", "LICENSE": "damaged"}
    assert "2 of 10 files" in str(result.error())


def test_what_another_tool_downloaded_is_compared_with_the_cache(server: LoopbackHub) -> None:
    folder = Path(snapshot_download("org/name", endpoint=server.url))
    result = verify_model("org/name")
    assert result.against == "cache" and {file.state for file in result.files} == {"ok"} and len(result.files) == len(FILES)
    damage(folder / SHARD)
    damage(folder / "config.json")
    assert {file.name for file in verify_model("org/name").bad} == {SHARD, "config.json"}
    (folder / SHARD).unlink()
    assert {file.name: file.state for file in verify_model("org/name").bad} == {SHARD: "missing", "config.json": "damaged"}


def test_without_links_the_listing_of_the_commit_is_used(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", True)
    folder = Path(snapshot_download("org/name", endpoint=server.url))
    assert {file.state for file in verify_model("org/name").files} == {"ok"}
    damage(folder / SHARD)
    assert [file.name for file in verify_model("org/name").bad] == [SHARD]
    (folder.parent.parent / "trees" / f"{folder.name}.json").unlink()
    assert {file.state for file in verify_model("org/name").files} == {"unknown"}, "it does not claim what it cannot know"


def test_a_folder_that_hf_download_made(server: LoopbackHub, tmp_path: Path) -> None:
    folder = Path(snapshot_download("org/name", endpoint=server.url, local_dir=tmp_path / "mine"))
    result = verify_model(str(folder))
    assert result.against == "download metadata" and {file.state for file in result.files} == {"ok"}
    damage(folder / SHARD)
    bad = verify_model(str(folder))
    assert [file.name for file in bad.bad] == [SHARD] and "undamaged copy" in str(bad.error().hint)  # type: ignore[union-attr]
    (folder / SHARD).unlink()
    assert [file.state for file in verify_model(str(folder)).bad] == ["missing"]


def test_a_plain_folder_is_checked_as_far_as_that_goes(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for name, data in model_files(extra=False).items():
        (folder / name).write_bytes(data)
    result = verify_model(str(folder))
    assert result.against == "headers" and {file.state for file in result.files} == {"unknown"}
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-1])
    with pytest.raises(VerificationError, match=SHARD) as caught:
        verify_model(str(folder))
    assert caught.value.exit_code == 4
    (folder / SHARD).unlink()
    with pytest.raises(VerificationError, match="missing"):
        verify_model(str(folder))


def test_a_folder_with_a_manifest_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "built"
    folder.mkdir()
    for name, data in model_files(shards=1, extra=False).items():
        (folder / name).write_bytes(data)
    names = [path.name for path in folder.iterdir()]
    Manifest.describe(folder, "key", {name: sha256_of(folder / name, "") for name in names}).write(folder)
    assert verify_model(str(folder)).against == "manifest"
    damage(folder / "model.safetensors")
    assert [file.name for file in verify_model(str(folder)).bad] == ["model.safetensors"]


def test_the_demonstration_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "demo"
    monkeypatch.setattr(embedded, "model_dir", lambda: folder)
    monkeypatch.setattr(embedded, "verify", lambda progress: (_ for _ in ()).throw(NotFoundError("not built")))
    with pytest.raises(NotFoundError, match="not built"):
        verify_model("rimuru-demo")
    folder.mkdir()
    for name, data in model_files(shards=1, extra=False).items():
        (folder / name).write_bytes(data)
    Manifest.describe(folder, "key", {path.name: sha256_of(path, "") for path in sorted(folder.iterdir())}).write(folder)
    assert verify_model("Rimuru-Demo").error() is None
    damage(folder / "tokenizer.json")
    assert "rimuru chat" in str(verify_model("rimuru-demo").error().hint)  # type: ignore[union-attr]


def test_what_is_not_here(server: LoopbackHub) -> None:
    with pytest.raises(NotFoundError) as caught:
        verify_model("org/name")
    assert caught.value.hint == "type `rimuru pull org/name`"
    assert not server.log


@pytest.mark.parametrize("name", ["int4", "fp8-bf16", "mxfp4", "nvfp4"])
def test_a_scale_that_is_no_number_is_found_without_a_checksum(name: str, tmp_path: Path) -> None:
    with foreign_imports():
        folder, _ = write_quantised_checkpoint(tmp_path, "qwen3_moe", KINDS[name], num_layers=2, moe_intermediate_size=64)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert not verify_model(str(folder)).bad
    (tensor,) = [one for one in open_index(folder).tensors if ".1.mlp.experts.3.up_proj.weight_scale" in one]
    path, info = open_index(folder).tensors[tensor]
    data = bytearray(path.read_bytes())
    end = open_index(folder).headers[path].data_offset + info.stop
    data[end - 2 : end] = b"\xff\x7f" if name in ("int4", "fp8-bf16") else b"\xff\xff"
    path.write_bytes(data)
    with pytest.raises(VerificationError, match=rf"quantised: tensor '{tensor}' in model\.safetensors has a scale") as caught:
        verify_model(str(folder))
    assert "download it again" in str(caught.value.hint)


def test_blocks_of_gguf_with_such_scales_are_found(tmp_path: Path) -> None:
    path, _ = write_tiny_gguf(tmp_path, "qwen3_moe", lambda name: "Q4_0" if "exps" in name else "F32", moe_intermediate_size=64, parts=2)
    assert not verify_model(str(path)).bad
    where, tensor = open_gguf(path).tensors["blk.3.ffn_down_exps.weight"]
    data = bytearray(where.read_bytes())
    data[tensor.stop - 18 : tensor.stop - 16] = b"\x00\xfc"
    where.write_bytes(data)
    with pytest.raises(VerificationError, match=rf"tensor 'blk\.3\.ffn_down_exps\.weight' in {where.name} has a scale that is not"):
        verify_model(str(path))
