"""The host tier of a device: where experts lie, what is locked, and what a refusal leads to."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_checkpoints import write_tiny_checkpoint

from rimuru_cli.bench.synthetic import SyntheticReader
from rimuru_cli.engine.device import expert_files, pinned_host
from rimuru_cli.engine.device.locking import NoLocker
from rimuru_cli.engine.device.pinned_host import PinnedHost
from rimuru_models.errors import CheckpointError
from rimuru_models.weights import CheckpointReader

CPU = torch.device("cpu")
LAYERS, EXPERTS = 4, 8


@pytest.fixture(scope="module", params=["per_expert", "fused"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("pinned") / "m", "qwen3_moe", dtype=torch.bfloat16, layout=request.param, shards=2)


def _bytes(reader: CheckpointReader, layer: int, expert: int) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in reader.expert(reader.config.moe_layers[layer], expert)]).view(torch.uint8)


def _assert_right(host: PinnedHost, reader: CheckpointReader) -> None:
    """Every expert, pinned or not, is read right in every way."""
    out = torch.empty(host.expert_bytes, dtype=torch.uint8)
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            wanted = _bytes(reader, layer, expert)
            host.read(layer, expert, out.fill_(0xFF))
            assert torch.equal(out, wanted)
            assert torch.equal(host.content(layer, expert), wanted)
            pointer = int(host.pointers[layer, expert])
            assert bool(pointer) == bool(host.pinned[layer, expert])
            if pointer:
                run = host.run(layer, expert, 1)
                assert torch.equal(run, wanted) and run.data_ptr() == pointer and pointer % 4096 == 0


def test_all_experts_lie_at_whole_memory_pages_and_are_locked(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    locker = NoLocker()
    with CheckpointReader(folder) as reader:
        host = PinnedHost(reader, CPU, lambda done, total: seen.append((done, total)), locker=locker)
        assert host.stride_bytes % 4096 == 0 and host.stride_bytes - 4096 < host.expert_bytes < host.stride_bytes
        assert host.pinned.all() and host.mapped_bytes == 0 and host.notices == ()
        assert host.pinned_bytes == LAYERS * EXPERTS * host.stride_bytes == sum(locker.locked.values())
        assert host.padding_bytes == LAYERS * EXPERTS * (host.stride_bytes - host.expert_bytes)
        _assert_right(host, reader)
        total = LAYERS * EXPERTS * host.expert_bytes
        assert seen[-1] == (total, total) and seen == sorted(seen)
        assert not host.joined(0, 0, 1), "padding lies between them"
        host.close()
    assert not locker.locked


def test_experts_of_whole_pages_are_joined(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", "qwen3_moe")  # float32: 9 memory pages
    with CheckpointReader(folder) as reader:
        host = PinnedHost(reader, CPU)
        assert host.stride_bytes == host.expert_bytes
        assert host.joined(1, 3, 4) and not host.joined(1, 3, 5) and not host.joined(1, 4, 3)
        assert torch.equal(host.run(1, 3, 2), torch.cat([_bytes(reader, 1, 3), _bytes(reader, 1, 4)]))
        host.close()


def test_the_best_ranked_experts_are_locked_first(folder: Path) -> None:
    scores = np.random.default_rng(0).random((LAYERS, EXPERTS))
    with CheckpointReader(folder) as reader:
        stride = -(-PinnedHost(reader, CPU, budget=0).expert_bytes // 4096) * 4096
        for count in (0, 1, 13, 31):
            host = PinnedHost(reader, CPU, budget=count * stride + 100, scores=scores)
            assert host.pinned_bytes == count * stride
            assert host.mapped_bytes == (LAYERS * EXPERTS - count) * host.expert_bytes
            threshold = np.sort(scores.reshape(-1))[::-1][count]
            assert np.array_equal(host.pinned, scores > threshold)
            assert "main memory has no room" in host.notices[0]
            _assert_right(host, reader)
            host.close()


def test_where_nothing_is_known_layers_take_turns(folder: Path) -> None:
    with CheckpointReader(folder) as reader:
        stride = PinnedHost(reader, CPU, budget=0).stride_bytes
        host = PinnedHost(reader, CPU, budget=14 * stride)
        assert sorted(host.pinned.sum(axis=1).tolist()) == [3, 3, 4, 4]
        host.close()


@pytest.mark.parametrize("granted", [0, 1, 5, 17, 31])
def test_a_refusal_leaves_the_best_experts_locked(granted: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver stops anywhere; smaller and smaller pieces are tried, and what is locked then is used for the best of all layers."""
    monkeypatch.setattr(pinned_host, "_SMALLEST_PIECE", 4096)
    scores = np.random.default_rng(1).random((LAYERS, EXPERTS))
    with CheckpointReader(folder) as reader:
        stride = PinnedHost(reader, CPU, budget=0).stride_bytes
        locker = NoLocker(limit=granted * stride + 100)
        host = PinnedHost(reader, CPU, scores=scores, locker=locker)
        assert host.refused and host.pinned_bytes == granted * stride == sum(locker.locked.values())
        threshold = np.sort(scores.reshape(-1))[::-1][granted]
        assert np.array_equal(host.pinned, scores > threshold)
        assert "the driver page-locks no more" in host.notices[0]
        _assert_right(host, reader)
        host.close()
    assert not locker.locked


def test_pieces_are_never_joined_across_their_border(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy engine takes no run of bytes that was locked in two pieces."""
    folder = write_tiny_checkpoint(tmp_path / "m", "qwen3_moe")
    monkeypatch.setattr(pinned_host, "_SMALLEST_PIECE", 4096)
    with CheckpointReader(folder) as reader:
        locker = NoLocker()
        host = PinnedHost(reader, CPU, locker=locker)
        borders = sorted(locker.locked)[1:]
        assert borders
        for layer in range(LAYERS):
            for expert in range(EXPERTS - 1):
                following = int(host.pointers[layer, expert + 1])
                assert host.joined(layer, expert, expert + 1) == (following not in borders)
        host.close()


def test_files_without_positional_reads_are_read_by_threads_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(expert_files.os, "preadv", raising=False)
    with CheckpointReader(folder) as reader:
        host = PinnedHost(reader, CPU, budget=40_000)
        _assert_right(host, reader)
        host.close()


def test_a_source_without_files_is_copied_from_its_tensors() -> None:
    reader = SyntheticReader("tiny", dtype=torch.float32)
    host = PinnedHost(reader, CPU)
    for layer, expert in ((0, 0), (2, 31)):
        wanted = torch.cat([part.reshape(-1) for part in reader.expert(layer, expert)]).view(torch.uint8)
        assert torch.equal(host.content(layer, expert), wanted)
    host.close()


def test_a_truncated_file_is_said_and_nothing_stays_locked(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", "qwen3_moe")
    locker = NoLocker()
    with CheckpointReader(folder) as reader:
        weights = next(folder.glob("*.safetensors"))
        with weights.open("r+b") as file:
            file.truncate(weights.stat().st_size // 2)
        with pytest.raises(CheckpointError, match="shrank while it was in use"):
            PinnedHost(reader, CPU, locker=locker)
    assert not locker.locked


def test_a_file_that_is_gone_is_said(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", "qwen3_moe")
    with CheckpointReader(folder) as reader:
        next(folder.glob("*.safetensors")).unlink()
        with pytest.raises(CheckpointError, match="cannot be read"):
            PinnedHost(reader, CPU)


def test_a_shared_tier_survives_an_engine(folder: Path) -> None:
    locker = NoLocker()
    with CheckpointReader(folder) as reader:
        host = PinnedHost(reader, CPU, locker=locker)
        host.shared = True
        host.close()
        assert locker.locked
        host.shared = False
        host.close()
        assert not locker.locked


def test_an_engine_that_is_forgotten_leaves_nothing_locked(folder: Path) -> None:
    """A lock that outlives its memory would let the device read stale bytes at addresses that were given to somebody else."""
    locker = NoLocker()
    with CheckpointReader(folder) as reader:
        host = PinnedHost(reader, CPU, budget=100_000, locker=locker)
        host.staging(2)
        assert locker.locked
        del host
        gc.collect()
    assert not locker.locked
