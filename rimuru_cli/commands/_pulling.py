"""How a download is shown: a bar for people, lines of JSON for programs, nothing for pipes; and the question before it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from rimuru_cli.hub.download import How, Pulled, Status
from rimuru_cli.hub.download_plan import Plan
from rimuru_cli.hub.fit import FitVerdict
from rimuru_cli.hub.remote_files import RemoteFile
from rimuru_cli.hub.resolve import ResolvedModel
from rimuru_cli.output import Output, Progress, TransferProgress, format_bytes, is_terminal
from rimuru_models.config import ModelConfig
from rimuru_models.errors import RimuruError
from rimuru_models.index import CheckpointIndex

_EVENT_SECONDS = 0.5


class Screen:
    """Tells people or programs what a download does; a `Listener` while `watching`.

    Args:
        out: where to; with --json every event is one line on stdout.
    """

    def __init__(self, out: Output) -> None:
        self._out = out
        self._bar: TransferProgress | None = None
        self._told_at = 0.0
        self._noticed = ""

    @property
    def talks(self) -> bool:
        """Whether a person reads stderr."""
        return not self._out.json and is_terminal(self._out.stderr)

    def looking(self) -> contextlib.AbstractContextManager[Progress]:
        """Show a line while entered, where there is a terminal."""
        return self._out.progress()

    def here(self, model: ResolvedModel) -> None:
        """Nothing to download."""
        if self._out.json:
            self._event("result", model=model.name, commit=model.revision, path=str(model.path), up_to_date=True, downloaded_bytes=0)
            return
        self._out.line(str(model.path))
        if self.talks:
            folder = "a file on this machine" if model.path.is_file() else "a folder on this machine"
            what = "the demonstration model" if model.embedded else folder if model.revision is None else "here"
            self._out.note(f"{model.name} is {what}; there is nothing to download.")

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Show a bar while entered, where there is a terminal."""
        with self._out.transfer_progress() as bar:
            self._bar = bar
            try:
                yield
            finally:
                self._bar = None

    def status(self, status: Status) -> None:
        """Draw the bar, or write an event twice a second."""
        if self._out.json:
            if time.monotonic() - self._told_at < _EVENT_SECONDS and status.files_done < status.files_total:
                return
            self._told_at = time.monotonic()
            self._event("progress", **vars(status))
        elif self._bar is not None:
            if status.check_bytes > status.checked_bytes > 0 and not status.received_bytes:
                self._bar("Checking what is here", status.checked_bytes, status.check_bytes, "")
                return
            waiting = status.bytes_per_s is None and status.waiting_for is not None
            stage = "Another process fetches" if waiting else f"{status.files_done} of {status.files_total} files"
            self._bar(stage, status.done_bytes, status.total_bytes, pace(status))

    def file(self, file: RemoteFile, how: How) -> None:
        """A file is complete."""
        if self._out.json:
            self._event("file", name=file.name, num_bytes=file.num_bytes, how=how)

    def notice(self, text: str) -> None:
        """Something is being mended. Several files that meet the same trouble at once are one notice."""
        if text == self._noticed:
            return
        self._noticed = text
        if self._out.json:
            self._event("notice", message=text)
        else:
            self._out.note(f"note: {text}", "dim")

    def plan(self, plan: Plan) -> None:
        """What is going to happen."""
        if self._out.json:
            self._event("plan", **plan_values(plan))
        if plan.renamed:
            same = plan.asked_for.lower() == plan.origin.repository.lower()
            self.notice(f"{plan.asked_for} is {'written' if same else 'now called'} {plan.origin.repository}; use that name from now on")
        if not self.talks or plan.missing_bytes <= 0:
            return
        here = plan.present_bytes + plan.part_bytes
        resumed = f", {format_bytes(here)} of it is here already" if here else ""
        self._out.note(f"{plan.name} at {plan.origin.commit[:12]}: {_files(len(plan.files))}, {format_bytes(plan.total_bytes)}{resumed}")
        self._out.note(f"disk: {format_bytes(plan.missing_bytes)} needed, {format_bytes(plan.free_bytes)} free in {plan.cache.root}", "dim")
        if plan.architecture is not None:
            self._out.note(f"architecture: {plan.architecture}", "dim")
        if plan.verdict is not None:
            self._out.note(f"this machine: {plan.verdict.headline}", "dim")

    def agree(self, plan: Plan, *, yes: bool) -> None:
        """Ask whether to go on where something speaks against it.

        Raises:
            RimuruError: no, or nobody can be asked; with the exit code of what speaks against it.
        """
        if not plan.objections:
            return
        texts = [objection.text for objection in plan.objections]
        if yes:
            for text in texts:
                self._out.warn(text)
            return
        first = plan.objections[0]
        if self.talks and is_terminal(sys.stdin):
            for text in texts:
                self._out.warn(text)
            self._out.write_note(f"Download {format_bytes(plan.missing_bytes)} anyway? [y/N] ")
            if sys.stdin.readline().strip().lower() in ("y", "yes"):
                return
            raise _declined("Nothing was downloaded.", first.hint, first.exit_code)
        also = " `--yes` downloads it anyway." if first.hint is None else f"{first.hint.rstrip('.')}; --yes downloads it anyway"
        raise _declined(" ".join(texts) + " Nothing was downloaded.", also.strip(), first.exit_code)

    def done(self, plan: Plan, pulled: Pulled) -> None:
        """The end: the folder on stdout, and for people what to type next."""
        values = {
            "model": plan.name,
            "commit": plan.origin.commit,
            "path": str(pulled.path),
            "up_to_date": pulled.received_bytes == 0,
            "downloaded_bytes": pulled.received_bytes,
            "total_bytes": plan.total_bytes,
            "seconds": round(pulled.seconds, 3),
            "files": [
                {"name": name, "num_bytes": file.num_bytes, "sha256": file.sha256, "etag": file.etag}
                for name, file in sorted(pulled.files.items())
            ],
        }
        if self._out.json:
            self._event("result", **values)
            return
        self._out.line(str(pulled.path))
        if not self.talks:
            return
        if pulled.received_bytes:
            rate = f", {format_bytes(pulled.received_bytes / pulled.seconds)}/s" if pulled.seconds > 1 else ""
            self._out.note(f"{format_bytes(pulled.received_bytes)} downloaded and checked{rate}.", "green")
        else:
            self._out.note("Everything is here and up to date.", "green")
        if not plan.objections:
            self._out.note(f"Next: rimuru chat {plan.name}{'' if plan.revision == 'main' else '@' + plan.revision}")

    def _event(self, event: str, **values: Any) -> None:
        self._out.emit({"event": event, **values}, compact=True)


def fits_here(name: str, config: ModelConfig, index: CheckpointIndex | None = None) -> FitVerdict:
    """Whether a model runs on this machine; a `FitCheck` that is loaded when it is asked, for most pulls never ask."""
    from rimuru_cli.fit import check_fit

    return check_fit(name, config, index)


class _Declined(RimuruError):
    """A download that does not begin, with the exit code of the reason."""


def _declined(what: str, hint: str | None, exit_code: int) -> RimuruError:
    error = _Declined(what, hint=hint)
    error.exit_code = exit_code
    return error


def plan_values(plan: Plan) -> dict[str, Any]:
    """A plan as JSON."""
    return {
        "model": plan.name,
        "variant": plan.variant,
        "asked_for": plan.asked_for,
        "revision": plan.revision,
        "commit": plan.origin.commit,
        "files": len(plan.files),
        "total_bytes": plan.total_bytes,
        "present_bytes": plan.present_bytes + plan.part_bytes,
        "missing_bytes": plan.missing_bytes,
        "free_bytes": plan.free_bytes,
        "cache": str(plan.cache.root),
        "architecture": plan.architecture,
        "fit": None if plan.verdict is None else plan.verdict.report,
        "objections": [objection.text for objection in plan.objections],
    }


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def pace(status: Status) -> str:
    """Rate and remaining time in words: '45.2 MiB/s  2:31 left'."""
    if status.bytes_per_s is None or status.eta_s is None:
        return "-"
    seconds = round(status.eta_s)
    hours, minutes = divmod(seconds // 60, 60)
    left = f"{hours}:{minutes:02}:{seconds % 60:02}" if hours else f"{minutes}:{seconds % 60:02}"
    return f"{format_bytes(status.bytes_per_s)}/s  {left} left"
