"""One repository in the shared Hugging Face cache: where its blobs, unfinished parts, locks, snapshots and refs lie.

The layout is huggingface_hub's, and so are the locks: `blobs/<etag>`, `blobs/<etag>.incomplete`, `snapshots/<commit>/<file>` as links to
blobs (real files where a system has no links), `refs/<revision>`, `.locks/<repository>/<etag>.lock`. So other tools use what we fetch, we
use what they fetched, and nobody fetches the same blob at the same time.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rimuru_cli.hub.remote_files import RemoteFile
from rimuru_models.errors import RimuruError

# A part that another tool left may be written by a process that our lock does not stop; so it must have lain still for a while.
_STILL_SECONDS = 60.0


class Busy(Exception):
    """Another process has the lock of this blob."""


@dataclass(frozen=True)
class RepositoryCache:
    """A repository's place in the cache; nothing is created before it is needed.

    Attributes:
        root: the cache folder (HF_HUB_CACHE).
        repository: `org/name`.
    """

    root: Path
    repository: str

    @classmethod
    def of(cls, repository: str) -> RepositoryCache:
        """The place of `org/name` in the cache that HF_HOME or HF_HUB_CACHE name."""
        from huggingface_hub import constants

        return cls(Path(constants.HF_HUB_CACHE).expanduser().resolve(), repository)

    @property
    def folder_name(self) -> str:
        """models--org--name."""
        return "models--" + self.repository.replace("/", "--")

    @property
    def folder(self) -> Path:
        """The repository's folder."""
        return self.root / self.folder_name

    @property
    def blobs(self) -> Path:
        """The folder of blobs and parts."""
        return self.folder / "blobs"

    def blob(self, etag: str) -> Path:
        """Where the content with this checksum lies."""
        return self.blobs / etag

    def part(self, etag: str) -> Path:
        """Where an unfinished one lies. Older versions of huggingface_hub use it in the same way, so either goes on from the other."""
        return self.blobs / f"{etag}.incomplete"

    def snapshot(self, commit: str) -> Path:
        """The folder of a commit's files."""
        return self.folder / "snapshots" / commit

    def pointer(self, commit: str, name: str) -> Path:
        """Where a commit's file is found by its name (checked before: see `remote_files.check_names`)."""
        return self.snapshot(commit).joinpath(*name.split("/"))

    def lock_path(self, etag: str) -> Path:
        """Where the lock of a blob lies."""
        return self.root / ".locks" / self.folder_name / f"{etag}.lock"

    def commit_of(self, revision: str) -> str | None:
        """The commit that a branch or tag stood for when it was last asked for."""
        try:
            return (self.folder / "refs" / revision).read_text(encoding="utf-8").strip() or None
        except (OSError, ValueError):
            return None

    def prepare(self) -> None:
        """Make the folders, so that huggingface_hub's tools recognise the repository while it is still unfinished."""
        from huggingface_hub._local_folder import _create_cachedir_tag

        for folder in (self.blobs, self.folder / "snapshots", self.lock_path("").parent):
            folder.mkdir(parents=True, exist_ok=True)
        _create_cachedir_tag(self.root)

    def found(self, commit: str, file: RemoteFile) -> Path | None:
        """Where the whole content of a file seems to be, by its size: the blob, or a real file in the snapshot (a system without links)."""
        for path in (self.blob(file.etag), self.pointer(commit, file.name)):
            with contextlib.suppress(OSError):
                linked_elsewhere = path.parent != self.blobs and path.is_symlink()
                if path.is_file() and not linked_elsewhere and path.stat().st_size == file.num_bytes:
                    return path
        return None

    def part_bytes(self, file: RemoteFile) -> int:
        """Bytes of a file that an earlier attempt left."""
        try:
            size = self.part(file.etag).stat().st_size
        except OSError:
            return 0
        return size if size <= file.num_bytes else 0

    @contextlib.contextmanager
    def lock(self, etag: str) -> Iterator[None]:
        """Hold the lock of a blob.

        Raises:
            Busy: another process holds it.
        """
        from filelock import Timeout
        from huggingface_hub.utils._fixes import WeakFileLock

        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(WeakFileLock(self.lock_path(etag), timeout=0.01))
            except Timeout:
                raise Busy from None
            yield

    def adopt_part(self, file: RemoteFile) -> None:
        """Go on with what a killed download of another tool left (`<etag>.<id>.incomplete`), if that is more than we have.

        Only what has no holes is taken: some tools write a file from several places at once. Whoever calls holds the lock.
        """
        best, most = None, self.part_bytes(file)
        for path, status in self._left_behind(file.etag):
            whole = getattr(status, "st_blocks", 0) * 512 >= status.st_size
            if whole and most < status.st_size <= file.num_bytes:
                best, most = path, status.st_size
        if best is not None:
            with contextlib.suppress(OSError):
                os.replace(best, self.part(file.etag))

    def clear_parts(self, etag: str) -> None:
        """Remove what earlier attempts, ours or another tool's, left of a blob that is complete. Whoever calls holds the lock."""
        for path in (self.part(etag), *(path for path, _ in self._left_behind(etag))):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _left_behind(self, etag: str) -> Iterator[tuple[Path, os.stat_result]]:
        """Parts of a blob that other tools began and that nobody writes any more."""
        for path in self.blobs.glob(f"{etag}.*.incomplete"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if time.time() - status.st_mtime > _STILL_SECONDS:
                    yield path, status

    def borrow(self, commit: str, file: RemoteFile, path: Path | None) -> None:
        """Use a file that is elsewhere in the cache (under an older name of the repository, or in another commit's snapshot where there
        are no links) as a second name for the same bytes. None, or one of another size: nothing happens.
        """
        if path is None or self.found(commit, file) is not None:
            return
        with contextlib.suppress(OSError):
            if path.stat().st_size != file.num_bytes:
                return
        self.prepare()
        with contextlib.suppress(OSError):  # other disks, and some file systems, have no second names: then it is fetched
            self.blob(file.etag).unlink(missing_ok=True)
            os.link(path.resolve(), self.blob(file.etag))

    def drop(self, commit: str, file: RemoteFile) -> None:
        """Remove a damaged or dangling copy of a file, so that nobody loads it. Whoever calls holds the lock."""
        self.blob(file.etag).unlink(missing_ok=True)
        pointer = self.pointer(commit, file.name)
        if not pointer.is_symlink():
            pointer.unlink(missing_ok=True)

    def link(self, commit: str, file: RemoteFile, *, keep: bool = False) -> Path:
        """Put a complete blob into a commit's snapshot under its name, unless it is there. Whoever calls holds the lock.

        Args:
            commit: whose snapshot.
            file: the file.
            keep: another file of the commit has the same content and comes later, so the blob must stay.

        Returns:
            The file that holds the content: the blob, or the snapshot's own file where there are no links.

        Raises:
            FileNotFoundError: neither blob nor file is there any more.
            RimuruError: a folder lies where the file belongs.
        """
        from huggingface_hub.file_download import _create_symlink

        # Files are moved, not copied, so there is nothing to be warned of.
        warnings.filterwarnings("ignore", message=".*cache-system uses symlinks.*")
        blob, pointer = self.blob(file.etag), self.pointer(commit, file.name)
        if not blob.is_file():
            if pointer.is_symlink() or not pointer.is_file():
                raise FileNotFoundError(2, "It was deleted while the model was downloaded", str(blob))
            return pointer
        with contextlib.suppress(OSError):
            if pointer.samefile(blob):
                return blob
        if pointer.is_dir() and not pointer.is_symlink():
            raise RimuruError(f"{pointer} is a folder, and a file belongs there.", hint="move it away, then type the same command again")
        pointer.parent.mkdir(parents=True, exist_ok=True)
        # Without links the blob itself moves into the snapshot, except where it is shared or another snapshot still links to it.
        _create_symlink(str(blob), str(pointer), new_blob=not (keep or blob.is_symlink() or self._is_linked(blob)))
        return blob if pointer.is_symlink() else pointer

    def _is_linked(self, blob: Path) -> bool:
        for path in (self.folder / "snapshots").glob("**/*"):
            with contextlib.suppress(OSError):
                if path.is_symlink() and path.samefile(blob):
                    return True
        return False

    def write_ref(self, revision: str, commit: str) -> None:
        """Remember which commit a branch or tag stands for."""
        from huggingface_hub.file_download import _cache_commit_hash_for_specific_revision

        _cache_commit_hash_for_specific_revision(str(self.folder), revision, commit)
