"""A checkpoint that is still on the hub, seen through its config.json and tensor headers: what `fit` and `show` need before a download.

    checkpoint = remote_checkpoint("org/name", "main")       # NotFoundError, CheckpointError, RimuruError … as for `pull`
    checkpoint.config                                         # a ModelConfig: the architecture is one rimuru runs
    checkpoint.index                                          # a CheckpointIndex, as of a folder; its paths are not on the disk

A few requests and some hundred kilobytes; nothing is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rimuru_cli.hub.beginnings import Beginnings
from rimuru_cli.hub.remote import Hub
from rimuru_cli.hub.remote_files import CONFIG, INDEX, RemoteFile, Selection, select
from rimuru_cli.hub.repository_cache import RepositoryCache
from rimuru_cli.hub.side_by_side import side_by_side
from rimuru_cli.hub.transfer import Origin
from rimuru_models.config import ModelConfig
from rimuru_models.errors import CheckpointError
from rimuru_models.gguf import GGUFFiles
from rimuru_models.gguf.config import config_values
from rimuru_models.gguf.files import combine_parts
from rimuru_models.headers import load_json
from rimuru_models.index import CheckpointIndex, combine_headers, gguf_index, weight_map_of

_AT_ONCE = 8


@dataclass(frozen=True)
class RemoteCheckpoint:
    """Config and headers of one commit on the hub.

    Attributes:
        repository: `org/name` as the hub calls it now (it may have been renamed).
        commit: the 40 hex digits that the revision stands for.
        config: config.json, or what a GGUF file's metadata mean, validated.
        config_values: the same as it is.
        index: every tensor's file, dtype, shape and place; `model_dir` is Path("org/name@commit"), which does not exist.
        file_bytes: size of every file that `pull` would fetch, by name.
        file_etags: its checksum as the hub keeps it (sha256, or git's sha1 of small files), by name.
        variant: what it is called among the GGUF models of its repository; None: safetensors.
    """

    repository: str
    commit: str
    config: ModelConfig
    config_values: Mapping[str, Any]
    index: CheckpointIndex
    file_bytes: Mapping[str, int]
    file_etags: Mapping[str, str]
    variant: str | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of all files that `pull` would fetch."""
        return sum(self.file_bytes.values())


def remote_checkpoint(repository: str, revision: str | None = None, variant: str | None = None) -> RemoteCheckpoint:
    """Ask the hub about a model without downloading its weights.

    Args:
        repository: `org/name`.
        revision: branch, tag or commit; None: main.
        variant: which GGUF model of several.

    Raises:
        NotFoundError: no such repository or revision, gated, or private; says where to accept a licence or how to log in.
        UsageError: HF_ENDPOINT or the token cannot be one.
        CheckpointError: an architecture that rimuru cannot run, pickled weights only, or broken headers.
        RimuruError: the hub cannot be reached, or refuses for now.
    """
    hub = Hub()
    info = hub.info(repository, revision or "main")
    origin = Origin(info.repository, info.commit)
    selection = select(info.repository, hub.tree(info.repository, info.commit), variant)
    beginnings = Beginnings(hub, origin, RepositoryCache.of(info.repository))
    if selection.variant is not None:
        files = read_gguf(beginnings, selection, origin)
        values, index = config_values(files), gguf_index(files)
        config = ModelConfig.from_dict(values, where=files.main.where)
    else:
        selection, weight_map = narrow(beginnings, selection)
        values = read_config(beginnings, selection, info.repository)
        config = ModelConfig.from_dict(values, where=f"{info.repository}/{CONFIG}")
        index = read_headers(beginnings, selection, weight_map, origin)
    return RemoteCheckpoint(
        info.repository,
        info.commit,
        config,
        values,
        index,
        {file.name: file.num_bytes for file in selection.files},
        {file.name: file.etag for file in selection.files},
        selection.variant,
    )


def narrow(beginnings: Beginnings, selection: Selection) -> tuple[Selection, dict[str, str] | None]:
    """The selection with the weights that count, and the index's map of tensors to files; None where there is no index.

    Raises:
        CheckpointError: a broken index, or one that names files that are not there.
        RimuruError: as `Beginnings.small_file`.
    """
    if not selection.needs_index:
        return selection, None
    file = _named(selection, INDEX)
    weight_map = weight_map_of(load_json(beginnings.small_file(file), INDEX), INDEX)
    return selection.narrowed(weight_map.values()), weight_map


def read_config(beginnings: Beginnings, selection: Selection, repository: str) -> dict[str, Any]:
    """config.json as it is.

    Raises:
        CheckpointError: not a JSON object.
        RimuruError: as `Beginnings.small_file`.
    """
    values = load_json(beginnings.small_file(_named(selection, CONFIG)), f"{repository}/{CONFIG}")
    if not isinstance(values, dict):
        raise CheckpointError(f"{repository}/{CONFIG} is not a JSON object.")
    return values


def read_headers(beginnings: Beginnings, selection: Selection, weight_map: Mapping[str, str] | None, origin: Origin) -> CheckpointIndex:
    """Read the headers of all weights, several at once.

    Raises:
        CheckpointError: a broken header, or headers that contradict each other or the index.
        RimuruError: the hub refuses, or cannot be reached.
    """
    headers = side_by_side(selection.weights, beginnings.header, _AT_ONCE)
    names = [file.name for file in selection.weights]
    return combine_headers(Path(f"{origin.repository}@{origin.commit}"), dict(zip(names, headers, strict=True)), weight_map)


def read_gguf(beginnings: Beginnings, selection: Selection, origin: Origin) -> GGUFFiles:
    """Read the headers of all parts of a GGUF model, several at once. Their paths are not on the disk.

    Raises:
        CheckpointError: a broken header, or parts that do not belong together.
        RimuruError: the hub refuses, or cannot be reached.
    """
    headers = side_by_side(selection.weights, beginnings.gguf_header, _AT_ONCE)
    folder = Path(f"{origin.repository}@{origin.commit}")
    paths = [folder.joinpath(*file.name.split("/")) for file in selection.weights]
    return combine_parts(paths[0], dict(zip(paths, headers, strict=True)))


def _named(selection: Selection, name: str) -> RemoteFile:
    return next(file for file in selection.others if file.name == name)
