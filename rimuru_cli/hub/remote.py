"""Questions to the hub: which commit a name stands for, which files it has, and their bytes from any place on.

Speaks through huggingface_hub's HTTP session (its proxies, certificates, offline switch) with its headers and token. Redirects are followed
here, so that the token goes to the hub and to nobody else.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urljoin, urlsplit

from rimuru_cli import __version__
from rimuru_cli.hub.patience import Cancelled, Patience, Temporary, UnreachableError
from rimuru_cli.hub.remote_errors import Asked, refusal
from rimuru_cli.hub.remote_files import COMMIT, RemoteFile
from rimuru_models.errors import CheckpointError, RimuruError, UsageError

if TYPE_CHECKING:
    from httpx2 import Response

_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}/[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_HOME = ("https", "huggingface.co", 443)
_MOST_HOPS, _MOST_PAGES, _MOST_FILES = 6, 1000, 100_000
_MOST_JSON_BYTES = 64 << 20
_MOST_FILE_BYTES = 1 << 50
# Questions are asked while a person waits for the first word; transfers may be more patient (see transfer.py).
_QUESTION_ATTEMPTS, _QUESTION_BUDGET_SECONDS = 4, 60.0


@dataclass(frozen=True)
class RepositoryInfo:
    """What the hub says of a name: `repository` is what it is called now, `commit` 40 hex digits."""

    repository: str
    commit: str


class Hub:
    """The hub that HF_ENDPOINT names, asked by one command.

    Args:
        cancelled: makes waits and reads end with `Cancelled`.
        notice: told why something is tried again.
        wait: for tests, see `Patience`.

    Raises:
        UnreachableError: HF_HUB_OFFLINE is set.
        UsageError: HF_ENDPOINT or the token cannot be one.
    """

    def __init__(
        self,
        *,
        cancelled: threading.Event | None = None,
        notice: Callable[[str], None] | None = None,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        from huggingface_hub import constants

        self.cancelled = cancelled or threading.Event()
        self.notice = notice
        self.wait = wait
        self.endpoint = constants.ENDPOINT
        self.read_seconds = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        if constants.is_offline_mode():
            raise UnreachableError(
                "HF_HUB_OFFLINE is set, so nothing can be asked of the hub.", hint="unset HF_HUB_OFFLINE (and TRANSFORMERS_OFFLINE)"
            )
        parts = urlsplit(self.endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"HF_ENDPOINT is {self.endpoint[:200]!r}, which is not an address like https://huggingface.co.")
        self._headers = _headers()
        self._origin = _origin(self.endpoint)

    @property
    def host(self) -> str:
        """The hub's host, for messages."""
        return _host(self.endpoint)

    def _asked(self, repository: str, revision: str, name: str | None = None) -> Asked:
        shown = self.endpoint.replace(urlsplit(self.endpoint).netloc, self.host)  # without a password that HF_ENDPOINT may hold
        return Asked(shown, repository, revision, self.has_token, name)

    @property
    def has_token(self) -> bool:
        """Whether requests carry a token."""
        return "authorization" in self._headers

    def patience(self, attempts: int, budget: float) -> Patience:
        """A fresh count of attempts that waits, tells and stops as this hub was told to."""
        return Patience(attempts, budget, self.cancelled, self.notice, self.wait)

    def info(self, repository: str, revision: str) -> RepositoryInfo:
        """Ask what a name stands for now.

        Raises:
            NotFoundError: missing, private, or a revision that is not there.
            RimuruError: the hub cannot be reached or does not answer like one.
        """
        asked = self._asked(repository, revision)
        value, _ = self._json(f"{self.endpoint}/api/models/{repository}/revision/{quote(revision, safe='')}", asked)
        value = value if isinstance(value, dict) else {}
        name, commit = value.get("id", value.get("modelId", repository)), value.get("sha")
        if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
            raise self._nonsense("a repository without a commit")
        if COMMIT.fullmatch(revision) and commit != revision:
            raise self._nonsense("another commit than the one asked for")
        if not isinstance(name, str) or not _ID.fullmatch(name) or ".." in name or "--" in name:
            raise self._nonsense("a repository with an impossible name")
        return RepositoryInfo(name, commit)

    def tree(self, repository: str, commit: str) -> list[RemoteFile]:
        """List all files of a commit, with their sizes and checksums.

        Raises:
            CheckpointError: an entry makes no sense.
            RimuruError: as `info`.
        """
        asked = self._asked(repository, commit)
        url: str | None = f"{self.endpoint}/api/models/{repository}/tree/{commit}?recursive=true&expand=false"
        files: list[RemoteFile] = []
        for _ in range(_MOST_PAGES):
            value, url = self._json(url, asked)
            if not isinstance(value, list):
                raise self._nonsense("something else than a list of files")
            # Folders, and submodules, are no files.
            files += [
                self._file(repository, entry) for entry in value if not isinstance(entry, dict) or entry.get("type", "file") == "file"
            ]
            if url is None or len(files) > _MOST_FILES:
                break
        if url is not None:
            raise CheckpointError(f"{repository} has more than {_MOST_FILES} files, which no model has.")
        return files

    def _file(self, repository: str, entry: Any) -> RemoteFile:
        try:
            name, lfs = entry["path"], entry.get("lfs")
            size, etag = (lfs["size"], lfs["oid"]) if lfs else (entry["size"], entry["oid"])
        except (KeyError, TypeError, AttributeError):
            raise self._nonsense("a file without name, size or checksum") from None
        if not isinstance(name, str) or not isinstance(etag, str) or isinstance(size, bool) or not isinstance(size, int):
            raise self._nonsense("a file without name, size or checksum")
        # The checksum becomes a file's name in the cache, so nothing but a checksum may pass.
        if not _ETAG.fullmatch(etag.removeprefix("sha256:")) or not 0 <= size < _MOST_FILE_BYTES:
            raise CheckpointError(f"{repository}: the hub gives an impossible size or checksum for {name[:120]!r}.")
        return RemoteFile(name, size, etag.removeprefix("sha256:"))

    @contextlib.contextmanager
    def open(self, repository: str, commit: str, name: str, start: int = 0, stop: int | None = None) -> Iterator[Response]:
        """Ask for a file's bytes from `start` on (to `stop`, exclusive). The server may send all of it; the caller looks at the status.

        Raises:
            Temporary: worth another attempt.
            RimuruError: a refusal that will not change.
        """
        url = f"{self.endpoint}/{repository}/resolve/{commit}/{quote(name)}"
        extra = {"accept-encoding": "identity", "x-hf-download-counter": "1"}
        if start or stop is not None:
            extra["range"] = f"bytes={start}-" if stop is None else f"bytes={start}-{stop - 1}"
        with self._stream(url, extra, self._asked(repository, commit, name)) as response:
            yield response

    @contextlib.contextmanager
    def _stream(self, url: str, extra: dict[str, str], asked: Asked) -> Iterator[Response]:
        import httpx2
        from huggingface_hub.utils._http import get_session

        timeout = httpx2.Timeout(self.read_seconds, pool=None)
        with _as_temporary(_host(url)):
            for _ in range(_MOST_HOPS):
                if self.cancelled.is_set():
                    raise Cancelled
                ours = _origin(url) in (self._origin, _HOME)
                headers = {name: value for name, value in self._headers.items() if ours or name != "authorization"} | extra
                with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=False) as response:
                    if response.has_redirect_location:
                        url = _next_hop(url, response.headers["location"])
                        continue
                    if response.status_code >= 400 and not (response.status_code == 416 and "range" in extra):
                        foreign = _origin(url) != self._origin
                        raise refusal(response.status_code, response.headers, _at(asked, ours, foreign))
                    yield response
                    return
            raise Temporary(f"{self.host} sent us in circles")

    def _json(self, url: str | None, asked: Asked) -> tuple[Any, str | None]:
        """The JSON at `url`, and the address of the next page if there is one."""
        assert url is not None
        patience = self.patience(_QUESTION_ATTEMPTS, _QUESTION_BUDGET_SECONDS)
        while True:
            try:
                with self._stream(url, {"accept": "application/json"}, asked) as response:
                    body = b""
                    for chunk in response.iter_bytes():
                        body += chunk
                        if len(body) > _MOST_JSON_BYTES or self.cancelled.is_set():
                            break
                    following = response.links.get("next", {}).get("url")
                    last = str(response.url)
                break
            except Temporary as error:
                patience.after(error)
        if self.cancelled.is_set():
            raise Cancelled
        if len(body) > _MOST_JSON_BYTES:
            raise self._nonsense("an answer that does not end")
        try:
            return json.loads(body.decode("utf-8")), urljoin(last, following) if following else None
        except (ValueError, RecursionError):
            raise self._nonsense("something that is not JSON") from None

    def _nonsense(self, what: str) -> RimuruError:
        return RimuruError(
            f"{self.host} does not answer like a Hugging Face hub: it sent {what}.",
            hint="check HF_ENDPOINT, and whether this network wants you to log in on a page of its own first",
        )


def _headers() -> dict[str, str]:
    """Our name, and the token that huggingface_hub knows. Its own header builder is not used: it may ask the hub something first."""
    from huggingface_hub import __version__ as hub_version

    headers = {"user-agent": f"rimuru/{__version__}; hf_hub/{hub_version}; python/{platform.python_version()}"}
    token = _token()
    if token is not None:
        if not (token.isascii() and token.isprintable()):
            raise UsageError("The Hugging Face token has characters in it that no token has.", hint="set HF_TOKEN again, or log in")
        headers["authorization"] = f"Bearer {token}"
    return headers


def _token() -> str | None:
    """The token that huggingface_hub would send. Where there is plainly none, its code for tokens, slow to import, is not asked."""
    from huggingface_hub import constants

    named = any(os.environ.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"))
    if not named and not os.path.exists(constants.HF_TOKEN_PATH) and "google.colab" not in sys.modules:
        return None
    from huggingface_hub.utils._headers import get_token_to_send

    return get_token_to_send(None)


def _host(url: str) -> str:
    """Host and port of an address, without a password."""
    return urlsplit(url).netloc.rpartition("@")[2]


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    return parts.scheme, (parts.hostname or "").lower(), port or {"http": 80, "https": 443}.get(parts.scheme, 0)


def _next_hop(url: str, location: str) -> str:
    target = urljoin(url, location)
    scheme = urlsplit(target).scheme
    if scheme not in ("http", "https") or (urlsplit(url).scheme == "https" and scheme == "http"):
        raise RimuruError(
            f"{urlsplit(url).netloc.rpartition('@')[2]} sends us to an address that is not safe to fetch from ({scheme or 'no'} scheme)."
        )
    return target


def _at(asked: Asked, ours: bool, foreign: bool) -> Asked:
    return Asked(asked.endpoint, asked.repository, asked.revision, asked.token and ours, asked.file, foreign)


@contextlib.contextmanager
def _as_temporary(host: str) -> Iterator[None]:
    """Turn what the HTTP library raises into our own words. Its messages may hold signed addresses, so only their kind is told."""
    import httpx2
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled:
        raise UnreachableError("HF_HUB_OFFLINE is set, so nothing can be asked of the hub.", hint="unset HF_HUB_OFFLINE") from None
    except httpx2.ProxyError:
        raise Temporary(f"the proxy on the way to {host} does not let us through", hint="check HTTPS_PROXY and NO_PROXY") from None
    except ImportError:  # of the HTTP library, when it makes its session
        raise UsageError(
            f"The proxy on the way to {host} is a SOCKS proxy, which this installation cannot speak to.",
            hint=f"unset {_proxy_variable() or 'ALL_PROXY'}, or let HTTPS_PROXY name an http:// proxy (many SOCKS proxies are one, too)",
        ) from None
    except httpx2.ConnectError as error:
        if "CERTIFICATE" in str(error).upper():
            raise RimuruError(
                f"The certificate of {host} cannot be trusted.",
                hint="check the clock; behind a company proxy set SSL_CERT_FILE to its certificate",
            ) from None
        proxy = _proxy_variable()
        suspects = "HF_ENDPOINT" if proxy is None else f"HF_ENDPOINT, and the proxy that {proxy} names"
        raise Temporary(
            f"{host} cannot be reached", hint=f"check the network connection and {suspects}; what has arrived is kept"
        ) from None
    except httpx2.TimeoutException:
        raise Temporary(f"{host} has stopped answering", hint="check the network connection; what has arrived is kept") from None
    except (httpx2.UnsupportedProtocol, httpx2.InvalidURL, httpx2.LocalProtocolError):
        raise UsageError(f"{host} is not an address that can be asked.", hint="check HF_ENDPOINT") from None
    except (httpx2.HTTPError, httpx2.StreamError):
        raise Temporary(f"the connection to {host} broke off", hint="check the network connection; what has arrived is kept") from None


def _proxy_variable() -> str | None:
    """The variable that sends requests through a proxy, if there is one; never what it holds, which may be a password."""
    names = (name for scheme in ("ALL", "HTTPS", "HTTP") for name in (f"{scheme}_PROXY", f"{scheme.lower()}_proxy"))
    return next((name for name in names if os.environ.get(name)), None)
