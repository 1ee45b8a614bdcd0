"""GGUF models on the disk: one file, or parts that are numbered `-00001-of-00003.gguf`. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rimuru_models.errors import CheckpointError, NotFoundError, UsageError
from rimuru_models.gguf.header import GGUFHeader, GGUFTensor, read_gguf_header

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf", re.IGNORECASE)
_NOT_A_MODEL = re.compile(r"(?:^|[-_.])(?:mmproj|imatrix|mtp)(?:[-_.]|$)", re.IGNORECASE)
_MAX_PARTS = 999  # the largest models have some fifty
_SHOWN = 6
_MIXED_UP = "Its files were renamed, or are those of several models: put all parts of one model side by side under their own names."


@dataclass(frozen=True)
class GGUFFiles:
    """All files of one GGUF model, their headers checked.

    Attributes:
        path: the file, or the first of the parts; what names the model.
        headers: file -> header, in order. The first has the metadata.
        tensors: name -> (file, GGUFTensor), of all parts.
    """

    path: Path
    headers: dict[Path, GGUFHeader]
    tensors: dict[str, tuple[Path, GGUFTensor]]

    @property
    def main(self) -> GGUFHeader:
        """The header with the metadata."""
        return self.headers[self.path]


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file (that may not exist)."""
    return path.name.lower().endswith(".gguf")


def is_model_name(name: str) -> bool:
    """Whether a GGUF file's name is that of a language model or its first part, not of what accompanies one (vision, statistics)."""
    part = _PART.fullmatch(name)
    return name.lower().endswith(".gguf") and not _NOT_A_MODEL.search(name[:-5]) and (part is None or int(part["number"]) == 1)


def part_names(name: str) -> list[str]:
    """Names of all parts of the model that a file (any of its parts) belongs to, in order; the name itself where there are no parts."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    total = int(match["total"])
    suffix = name[match.end("total") :]
    return [f"{match['stem']}-{number:05d}-of-{match['total']}{suffix}" for number in range(1, max(1, min(total, _MAX_PARTS)) + 1)]


def first_part(name: str) -> str:
    """Name of the first part of the model that a file belongs to; the name itself where there are no parts."""
    match = _PART.fullmatch(name)
    return name if match is None else f"{match['stem']}-00001-of-{match['total']}{name[match.end('total') :]}"


def variant_stem(name: str) -> str:
    """A file's name without its part number and suffix: what all parts of a model share."""
    match = _PART.fullmatch(name)
    return match["stem"] if match else name[:-5] if name.lower().endswith(".gguf") else name


def models_in(folder: Path) -> list[Path]:
    """GGUF models directly in a folder, sorted: files, or the first of their parts, which may be missing where others are there."""
    names = {first_part(path.name) for path in folder.glob("[!.]*") if is_gguf(path) and not path.is_dir()}
    return sorted(folder / name for name in names if is_model_name(name))


def find_gguf(path: Path) -> Path:
    """The file that names a model: the path itself or the first of its parts; of a folder, the one model in it.

    Raises:
        NotFoundError: there is none.
        UsageError: a folder with several.
    """
    if is_gguf(path) and not path.is_dir():
        return path.with_name(first_part(path.name))
    found = models_in(path) if path.is_dir() else []
    if not found:
        raise NotFoundError(f"{path} holds no GGUF model.", hint="Give a *.gguf file, or the folder that holds it.")
    if len(found) > 1:
        names = ", ".join(one.name for one in found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
        raise UsageError(f"{path} holds several GGUF models: {names}.", hint=f"name one of them: {found[0]}")
    return found[0]


def gguf_of(path: Path) -> Path | None:
    """The GGUF file that a model's path means: itself, or what a folder without safetensors holds; None for a folder of another kind.

    Raises:
        UsageError: a folder with several models.
    """
    if is_gguf(path) and not path.is_dir():
        return find_gguf(path)
    if not path.is_dir() or any(path.glob("[!.]*.safetensors")) or not models_in(path):
        return None
    return find_gguf(path)


def open_gguf(path: Path) -> GGUFFiles:
    """Read the headers of a model's file, or of all its parts.

    Args:
        path: the file, any of the parts, or a folder with one model.

    Raises:
        NotFoundError, UsageError: as `find_gguf`; or the file is not there.
        CheckpointError: a broken header, a missing part, parts of several models, or a tensor in two of them.
    """
    first = find_gguf(Path(path))
    if not first.exists():
        raise NotFoundError(f"{first} does not exist.", hint="Give a *.gguf file; of a model in parts, all of them side by side.")
    headers = {first: _header(first)}
    for name in part_names(first.name)[1 : part_count(headers[first])]:
        part = first.with_name(name)
        if not part.exists():
            raise CheckpointError(f"the part {part} is missing.", hint="Download the model again; files that are complete are kept.")
        headers[part] = _header(part)
    return combine_parts(first, headers)


def _header(path: Path) -> GGUFHeader:
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
    return _read_once(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4)
def _read_once(path: Path, num_bytes: int, mtime_ns: int) -> GGUFHeader:
    """The same header is asked for several times on the way to an engine, and a vocabulary takes a while to walk over."""
    return read_gguf_header(path)


def part_count(main: GGUFHeader) -> int:
    """How many files a model has, as its first header says; 1 where it does not."""
    count = main.integer("split.count", 1)
    if not 0 <= count <= _MAX_PARTS:
        raise main.broken(f"split.count is {count}")
    return max(1, count)


def combine_parts(first: Path, headers: dict[Path, GGUFHeader]) -> GGUFFiles:
    """Make one model of the headers of all parts, read from a disk or from afar.

    Raises:
        CheckpointError: they are not the parts of one model.
    """
    main = headers[first]
    count = part_count(main)
    if count != len(headers) or count != len(part_names(first.name)):
        named = len(part_names(first.name))
        raise main.broken(f"it says that it is one of {count} parts, but its name makes it one of {named}", hint=_MIXED_UP)
    tensors: dict[str, tuple[Path, GGUFTensor]] = {}
    for number, (path, header) in enumerate(headers.items()):
        if count > 1 and (header.integer("split.no", number), header.integer("split.count", count)) != (number, count):
            raise header.broken(f"it is not part {number + 1} of {count}", hint=_MIXED_UP)
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise header.broken(f"tensor {name!r} is in {tensors[name][0].name}, too", hint=_MIXED_UP)
            tensors[name] = (path, tensor)
    promised = main.integer("split.tensors.count", len(tensors))
    if count > 1 and promised != len(tensors):
        raise main.broken(f"its parts should hold {promised} tensors and hold {len(tensors)}", hint=_MIXED_UP)
    return GGUFFiles(first, headers, tensors)
