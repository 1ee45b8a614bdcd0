"""The shared Hugging Face cache as huggingface_hub lays it out, written directly: for tests of what reads or deletes it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from loopback_hub import etag_of


def put_in_cache(
    cache: Path, repository: str, files: Mapping[str, bytes], *, ref: str | None = "main", commit: str | None = None, links: bool = True
) -> Path:
    """Put a commit of a repository into the cache and return its snapshot's folder.

    Args:
        cache: the cache's folder, which need not exist.
        files: name -> content; files of other commits with the same content become the same blob.
        ref: the branch that means this commit; None: no branch does.
        commit: 40 hex digits; by default they follow from the files.
        links: False: real files in the snapshot, as on a system without links.
    """
    home = cache / ("models--" + repository.replace("/", "--"))
    commit = commit or hashlib.sha1(repr(sorted((name, etag_of(data)) for name, data in files.items())).encode()).hexdigest()
    snapshot = home / "snapshots" / commit
    for name, data in files.items():
        path = snapshot / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not links:
            path.write_bytes(data)
            continue
        blob = home / "blobs" / etag_of(data)
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        path.symlink_to(os.path.relpath(blob, path.parent))
    if ref is not None:
        (home / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (home / "refs" / ref).write_text(commit, encoding="utf-8")
    return snapshot


def files_of(folder: Path) -> set[str]:
    """Every file and link below a folder, with slashes; empty when there is none."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or path.is_file()}
