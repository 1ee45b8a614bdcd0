"""The first bytes of a model's files before they are downloaded: whole small files, and the headers of large ones.

What has been read is kept, so that a download that follows begins behind it. What is on the disk already is not asked for again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rimuru_cli.hub.integrity import ContentHash
from rimuru_cli.hub.remote import Hub
from rimuru_cli.hub.remote_files import RemoteFile
from rimuru_cli.hub.repository_cache import RepositoryCache
from rimuru_cli.hub.transfer import Origin, receive
from rimuru_models.errors import CheckpointError, VerificationError
from rimuru_models.gguf import GGUFHeader
from rimuru_models.gguf.cursor import NeedsMoreError
from rimuru_models.gguf.files import first_part
from rimuru_models.gguf.header import parse_gguf_header
from rimuru_models.headers import SafetensorsHeader, parse_header

MOST_SMALL_BYTES = 100_000_000
_MOST_HEADER_BYTES = 25_000_000  # huggingface_hub's own limit; the largest headers known have a few megabytes
_MOST_GGUF_HEADER_BYTES = 100_000_000  # a vocabulary and its merges are in it
_MOST_IN_ALL = 400_000_000
# Holds the header of most shards, so that one request is enough.
_FIRST_GUESS = 128 << 10
_FIRST_GGUF_GUESS = 4 << 20
_ATTEMPTS, _BUDGET_SECONDS = 4, 60.0
Header = TypeVar("Header")


class DamagedHeaderError(CheckpointError):
    """A header that arrives broken, of a file whose checksum is not known to be right."""


class Beginnings:
    """Reads beginnings of files of one commit.

    Args:
        hub: whom to ask for what is not on the disk.
        origin: repository and commit.
        cache: where files may be already.

    Attributes:
        fetched: name -> the first bytes of a file, for every file that the network was asked for.
    """

    def __init__(self, hub: Hub, origin: Origin, cache: RepositoryCache) -> None:
        self._hub = hub
        self._origin = origin
        self._cache = cache
        self._lock = threading.Lock()
        self._in_all = 0
        self.fetched: dict[str, bytes] = {}

    def small_file(self, file: RemoteFile) -> bytes:
        """All of a small file, with the right checksum.

        Raises:
            CheckpointError: it is far too large for its kind.
            VerificationError: the hub sends something else than it announces.
            RimuruError: the hub refuses, or cannot be reached.
        """
        if file.num_bytes > MOST_SMALL_BYTES:
            raise CheckpointError(f"{file.name} of {self._origin.repository} has {file.num_bytes} bytes: far too large for such a file.")
        for local in (True, False):  # a damaged copy on the disk is no reason to give up
            if not local:
                self.fetched.pop(file.name, None)
            data = self._first(file, file.num_bytes, local)
            content = ContentHash(file.num_bytes, file.etag)
            content.update(data)
            if content.matches():
                return data
        raise VerificationError(
            f"{file.name} of {self._origin.repository} arrives with the wrong checksum: {content.found} instead of {file.etag}.",
            hint="something on the way changes files, or the hub's copy is damaged: try another network, or later",
        )

    def header(self, file: RemoteFile) -> SafetensorsHeader:
        """The checked header of a safetensors file.

        Raises:
            DamagedHeaderError, CheckpointError, RimuruError: as `gguf_header`.
        """
        return self._checked(file, self._header)

    def gguf_header(self, file: RemoteFile) -> GGUFHeader:
        """The checked header of a GGUF file.

        Raises:
            DamagedHeaderError: it is broken or absurdly long, here and as it arrives; only the file's checksum can tell whether that is so
                on the hub, too, or happened on the way.
            CheckpointError: it is broken on the hub.
            RimuruError: the hub refuses, or cannot be reached.
        """
        return self._checked(file, self._gguf_header)

    def _checked(self, file: RemoteFile, read: Callable[[RemoteFile, bool], Header]) -> Header:
        for local in (True, False, False):  # damage on the disk or on the way is no reason to give up
            try:
                return read(file, local)
            except CheckpointError as error:
                broken = error
            data = self.fetched.pop(file.name, b"")
        content = ContentHash(file.num_bytes, file.etag)
        content.update(data)
        if content.matches():
            raise broken
        raise DamagedHeaderError(broken.what, hint=broken.hint)

    def _gguf_header(self, file: RemoteFile, local: bool) -> GGUFHeader:
        where = f"{self._origin.repository}/{file.name}"
        # Only the first part has the metadata, with the vocabulary in it.
        guess = _FIRST_GGUF_GUESS if first_part(file.name) == file.name else _FIRST_GUESS
        data = self._first(file, min(guess, file.num_bytes), local)
        while True:
            try:
                return parse_gguf_header(data, file.num_bytes, where)
            except NeedsMoreError as more:
                if more.at_least > _MOST_GGUF_HEADER_BYTES:
                    raise CheckpointError(f"{where} is not a usable GGUF file: its header is absurdly long.") from None
                data = self._first(file, min(file.num_bytes, max(2 * len(data), more.at_least)), local)

    def _header(self, file: RemoteFile, local: bool) -> SafetensorsHeader:
        where = f"{self._origin.repository}/{file.name}"
        if file.num_bytes < 10:
            raise CheckpointError(f"{where} has {file.num_bytes} bytes: too short for a safetensors file.")
        data = self._first(file, min(_FIRST_GUESS, file.num_bytes), local)
        length = int.from_bytes(data[:8], "little")
        if length > _MOST_HEADER_BYTES or not 2 <= length <= file.num_bytes - 8:
            raise CheckpointError(f"{where} is not a safetensors file: it announces a header of {length} bytes.")
        data = self._first(file, 8 + length, local)
        return parse_header(data[8 : 8 + length], file.num_bytes, where)

    def _first(self, file: RemoteFile, num_bytes: int, local: bool) -> bytes:
        """At least the first `num_bytes` of a file; `local`: from the disk as far as it goes."""
        data = self.fetched.get(file.name, b"")
        if local and len(data) < num_bytes:
            path = self._cache.found(self._origin.commit, file) or self._cache.part(file.etag)
            data = max(data, _read(path, num_bytes), key=len)
        if len(data) >= num_bytes:
            return data
        with self._lock:
            self._in_all += num_bytes - len(data)
            if self._in_all > _MOST_IN_ALL:
                raise CheckpointError(f"{self._origin.repository}: its headers are far larger than those of any model.")
        pieces = [data]
        patience = self._hub.patience(_ATTEMPTS, _BUDGET_SECONDS)
        receive(self._hub, self._origin, file, len(data), num_bytes, lambda offset, piece: pieces.append(piece), patience)
        self.fetched[file.name] = b"".join(pieces)
        return self.fetched[file.name]


def _read(path: Path, num_bytes: int) -> bytes:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(num_bytes)
    return b""
