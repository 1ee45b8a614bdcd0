"""What the hub's refusals mean and what to do about them. Tokens and signed links never get into a message."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rimuru_cli.hub.patience import Temporary
from rimuru_models.errors import NotFoundError, RimuruError

_TRANSIENT = {408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524}


@dataclass(frozen=True)
class Asked:
    """What was asked for, for the words of an error.

    Attributes:
        endpoint: address of the hub.
        repository: `org/name`.
        revision: branch, tag or commit as typed.
        token: whether a token was sent along.
        file: the file, or None for questions about the repository.
        foreign: the answer came from another host, to which the hub had sent us.
    """

    endpoint: str
    repository: str
    revision: str
    token: bool
    file: str | None = None
    foreign: bool = False


def refusal(status: int, headers: Mapping[str, str], asked: Asked) -> RimuruError | Temporary:
    """The error for an answer of 400 or more. `headers` are looked up in any case, as HTTP libraries do."""
    code = headers.get("X-Error-Code") or ""
    message = headers.get("X-Error-Message") or ""
    host = asked.endpoint.partition("://")[2] or asked.endpoint
    page = f"{asked.endpoint}/{asked.repository}"
    if status == 429:
        return _rate_limit(headers, asked, host)
    if status in _TRANSIENT or (asked.foreign and status in (400, 401, 403, 404, 410)):
        # Links to other hosts are signed and expire: the next attempt asks the hub for a new one.
        place = "the store that it sent us to" if asked.foreign else host
        return Temporary(
            f"{place} answered with an error (HTTP {status})",
            hint="this is trouble on the hub's side: try again later",
            retry_after=_retry_after(headers),
        )
    if code == "GatedRepo":
        return _gated(asked, page)
    if message == "Access to this resource is disabled.":
        return NotFoundError(f"{asked.repository} has been disabled on {host}.", hint="look for another repository of this model")
    if code == "RevisionNotFound":
        return NotFoundError(
            f"{asked.repository} has no branch, tag or commit {asked.revision!r}.", hint=f"{page}/commits/main lists what there is"
        )
    if asked.file is not None and (code == "EntryNotFound" or (status == 404 and not code)):
        return NotFoundError(
            f"{asked.repository} has no file {asked.file} at {asked.revision}.",
            hint=f"type the same command again; if that does not help, {host} contradicts its own list of files",
        )
    if "invalid credentials" in message.lower() or (status == 401 and asked.token and code != "RepoNotFound"):
        return NotFoundError(
            f"{host} does not accept your token ({token_source()}): it is wrong, or has expired or been revoked.",
            hint=f"type `{hf_command()} auth login` to store a new one{_unset_hint()}",
        )
    if code == "RepoNotFound" or status in (401, 404):
        return _missing(asked, host)
    if status == 403:
        return NotFoundError(
            f"{host} refuses access to {asked.repository} (HTTP 403{': ' + message[:200] if message.isprintable() and message else ''}).",
            hint="the token may lack the permission to read this repository: https://huggingface.co/settings/tokens"
            if asked.token
            else login_hint(),
        )
    return RimuruError(f"{host} answered with HTTP {status} for {asked.repository}.", hint="try again later, or check HF_ENDPOINT")


def _rate_limit(headers: Mapping[str, str], asked: Asked, host: str) -> Temporary:
    wait = _retry_after(headers)
    when = "" if wait is None else f"; it allows more in {_duration(wait)}"
    hint = "wait, then type the same command again; what has arrived is kept"
    if not asked.token:
        hint += f". Those who are logged in may ask more often: `{hf_command()} auth login`"
    return Temporary(f"{host} limits how often you may ask (HTTP 429){when}", hint=hint, retry_after=wait)


def _gated(asked: Asked, page: str) -> RimuruError:
    if asked.token:
        return NotFoundError(
            f"{asked.repository} is gated, and the account of your token ({token_source()}) has no access to it.",
            hint=f"open {page} with that account and accept the licence, then type the same command again",
        )
    return NotFoundError(
        f"{asked.repository} is gated: its licence must be accepted before it can be downloaded.",
        hint=f"accept it on {page}, then type `{hf_command()} auth login` (or set HF_TOKEN) and the same command again",
    )


def _missing(asked: Asked, host: str) -> RimuruError:
    if asked.token:
        return NotFoundError(
            f"There is no model {asked.repository} on {host}, or it is private and your token ({token_source()}) may not see it.",
            hint="check the spelling, or use the token of an account that has access",
        )
    return NotFoundError(
        f"There is no model {asked.repository} on {host}, or it is private.", hint=f"check the spelling; for a private model {login_hint()}"
    )


def login_hint() -> str:
    """How to log in."""
    return f"type `{hf_command()} auth login` or set HF_TOKEN"


def hf_command() -> str:
    """What to type for huggingface_hub's command: it is left beside this Python, which is rarely on PATH."""
    beside = Path(sys.executable).with_name("hf.exe" if os.name == "nt" else "hf")
    return "hf" if shutil.which("hf") or not beside.is_file() else shlex.quote(str(beside))


def token_source() -> str:
    """Where the token comes from, in words; never the token."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name):
            return f"from {name}"
    return "from `hf auth login`"


def _unset_hint() -> str:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name):
            return f", and unset {name}, which beats it; public models need none"
    return f", or `{hf_command()} auth logout`: public models need none"


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait: Retry-After as a number or a date, else the reset time of its rate-limit header."""
    value = (headers.get("Retry-After") or "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    if value:
        import email.utils  # slow to import, and dates are rare

        parsed = email.utils.parsedate_tz(value)
        if parsed is not None:
            return max(0.0, email.utils.mktime_tz(parsed) - time.time())
    for piece in (headers.get("RateLimit") or "").replace(" ", "").split(";"):
        name, _, number = piece.partition("=")
        if name == "t" and number.isascii() and number.isdigit():
            return float(number[:9])
    return None


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
