"""A Hugging Face hub on this machine, with everything that can go wrong on the way: for tests, standard library only.

It answers what huggingface_hub asks (repository, tree, HEAD and GET of files), serves repositories from memory, and counts what it sends.
Large files are kept elsewhere when `store` is on: the hub then answers with a signed address on another port, as the real one does.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal

GOOD_TOKEN = "hf_good_and_secret"
LFS_BYTES = 256
_PIECE = 4096

Kind = Literal["close", "reset", "stall", "status", "whole", "wrong range", "short", "short whole", "corrupt", "gzip"]


@dataclass
class Fault:
    """What happens to one answer.

    close: the connection ends after `at` bytes. reset: it is torn down then. stall: nothing comes after `at` bytes for `seconds`.
    status: an error `status` with `headers`. whole: Range is ignored. wrong range: another place than asked for. short: the answer claims
    to be complete after `at` bytes; short whole: and Range is ignored. corrupt: byte `at` is changed. gzip: compressed against orders.
    `at` counts in this answer's body, for corrupt in the file.
    """

    kind: Kind
    at: int = 0
    status: int = 500
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 60.0


@dataclass
class Repository:
    """A repository: commits with their files, and branches that name commits."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    gated: bool = False
    private: bool = False
    disabled: bool = False
    renamed_to: str | None = None
    tree_extra: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Request:
    """One request: from where in the file it was answered, and how many bytes of the body were handed to the network."""

    method: str
    path: str
    headers: dict[str, str]
    server: Literal["hub", "store"]
    file: str | None = None
    start: int = 0
    sent: int = 0


def git_sha1(data: bytes) -> str:
    """git's checksum of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def etag_of(data: bytes) -> str:
    """The checksum under which the cache keeps a file."""
    return hashlib.sha256(data).hexdigest() if len(data) >= LFS_BYTES else git_sha1(data)


class LoopbackHub:
    """Used as `with LoopbackHub() as hub:`; hub.url is what HF_ENDPOINT must be.

    Attributes:
        repositories: `org/name` -> Repository.
        faults: file name -> faults of its next answers, one each.
        lasting: file name -> a fault of every answer.
        api_faults: faults ("status", "stall") of the next questions about repositories, one each.
        lasting_api: a fault of every question.
        log: every request.
        store: whether large files lie on another port.
        bytes_per_s: how fast bodies are sent; None: as fast as possible.
        page: entries of the tree in one answer.
        allowance: bytes of files that may still be sent; then all connections hang until there is more. None: no limit.
        elsewhere: address to which questions about renamed repositories are sent; empty: the same.
    """

    def __init__(self, *, store: bool = False, page: int = 1000) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults: dict[str, list[Fault]] = {}
        self.lasting: dict[str, Fault] = {}
        self.api_faults: list[Fault] = []
        self.lasting_api: Fault | None = None
        self.log: list[Request] = []
        self.lock = threading.Lock()
        self.store = store
        self.page = page
        self.elsewhere = ""
        self.allowance: int | None = None
        self._more = threading.Condition()
        self.bytes_per_s: float | None = None
        self._servers = {"hub": _Server(self, "hub"), "store": _Server(self, "store")}

    def __enter__(self) -> LoopbackHub:
        for server in self._servers.values():
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop answering."""
        self.allow(None)
        for server in self._servers.values():
            server.shutdown()
            server.server_close()

    @property
    def url(self) -> str:
        """The hub's address."""
        return self._servers["hub"].url

    @property
    def store_url(self) -> str:
        """The address of the store of large files."""
        return self._servers["store"].url

    def add(self, name: str, files: Mapping[str, bytes], *, branch: str = "main", **more: Any) -> str:
        """Add a repository, or a commit to one, on a branch. Returns the commit."""
        listing = json.dumps({path: git_sha1(data) for path, data in sorted(files.items())})
        commit = hashlib.sha1(f"{name} {listing}".encode()).hexdigest()
        known = self.repositories.setdefault(name, Repository({}, {}))
        known.commits[commit] = dict(files)
        known.refs[branch] = commit
        for key, value in more.items():
            setattr(known, key, value)
        return commit

    def allow(self, num_bytes: int | None) -> None:
        """Let so many bytes of files pass from now on, and then none; None: all."""
        with self._more:
            self.allowance = num_bytes
            self._more.notify_all()

    def take(self, num_bytes: int) -> int:
        """Wait for leave to send; returns how many bytes may be sent."""
        with self._more:
            self._more.wait_for(lambda: self.allowance != 0)
            if self.allowance is None:
                return num_bytes
            granted = min(num_bytes, self.allowance)
            self.allowance -= granted
            return granted

    def bodies(self, file: str | None = None) -> list[Request]:
        """The GET requests for files (for one file) that were answered with a body."""
        with self.lock:
            return [r for r in self.log if r.method == "GET" and r.file is not None and file in (None, r.file) and r.sent]

    def sent(self, file: str | None = None) -> int:
        """Bytes of files that were sent."""
        return sum(request.sent for request in self.bodies(file))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, hub: LoopbackHub, kind: Literal["hub", "store"]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub
        self.kind: Literal["hub", "store"] = kind
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, parts = self.server.hub, urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(parts.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.record = Request(self.command, self.path, headers, self.server.kind)
        with hub.lock:
            hub.log.append(self.record)
        if path == "/api/agent-harnesses":
            return self._json({})
        about = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+?))?", path)
        if about:
            return self._about(about[1], about[2], about[3] or "main", dict(urllib.parse.parse_qsl(parts.query)))
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if file:
            return self._file(file[1], file[2], file[3], parts.query)
        return self._refuse(404, None)

    def _allowed(self, repository: Repository, *, content: bool) -> bool:
        token = self.headers.get("authorization")
        good = token == f"Bearer {GOOD_TOKEN}"
        if token is not None and not good and not repository.gated and not repository.private:
            self._refuse(401, None, "Invalid credentials in Authorization header")
        elif repository.private and not good:
            self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        elif repository.disabled:
            self._refuse(403, None, "Access to this resource is disabled.")
        elif repository.gated and content and not good:
            self._refuse(403 if token else 401, "GatedRepo", "Access to this model is restricted.")
        else:
            return True
        return False

    def _about(self, name: str, kind: str | None, revision: str, query: Mapping[str, str]) -> None:
        hub = self.server.hub
        with hub.lock:
            fault = hub.api_faults.pop(0) if hub.api_faults else hub.lasting_api
        if fault is not None and fault.kind == "stall":
            time.sleep(fault.seconds)
        elif fault is not None:
            return self._refuse(fault.status, None, headers=fault.headers)
        repository = hub.repositories.get(name)
        if repository is None:
            return self._refuse(404 if self.headers.get("authorization") else 401, "RepoNotFound", "Repository not found")
        if repository.renamed_to:
            self.send_response(307)
            self.send_header("Location", hub.elsewhere + self.path.replace(name, repository.renamed_to))
            return self._end(b"")
        if not self._allowed(repository, content=False):
            return None
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repository.commits[commit]
        if kind != "tree":
            return self._json({"id": name, "sha": commit, "gated": repository.gated, "siblings": [{"rfilename": path} for path in files]})
        entries: list[dict[str, Any]] = [_entry(path, data) for path, data in files.items()] + repository.tree_extra
        first = int(query.get("cursor", "0"))
        more = {}
        if first + hub.page < len(entries):
            more["Link"] = f'<{self.server.url}/api/models/{name}/tree/{commit}?recursive=true&cursor={first + hub.page}>; rel="next"'
        return self._json(entries[first : first + hub.page], more)

    def _file(self, name: str, revision: str, path: str, query: str) -> None:
        hub = self.server.hub
        self.record.file = path
        repository = hub.repositories.get(name)
        if repository is None:
            return self._refuse(404, "RepoNotFound", "Repository not found")
        if self.server.kind == "store":
            if "signature=" not in query:
                return self._refuse(403, None, "no signature")
        elif not self._allowed(repository, content=True):
            return None
        commit = repository.refs.get(revision, revision)
        data = repository.commits.get(commit, {}).get(path)
        if data is None:
            return self._refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        etag = etag_of(data)
        about = {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if len(data) >= LFS_BYTES:
            about |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
            if hub.store and self.server.kind == "hub":
                self.send_response(302)
                self._headers(about | {"Location": f"{hub.store_url}/{name}/resolve/{commit}/{urllib.parse.quote(path)}?signature=secret"})
                return self._end(b"")
        if self.command == "HEAD":
            self.send_response(200)
            self._headers(about | {"Content-Length": str(len(data))})
            return self.end_headers()
        with hub.lock:
            waiting = hub.faults.get(path)
            fault = waiting.pop(0) if waiting else hub.lasting.get(path)
        return self._body(data, about, fault)

    def _body(self, data: bytes, about: Mapping[str, str], fault: Fault | None) -> None:
        kind, size = (fault.kind if fault else None), len(data)
        if fault is not None and kind == "status":
            return self._refuse(fault.status, None, headers=fault.headers)
        if fault is not None and kind == "corrupt":
            data = data[: fault.at] + bytes([data[fault.at] ^ 0xFF]) + data[fault.at + 1 :]
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        start, stop = (int(asked[1]), min(size, int(asked[2] or size - 1) + 1)) if asked else (0, size)
        if asked and kind not in ("whole", "short whole"):
            if start >= size:
                return self._refuse(416, None, headers={"Content-Range": f"bytes */{size}"})
            claimed = start + 1 if kind == "wrong range" else start
            body = data[start:stop]
            self.send_response(206)
            about = {**about, "Content-Range": f"bytes {claimed}-{stop - 1}/{size}"}
        else:
            start, body = 0, data
            self.send_response(200)
        if kind == "gzip":
            body = gzip.compress(body)
            about = {**about, "Content-Encoding": "gzip"}
        limit = len(body) if fault is None or kind not in ("close", "reset", "stall", "short", "short whole") else min(fault.at, len(body))
        if kind in ("short", "short whole"):
            body = body[:limit]
        self._headers({**about, "Content-Length": str(len(body))})
        self.end_headers()
        self.record.start = start
        self._send(body[:limit])
        if fault is not None and kind == "stall" and limit < len(body):
            time.sleep(fault.seconds)
        if kind == "reset" and limit < len(body):
            self._tear()
        if limit < len(body):
            self.close_connection = True
            self.connection.close()

    def _send(self, body: bytes) -> None:
        rate, place = self.server.hub.bytes_per_s, 0
        while place < len(body):
            piece = body[place : place + self.server.hub.take(min(_PIECE, len(body) - place))]
            self.wfile.write(piece)
            place += len(piece)
            self.record.sent += len(piece)
            if rate is not None:
                time.sleep(len(piece) / rate)
        self.wfile.flush()

    def _tear(self) -> None:
        """End the connection with a reset: what the other side has not read yet is lost to it."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _headers(self, headers: Mapping[str, str]) -> None:
        for name, value in headers.items():
            self.send_header(name, value)

    def _end(self, body: bytes) -> None:
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _json(self, value: object, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(200)
        self._headers({"Content-Type": "application/json", **(headers or {})})
        self._end(json.dumps(value).encode())

    def _refuse(self, status: int, code: str | None, message: str = "", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        self._headers({**({"X-Error-Code": code} if code else {}), **({"X-Error-Message": message} if message else {}), **(headers or {})})
        self._end(b"")


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": git_sha1(data)}
    if len(data) >= LFS_BYTES:
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry
