"""A quantised copy of a checkpoint, made shard by shard. Killed half way and started again, it goes on behind the last finished shard."""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rimuru_models.errors import NoSpaceError, UsageError
from rimuru_models.index import read_json_file
from rimuru_models.quantizer.calibrate import Matrix, quantize_plainly, quantize_with_text
from rimuru_models.quantizer.groups import pack_words, unpack_words
from rimuru_models.quantizer.layout import Recipe, dense_tensors, expert_projections, layer_tensors, quantization_config, shard_name
from rimuru_models.quantizer.note import NOTE, difference, note_of, noted, noted_checksums, with_checksums
from rimuru_models.quantizer.shards import Promised, ShardWriter, holds, saying_full, sha256_of
from rimuru_models.weights import CheckpointReader

_WEIGHTS = (".safetensors", ".safetensors.index.json")
_TEMPLATES = "additional_chat_templates"
_FOREIGN_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".h5", ".msgpack", ".onnx")

Progress = Callable[[str, int, int], None]


def finished_copy(reader: CheckpointReader, folder: Path, recipe: Recipe, source: str) -> bool:
    """Whether a folder holds a whole copy, made of this source by this recipe; of its weights only headers and sizes are read."""
    if not (folder / "config.json").is_file() or note_of(folder) != noted(source, recipe):
        return False
    return _small_files_are_there(reader.index.model_dir, folder) and all(
        holds(folder / name, tensors) for name, tensors in _plan(reader, recipe.fitting(reader.config)).items()
    )


def quantize_checkpoint(
    reader: CheckpointReader, folder: Path, recipe: Recipe, tokens: Sequence[int], source: str, progress: Progress | None = None
) -> None:
    """Make the copy in `folder`, or what is missing of it or damaged.

    Args:
        reader: of the original, in plain numbers.
        tokens: the calibration text; only needed with feedback.
        source: what tells this original from others.
        progress: called with (words, done bytes, total bytes) of what is written.

    Raises:
        UsageError: the folder has something else in it.
        NoSpaceError: the disk is too full.
        CheckpointError: the original cannot be read.
    """
    if finished_copy(reader, folder, recipe, source):
        return
    note = noted(source, recipe)
    _begin(folder, note)
    recipe = recipe.fitting(reader.config)
    plan = _plan(reader, recipe)
    first, dense = next(iter(plan.items()))
    store = _Shards(reader, folder, recipe, dict(zip(reader.config.moe_layers, list(plan.items())[1:], strict=True)), progress)
    store.total = sum(tensors.num_bytes for shard in plan.values() for tensors in shard.values())
    missing = [shard for name, shard in plan.items() if not holds(folder / name, shard)]
    _check_space(folder, sum(tensor.num_bytes for shard in missing for tensor in shard.values()))
    with store:
        _copy_small_files(reader.index.model_dir, folder)
        if not holds(folder / first, dense):
            store.sha256[first] = _copy_dense(reader, folder / first, dense)
        store.advance(sum(tensor.num_bytes for tensor in dense.values()))
        if recipe.feedback:
            quantize_with_text(reader, recipe, store, tokens, store.expert_done)
        else:
            quantize_plainly(reader, recipe, store, store.expert_done)
    weight_map = {name: shard for shard, tensors in plan.items() for name in tensors}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": store.total}, "weight_map": weight_map})
    config = read_json_file(reader.index.model_dir / "config.json")
    assert isinstance(config, dict), "the reader has read it"
    config |= {"quantization_config": quantization_config(reader, recipe)}
    _write_json(folder / NOTE, with_checksums(note, _checksums(reader, folder, plan, store.sha256, _json(config))))
    # Last of all: without it, the folder is no model.
    _write_json(folder / "config.json", config)


def _checksums(reader: CheckpointReader, folder: Path, shards: Iterable[str], written: dict[str, str], config: str) -> dict[str, str]:
    """sha256 of all files, for `rimuru verify`: of shards what was written, now or before; of the others what is there."""
    sums = {"config.json": hashlib.sha256(config.encode("utf-8")).hexdigest()}
    known = noted_checksums(folder) | written
    small = [path.relative_to(reader.index.model_dir).as_posix() for path in _small_files(reader.index.model_dir)]
    for name in (*small, "model.safetensors.index.json"):
        sums[name] = sha256_of(folder / name)
    return sums | {name: known.get(name) or sha256_of(folder / name) for name in shards}


def _plan(reader: CheckpointReader, recipe: Recipe) -> dict[str, dict[str, Promised]]:
    """What each shard of the copy has, by file name: what is not quantised, then layer after layer."""
    layers = reader.config.moe_layers
    count = len(layers) + 1
    plan = {shard_name(1, count): dense_tensors(reader)}
    return plan | {shard_name(place, count): layer_tensors(reader, layer, recipe) for place, layer in enumerate(layers, start=2)}


class _Shards:
    """Satisfies `calibrate.Store`: one file a layer."""

    def __init__(
        self,
        reader: CheckpointReader,
        folder: Path,
        recipe: Recipe,
        shards: dict[int, tuple[str, dict[str, Promised]]],
        progress: Progress | None,
    ) -> None:
        self._reader, self._folder, self._recipe, self._shards = reader, folder, recipe, shards
        self._progress = progress
        self._open = ExitStack()
        self._writer: ShardWriter | None = None
        self._done = 0
        self.total = 0
        self.sha256: dict[str, str] = {}
        self._each = {
            layer: sum(tensor.num_bytes for tensor in tensors.values()) // reader.config.num_experts
            for layer, (_, tensors) in shards.items()
        }

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def advance(self, num_bytes: int) -> None:
        """Tell the person how far it has come."""
        self._done += num_bytes
        if self._progress is not None:
            self._progress(f"quantising to {self._recipe.name}", min(self._done, self.total), self.total)

    def expert_done(self) -> None:
        """One more expert was written."""
        self.advance(next(iter(self._each.values())))

    def finished(self, layer: int) -> bool:
        """See `calibrate.Store.finished`."""
        name, tensors = self._shards[layer]
        done = holds(self._folder / name, tensors)
        if done:
            self.advance(self._each[layer] * self._reader.config.num_experts)
        return done

    def read(self, layer: int, expert: int) -> tuple[Matrix, Matrix, Matrix]:
        """See `calibrate.Store.read`."""
        with safe_open(self._folder / self._shards[layer][0], framework="pt") as shard:
            found: list[Matrix] = []
            for module, _, columns in expert_projections(self._reader, layer, expert):
                words = shard.get_tensor(f"{module}.weight_packed")
                found.append((unpack_words(words, self._recipe.bits, columns), shard.get_tensor(f"{module}.weight_scale")))
        return found[0], found[1], found[2]

    def write(self, layer: int, expert: int, matrices: tuple[Matrix, Matrix, Matrix]) -> None:
        """See `calibrate.Store.write`."""
        if self._writer is None:
            name, tensors = self._shards[layer]
            self._writer = self._open.enter_context(ShardWriter(self._folder / name, tensors))
        for (module, rows, columns), (codes, scales) in zip(expert_projections(self._reader, layer, expert), matrices, strict=True):
            self._writer.write(f"{module}.weight_packed", pack_words(codes, self._recipe.bits))
            self._writer.write(f"{module}.weight_scale", scales)
            self._writer.write(f"{module}.weight_shape", torch.tensor([rows, columns]))
        if expert + 1 == self._reader.config.num_experts:
            self._open.close()
            self.sha256[self._shards[layer][0]] = self._writer.sha256.hexdigest()
            self._writer = None


def _copy_dense(reader: CheckpointReader, path: Path, tensors: dict[str, Promised]) -> str:
    """All that is not quantised, as it lies in the files; returns its sha256."""
    with ShardWriter(path, tensors) as shard:
        for name in tensors:
            file, info = reader.index.tensors[name]
            with file.open("rb") as source:
                source.seek(reader.index.headers[file].data_offset + info.start)
                shard.copy(name, source, info.stop - info.start)
    return shard.sha256.hexdigest()


def _small_files(source: Path) -> Iterator[Path]:
    """Tokenizer, templates, generation settings, licence; neither weights nor config.json, nor what belongs to where the original lies."""
    for path in sorted((*source.iterdir(), *source.glob(f"{_TEMPLATES}/*.jinja"))):
        if not path.is_file() or path.name.startswith(".") or path.name in ("config.json", "manifest.json", NOTE):
            continue
        if not path.name.endswith(_WEIGHTS) and path.suffix not in _FOREIGN_WEIGHTS:
            yield path


def _small_files_are_there(source: Path, folder: Path) -> bool:
    copies = ((path, folder / path.relative_to(source)) for path in _small_files(source))
    return all(copy.is_file() and filecmp.cmp(path, copy, shallow=False) for path, copy in copies)


def _copy_small_files(source: Path, folder: Path) -> None:
    for path in _small_files(source):
        with saying_full(folder):
            copy = folder / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


def _begin(folder: Path, wanted: dict[str, Any]) -> None:
    found = note_of(folder)
    if found is None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is there already, and not a copy that rimuru began.", hint="Name a folder that is empty or not there.")
    if found is not None and found != wanted:
        raise UsageError(f"{folder} holds another copy: {difference(found, wanted)}.", hint="Name another folder, or delete it.")
    with saying_full(folder.parent):
        folder.mkdir(parents=True, exist_ok=True)
        if found is None:
            _write_json(folder / NOTE, wanted)
        (folder / "config.json").unlink(missing_ok=True)  # no model while something is missing
        for left in folder.glob(".*.part"):
            left.unlink()


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise NoSpaceError(
            f"{folder} lacks room: {needed / 1e6:,.0f} MB are still to be written and {free / 1e6:,.0f} MB are free.",
            hint="Make room, or name a folder on another disk with --out. Finished files are kept.",
        )


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    with saying_full(path.parent):
        with part.open("w", encoding="utf-8", newline="\n") as file:
            file.write(_json(content))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
