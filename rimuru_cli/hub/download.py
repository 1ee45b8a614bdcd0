"""Carrying out a plan: files side by side, each under its lock, and a snapshot once all of them are right.

Until then no other program sees any of it as a model: blobs without a snapshot are invisible, and the snapshot is made in one go at the
end, config.json last.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from rimuru_cli.hub.download_plan import Plan, known_records, no_space, refused_by_the_disk
from rimuru_cli.hub.integrity import hash_file
from rimuru_cli.hub.patience import Cancelled
from rimuru_cli.hub.pull_manifest import PulledFile, PullManifest, remember_renamed
from rimuru_cli.hub.remote import Hub
from rimuru_cli.hub.remote_files import COMMIT, CONFIG, RemoteFile
from rimuru_cli.hub.repository_cache import Busy
from rimuru_cli.hub.transfer import PartFile, Tally, Transfer
from rimuru_models.errors import RimuruError

AT_ONCE = 8
How = Literal["fetched", "present", "repaired"]

_TICK_SECONDS = 0.1
_BUSY_SECONDS = 0.25
_RATE_SECONDS = 10.0
_IDLE_SECONDS = 30.0
_GOODBYE_SECONDS = 1.0
_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


@dataclass(frozen=True)
class Status:
    """How far a download is.

    Attributes:
        done_bytes: bytes of the model that are on the disk, whoever fetched them.
        total_bytes: bytes of the whole model.
        received_bytes: bytes that came over the network in this run.
        files_done: files that are complete and right.
        files_total: files of the model.
        bytes_per_s: over the last ten seconds; None before anything has arrived.
        eta_s: seconds that the rest takes at that rate; None when that cannot be said.
        checked_bytes: bytes of files that were here before and have been read to check them.
        check_bytes: how many there are to read.
        waiting_for: a file that another process is fetching just now, when there is nothing else to do.
    """

    done_bytes: int
    total_bytes: int
    received_bytes: int
    files_done: int
    files_total: int
    bytes_per_s: float | None
    eta_s: float | None
    checked_bytes: int
    check_bytes: int
    waiting_for: str | None


class Listener(Protocol):
    """Is told what happens, always in the thread that called `Download.run`."""

    def status(self, status: Status) -> None:
        """About ten times a second."""

    def file(self, file: RemoteFile, how: How) -> None:
        """A file is complete and right."""

    def notice(self, text: str) -> None:
        """Something went wrong and is being mended: a retry, a wait, a damaged file."""


@dataclass(frozen=True)
class Pulled:
    """A finished download.

    Attributes:
        path: the snapshot's folder, or the GGUF file in it.
        files: name -> record, as in the manifest.
        received_bytes: what came over the network.
        seconds: how long it took.
    """

    path: Path
    files: dict[str, PulledFile]
    received_bytes: int
    seconds: float


class Download:
    """One run of a plan.

    Args:
        plan: what to do.
        hub: whom to ask; its `cancelled` ends the run, its `notice` is set to the listener's.
        listener: who is told.
        at_once: how many files are fetched side by side.
    """

    def __init__(self, plan: Plan, hub: Hub, listener: Listener, at_once: int = AT_ONCE) -> None:
        self._plan = plan
        self._hub = hub
        self._listener = listener
        self._at_once = at_once
        self._tally = Tally(plan.present_bytes + plan.part_bytes)
        self._transfer = Transfer(hub, plan.origin, self._tally)
        self._records = known_records(plan.origin.repository)
        self._todo: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # What the tally holds of each content; other processes change what is there while we look.
        present = {file.etag: file.num_bytes for file in plan.files if file.name in plan.present}
        self._counted: dict[str, int] = {file.etag: 0 for file in plan.files} | dict(plan.parts) | present
        self._idle_since: dict[str, float] = {}
        self._sha256: dict[str, str] = {}
        self._left = 0
        self._lock = threading.Lock()
        self._busy: str | None = None
        self._error: BaseException | None = None
        self._recent: deque[tuple[float, int]] = deque()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the model that are on the disk."""
        return self._tally.done

    def run(self) -> Pulled:
        """Fetch what is missing, check what is there, and make the snapshot.

        Raises:
            VerificationError: the hub sends other content than it announces.
            NoSpaceError: the disk became full, or takes no files as large.
            NotFoundError, RimuruError: the hub refuses, or cannot be reached any more; the cache cannot be written.
            OSError: anything else that the disk has to say.
        """
        began = time.monotonic()
        plan = self._plan
        self._hub.notice = lambda text: self._events.put(lambda: self._listener.notice(text))
        with self._disk_in_words():
            plan.cache.prepare()
        # One job for each content; the largest first, so that none is left alone at the end.
        jobs = sorted({file.etag: file for file in plan.files}.values(), key=lambda file: -file.num_bytes)
        for file in jobs:
            self._todo.put(file)
        self._left = len(jobs)
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(min(self._at_once, len(jobs)))]
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                self._tell()
                next((thread for thread in threads if thread.is_alive()), threads[0]).join(_TICK_SECONDS)
        finally:
            # On Ctrl-C: whoever waits for a silent server notices later; it is a daemon, and its file is good for the next pull as it is.
            self._hub.cancelled.set()
            leave_at = time.monotonic() + _GOODBYE_SECONDS
            for thread in threads:
                if thread.ident is not None:  # it had been started
                    thread.join(max(0.0, leave_at - time.monotonic()))
        self._tell()
        if self._error is not None:
            raise self._error
        with self._disk_in_words():
            files = self._finish()
        return Pulled(plan.path, files, self._tally.received, time.monotonic() - began)

    def _tell(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._events.get_nowait()()
        self._listener.status(self._status())

    def _status(self) -> Status:
        now, tally = time.monotonic(), self._tally
        self._recent.append((now, tally.received))
        while self._recent[0][0] < now - _RATE_SECONDS:
            self._recent.popleft()
        (then, before), rate = self._recent[0], None
        if now - then > 0.5 and tally.received > before:
            rate = (tally.received - before) / (now - then)
        total = self._plan.total_bytes
        check = sum(
            {f.etag: f.num_bytes for f in self._plan.files if f.name in self._plan.present and f.name not in self._plan.known_good}.values()
        )
        return Status(
            done_bytes=tally.done,
            total_bytes=total,
            received_bytes=tally.received,
            files_done=len({f.etag for f in self._plan.files}) - self._left,
            files_total=len({f.etag for f in self._plan.files}),
            bytes_per_s=rate,
            eta_s=(total - tally.done) / rate if rate else None,
            checked_bytes=tally.checked,
            check_bytes=check,
            waiting_for=self._busy,
        )

    def _work(self) -> None:
        while not self._hub.cancelled.is_set():
            try:
                file = self._todo.get_nowait()
            except queue.Empty:
                return
            try:
                if self._one(file):
                    with self._lock:
                        self._left -= 1
                    continue
            except Cancelled:
                return
            except BaseException as error:
                self._stop(error)
                return
            self._todo.put(file)  # another process has it: do something else, then look again
            self._busy = file.name
            self._hub.cancelled.wait(_BUSY_SECONDS)
            self._busy = None

    def _stop(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
        self._hub.cancelled.set()

    def _one(self, file: RemoteFile) -> bool:
        """Make one file complete and right; False when another process has it."""
        cache, commit = self._plan.cache, self._plan.origin.commit
        try:
            with self._disk_in_words(), cache.lock(file.etag):
                how: How = "present"
                path = cache.found(commit, file)
                if path is not None and self._is_right(path, file):
                    self._tally.correct(file.num_bytes - self._counted[file.etag])
                else:
                    how = "fetched" if path is None else "repaired"
                    self._fetch(file, damaged=path is not None)
                cache.clear_parts(file.etag)
        except Busy:
            self._watch_other(file)
            return False
        self._events.put(lambda: self._listener.file(file, how))
        return True

    def _is_right(self, path: Path, file: RemoteFile) -> bool:
        if (file.etag, path.stat().st_mtime_ns) in self._records:
            return True
        content = hash_file(path, file.num_bytes, file.etag, report=self._tally.has_checked, cancelled=self._hub.cancelled)
        self._sha256[file.etag] = content.sha256
        return content.matches()

    def _fetch(self, file: RemoteFile, *, damaged: bool) -> None:
        cache = self._plan.cache
        if damaged and self._hub.notice is not None:
            self._hub.notice(f"{file.name} is damaged on the disk and is fetched again")
        cache.drop(self._plan.origin.commit, file)
        cache.adopt_part(file)
        part = cache.part(file.etag)
        counted = self._counted[file.etag]
        seed = self._plan.beginnings.get(file.name, b"")[: file.num_bytes]
        with PartFile(part) as target:
            have = target.num_bytes
            if have < len(seed):
                target.write(have, seed[have:])
                self._tally.arrived(len(seed) - have)
                counted += len(seed) - have
        self._sha256[file.etag] = self._transfer.fetch(file, part, counted)
        os.replace(part, cache.blob(file.etag))

    def _watch_other(self, file: RemoteFile) -> None:
        """Count what the other process has fetched."""
        before = self._counted[file.etag]
        self._counted[file.etag] = now = max(before, self._plan.cache.part_bytes(file))
        self._tally.correct(now - before)
        clock = time.monotonic()
        since = clock if now > before else self._idle_since.setdefault(file.etag, clock)
        if clock - since < _IDLE_SECONDS:
            self._idle_since[file.etag] = since
        else:
            self._idle_since[file.etag] = clock
            lock = self._plan.cache.lock_path(file.etag)
            self._events.put(lambda: self._listener.notice(f"waiting for another process that has locked {file.name} ({lock})"))

    @contextlib.contextmanager
    def _disk_in_words(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                free = shutil.disk_usage(self._plan.cache.root).free
                raise no_space(self._plan, max(1, self._plan.total_bytes - self._tally.done), free) from error
            words = refused_by_the_disk(self._plan, error)
            if words is None:
                raise
            raise words from error

    def _finish(self) -> dict[str, PulledFile]:
        """Make the snapshot, the manifest and the ref."""
        plan, cache = self._plan, self._plan.cache
        files: dict[str, PulledFile] = {}
        known = {r.etag: r.sha256 for m in PullManifest.all_of(plan.origin.repository) for r in m.files.values()}
        # Weights first: by them `list` knows a snapshot that was cut short just now from what is no model.
        ordered = sorted(plan.files, key=lambda file: (file.name == CONFIG, not file.name.endswith(".safetensors"), file.name))
        for number, file in enumerate(ordered):
            keep = any(later.etag == file.etag for later in ordered[number + 1 :])
            with self._patient_lock(file):
                holder = cache.link(plan.origin.commit, file, keep=keep)
                sha256 = self._sha256.get(file.etag) or known[file.etag]
                files[file.name] = PulledFile(file.num_bytes, file.etag, sha256, holder.stat().st_mtime_ns)
        if not COMMIT.fullmatch(plan.revision):
            cache.write_ref(plan.revision, plan.origin.commit)
        try:
            # Other models of the same commit (GGUF files beside each other) keep their records.
            before = PullManifest.read(plan.origin.repository, plan.origin.commit)
            known_files = files if before is None else {**before.files, **files}
            PullManifest.now(plan.origin.repository, plan.origin.commit, plan.revision, known_files).write()
            if plan.renamed:
                remember_renamed(plan.asked_for, plan.origin.repository)
        except OSError as error:  # the model is whole all the same
            why = error.strerror or type(error).__name__
            self._listener.notice(f"its manifest could not be written ({why}), so the next pull will read all files again")
        return files

    @contextlib.contextmanager
    def _patient_lock(self, file: RemoteFile) -> Iterator[None]:
        """The lock of a blob, however long another pull takes to put its own link."""
        patience = time.monotonic() + 60
        while True:
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(self._plan.cache.lock(file.etag))
                except Busy:
                    if time.monotonic() > patience:
                        raise RimuruError(
                            f"Another process does not let go of {file.name}.", hint="type the same command again when it is done"
                        ) from None
                    time.sleep(_TICK_SECONDS)
                    continue
                yield
                return
