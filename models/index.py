"""All tensors of a model folder, whatever the number of shards, and the identity of a model. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from rimuru_models.errors import CheckpointError, NotFoundError
from rimuru_models.gguf import GGUFFiles, gguf_of, open_gguf
from rimuru_models.gguf.config import config_values
from rimuru_models.headers import SafetensorsHeader, TensorInfo, brief, load_json, read_header

MAX_JSON_BYTES = 100_000_000
_SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class CheckpointIndex:
    """Where every tensor of a model lies.

    Attributes:
        model_dir: the model folder.
        tensors: tensor name -> (file, TensorInfo); `file` is a path inside `model_dir`.
        headers: file -> its checked header.
        gguf: the files of a GGUF model, whose names and types these are then; None for safetensors.
    """

    model_dir: Path
    tensors: dict[str, tuple[Path, TensorInfo]]
    headers: dict[Path, SafetensorsHeader]
    gguf: GGUFFiles | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensor data."""
        return sum(info.stop - info.start for _, info in self.tensors.values())


def read_json_file(path: Path) -> object:
    """Strictly parsed content of a JSON file.

    Raises:
        CheckpointError: unreadable, larger than 100 MB, or not valid JSON.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes: far too large for a checkpoint's JSON.")
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
    return load_json(text, str(path))


def _require_model_dir(model_dir: Path) -> None:
    if not model_dir.exists():
        raise NotFoundError(f"{model_dir} does not exist.", hint="Give a folder that holds config.json and *.safetensors files.")
    if not model_dir.is_dir():
        raise NotFoundError(f"{model_dir} is not a folder.", hint="Give the folder that holds config.json and *.safetensors files.")
    if not (model_dir / "config.json").is_file():
        raise NotFoundError(f"{model_dir} is not a model folder: it has no config.json.", hint="Give a folder as downloaded from the hub.")


def _shard_names(model_dir: Path) -> tuple[list[str], dict[str, str] | None]:
    """File names of the shards and, if there is an index, its tensor -> file map."""
    index_path = model_dir / INDEX
    if (model_dir / _SINGLE).exists():  # a directory of that name is refused when it is read
        return [_SINGLE], None
    if index_path.exists():
        weight_map = _weight_map(index_path)
        return sorted(set(weight_map.values())), weight_map
    names = sorted(path.name for path in model_dir.glob("*.safetensors") if not path.name.startswith("."))  # ._x: macOS metadata
    if names:
        return names, None
    pickles = sorted(path.name for pattern in _PICKLES for path in model_dir.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{model_dir} holds only pickled weights ({pickles[0]}), which can run any code when they are loaded; they are refused.",
            hint="Get the safetensors version of this model, or convert it on a machine where you trust it.",
        )
    raise NotFoundError(f"{model_dir} holds no *.safetensors files.", hint="Download the weights of this model first.")


def _weight_map(index_path: Path) -> dict[str, str]:
    return weight_map_of(read_json_file(index_path), str(index_path))


def weight_map_of(index: object, where: str) -> dict[str, str]:
    """The tensor -> file map of a parsed model.safetensors.index.json; `where` names it in errors.

    Raises:
        CheckpointError: there is none, or it points to something that is not a safetensors file of the folder itself.
    """
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where} has no weight_map of tensor names to files.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_plain_name(file):
            raise CheckpointError(f"{where}: tensor {name[:200]!r} points to {brief(file)}, which is not a file name inside the folder.")
        if not file.endswith(".safetensors"):
            raise CheckpointError(f"{where}: tensor {name[:200]!r} points to {file[:200]!r}, which is not a safetensors file.")
    return weight_map


def _is_plain_name(file: str) -> bool:
    """Whether `file` names an entry of the folder itself on every system (no separators, drives, parents, control characters)."""
    return (
        len(file) < 256
        and file.isprintable()
        and PurePosixPath(file).name == file
        and PureWindowsPath(file).name == file
        and file not in ("", ".", "..")
    )


def open_index(model_dir: Path) -> CheckpointIndex:
    """Read the headers of all shards of a model folder.

    Uses model.safetensors, else the files of model.safetensors.index.json, else every *.safetensors file, else the one GGUF model in it; or
    the GGUF file that `model_dir` names.

    Raises:
        NotFoundError: not there, not a model folder, or no weights in it.
        CheckpointError: pickled weights only, a missing shard, an index that points outside the folder or disagrees with the
            shards, a tensor in two files, or a broken header.
    """
    model_dir = Path(model_dir)
    gguf = gguf_of(model_dir)
    if gguf is not None:
        return gguf_index(open_gguf(gguf))
    _require_model_dir(model_dir)
    names, weight_map = _shard_names(model_dir)
    headers: dict[str, SafetensorsHeader] = {}
    for name in names:
        path = model_dir / name
        if not path.exists():
            raise CheckpointError(f"the shard {path} is missing.", hint="Download the model again; files that are complete are kept.")
        headers[name] = read_header(path)
    return combine_headers(model_dir, headers, weight_map)


def gguf_index(files: GGUFFiles) -> CheckpointIndex:
    """A GGUF model's headers in the form of an index: its own names and types of tensors, places counted from each file's beginning."""
    tensors = {name: (path, TensorInfo(one.kind, one.shape, one.start, one.stop)) for name, (path, one) in files.tensors.items()}
    headers: dict[Path, SafetensorsHeader] = {}
    for path, header in files.headers.items():
        own = {name: TensorInfo(one.kind, one.shape, one.start, one.stop) for name, one in header.tensors.items()}
        headers[path] = SafetensorsHeader(own, 0, {})
    return CheckpointIndex(files.path, tensors, headers, files)


def combine_headers(model_dir: Path, headers: Mapping[str, SafetensorsHeader], weight_map: Mapping[str, str] | None) -> CheckpointIndex:
    """Make one index of the headers of all shards, read from a folder or from afar.

    Args:
        model_dir: the folder; only names paths.
        headers: shard name -> its checked header.
        weight_map: tensor -> shard, as model.safetensors.index.json has it; None when there is none.

    Raises:
        CheckpointError: a tensor in two shards, or the map disagrees with the shards.
    """
    tensors: dict[str, tuple[Path, TensorInfo]] = {}
    for name, header in headers.items():
        path = model_dir / name
        for tensor, info in header.tensors.items():
            if weight_map is not None and weight_map.get(tensor) != name:
                if tensor in weight_map:
                    raise CheckpointError(f"{path} holds tensor {tensor[:200]!r}, but {INDEX} says that it is in {weight_map[tensor]}.")
                continue  # a file may carry more than the index uses
            if tensor in tensors:
                raise CheckpointError(f"tensor {tensor[:200]!r} is in both {tensors[tensor][0].name} and {name} of {model_dir}.")
            tensors[tensor] = (path, info)
    for tensor, name in (weight_map or {}).items():
        if tensor not in tensors:
            raise CheckpointError(f"{model_dir / name} lacks tensor {tensor[:200]!r}, which {INDEX} promises there.")
    return CheckpointIndex(model_dir, tensors, {model_dir / name: header for name, header in headers.items()})


def model_identity(model_dir: Path) -> str:
    """SHA-256 (hex) of a model's configuration and tensor headers: equal for equal architectures and shapes, whatever the sharding.

    Covers config.json (canonical JSON; of a GGUF model what its metadata mean) and every tensor's name, dtype and shape; neither weights
    nor file names.

    Raises:
        CheckpointError, NotFoundError: as `open_index`.
    """
    index = open_index(model_dir)
    config = read_json_file(index.model_dir / "config.json") if index.gguf is None else config_values(index.gguf)
    tensors = sorted([name, info.dtype, list(info.shape)] for name, (_, info) in index.tensors.items())
    try:
        text = json.dumps({"config": config, "tensors": tensors}, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    except RecursionError:
        raise CheckpointError(f"{index.model_dir / 'config.json'} nests brackets too deeply.") from None
    return hashlib.sha256(text.encode("ascii")).hexdigest()
