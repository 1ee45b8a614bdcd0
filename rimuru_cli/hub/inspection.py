"""A first look at a model's folder: what it is, how precise, whether rimuru can run it. Reads config.json and file names, no weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rimuru_cli.hub.snapshot import lacking, missing_files
from rimuru_models.config import ModelConfig
from rimuru_models.errors import RimuruError
from rimuru_models.gguf import GGUFFiles, is_gguf, open_gguf
from rimuru_models.gguf.config import config_values
from rimuru_models.gguf.files import part_names
from rimuru_models.gguf.kinds import in_words
from rimuru_models.gguf.resolve import resolve_gguf
from rimuru_models.headers import DTYPE_BITS, read_header
from rimuru_models.index import INDEX, read_json_file, weight_map_of
from rimuru_models.quantization.table import Quantization
from rimuru_models.tensor_map import FLOAT_DTYPES

Status = Literal["ready", "incomplete", "unusable"]

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32", "float": "F32", "float64": "F64"}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_EXPERTS = re.compile(r"\.ffn_(?:gate|up|down|gate_up)(?:_exps|\.\d+)\.weight$")
_QUERY = ".self_attn.q_proj."
_SHOWN = 2
_LONGEST = 80


@dataclass(frozen=True)
class Inspection:
    """What a first look at a folder shows.

    Attributes:
        architecture: class name in config.json; None when it names none.
        precision: safetensors name of the weights' number format, or what quantised experts are called; None: not known.
        config: the configuration, if rimuru can run such a model.
        status: ready to run, incomplete (a download was cut short), or nothing for rimuru.
        why_not: why it is not ready, a phrase without a full stop; None when it is.
        dense: the same as `precision` of everything but experts; None: not known.
    """

    architecture: str | None
    precision: str | None
    config: ModelConfig | None
    status: Status
    why_not: str | None
    dense: str | None = None


def inspect(folder: Path, repository: str | None = None) -> Inspection:
    """Look at a folder that is thought to hold a model. Never fails: what is wrong is the answer.

    Args:
        folder: where it lies; or a GGUF file, the first of its parts.
        repository: `org/name`, if it is a snapshot of one in the cache.
    """
    if is_gguf(folder) and not folder.is_dir():
        return _gguf(folder)
    if not (folder / "config.json").is_file():
        return _without_config(folder)
    try:
        values = read_json_file(folder / "config.json")
    except RimuruError:
        return Inspection(None, None, None, "unusable", "its config.json cannot be read")
    if not isinstance(values, dict):
        return Inspection(None, None, None, "unusable", "its config.json is not an object")
    architecture, precision = _architecture(values), _precision(values, folder)
    if _pickled_only(folder):
        return Inspection(architecture, precision, None, "unusable", "only pickled weights, which can run any code when they are loaded")
    try:
        config = ModelConfig.from_dict(values, where="config.json")
    except RimuruError as error:
        return Inspection(architecture, precision, None, "unusable", error.what.removeprefix("config.json: ").rstrip("."))
    dense = precision
    if config.quantization is not None:
        precision = config.quantization.label
        dense = _dense_of(folder, config.quantization)
    missing = missing_files(folder) if repository is None else lacking(repository, folder)
    if missing:
        return Inspection(architecture, precision, config, "incomplete", f"it lacks {_some(missing)}", dense)
    return Inspection(architecture, precision, config, "ready", None, dense)


def _dense_of(folder: Path, quantization: Quantization) -> str | None:
    """What a quantised model keeps its dense matrices as, shown by one of them: reading all headers would take a list too long."""
    try:
        names = weight_map_of(read_json_file(folder / INDEX), INDEX) if (folder / INDEX).is_file() else None
        found = None if names is None else next((file for name, file in names.items() if _QUERY in name), None)
        header = read_header(folder / (found or "model.safetensors"))
    except RimuruError:
        return None
    parts = {name.partition(_QUERY)[2]: info.dtype for name, info in header.tensors.items() if _QUERY in name}
    if not parts:
        return None
    return parts["weight"] if parts.get("weight") in FLOAT_DTYPES else quantization.label


def _without_config(folder: Path) -> Inspection:
    if next(folder.glob("*.safetensors"), None):
        return Inspection(None, None, None, "incomplete", "it lacks config.json")
    return Inspection(None, None, None, "unusable", "no config.json, so no model that rimuru knows")


def _gguf(path: Path) -> Inspection:
    """A GGUF model by the headers of its files."""
    missing = [name for name in part_names(path.name) if not path.with_name(name).is_file()]
    if missing:
        return Inspection(None, "GGUF", None, "incomplete", f"it lacks {_some(missing)}")
    try:
        files = open_gguf(path)
        architecture, precision = _printable(files.main.string("general.architecture")), gguf_precision(files)
    except RimuruError as error:
        return Inspection(None, "GGUF", None, "unusable", error.what.removeprefix(f"{path} ").rstrip("."))
    try:
        config = ModelConfig.from_dict(config_values(files), where=path.name)
        resolve_gguf(files, config)
    except RimuruError as error:
        why = error.what.removeprefix(f"{path}: ").removeprefix(f"{path.name}: ").rstrip(".")
        return Inspection(architecture, precision, None, "unusable", why)
    others = [one for name, (_, one) in files.tensors.items() if not _EXPERTS.search(name) and len(one.shape) > 1]
    dense = in_words((one.kind, one.stop - one.start) for one in others)
    return Inspection(config.architecture, precision, config, "ready", None, dense)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_LONGEST])


def gguf_precision(files: GGUFFiles) -> str:
    """What experts are stored as, in words; where there are none, all matrices."""
    experts = [one for name, (_, one) in files.tensors.items() if _EXPERTS.search(name)]
    matrices = experts or [one for _, one in files.tensors.values() if len(one.shape) > 1]
    return in_words((one.kind, one.stop - one.start) for one in matrices)


def _pickled_only(folder: Path) -> bool:
    index = folder / "model.safetensors.index.json"
    return not index.is_file() and not next(folder.glob("*.safetensors"), None) and any(next(folder.glob(p), None) for p in _PICKLES)


def _architecture(values: Mapping[str, Any]) -> str | None:
    named = values.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    return first[:_LONGEST] if isinstance(first, str) else None


def _precision(values: Mapping[str, Any], folder: Path) -> str | None:
    """As config.json says; where it does not, what most bytes of the first file with weights are."""
    holders = [values, values.get("text_config")]
    for holder in holders:
        if isinstance(holder, Mapping) and isinstance(holder.get("quantization_config"), Mapping):
            method = holder["quantization_config"].get("quant_method")
            return method[:_LONGEST] if isinstance(method, str) else "quantised"
    for holder in holders:
        if isinstance(holder, Mapping):
            for field in ("dtype", "torch_dtype"):
                declared = holder.get(field)
                if isinstance(declared, str) and declared.removeprefix("torch.") in _DTYPES:
                    return _DTYPES[declared.removeprefix("torch.")]
    return _precision_of_file(folder)


def _precision_of_file(folder: Path) -> str | None:
    first = min((path for path in folder.glob("*.safetensors") if not path.name.startswith(".")), default=None)
    if first is None:
        return None
    try:
        header = read_header(first)
    except RimuruError:
        return None
    counted: Counter[str] = Counter()
    for info in header.tensors.values():
        counted[info.dtype] += info.stop - info.start
    best = max(counted, key=lambda name: (counted[name], DTYPE_BITS[name]), default=None)
    return best


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more files" if len(names) > _SHOWN else shown
