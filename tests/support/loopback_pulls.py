"""Planning and carrying out a pull in this process, with somebody who listens."""

from __future__ import annotations

from typing import Any

from rimuru_cli.hub.download import Download, How, Pulled, Status
from rimuru_cli.hub.download_plan import Plan, make_plan
from rimuru_cli.hub.fit import FitVerdict
from rimuru_cli.hub.remote import Hub
from rimuru_cli.hub.remote_files import RemoteFile
from rimuru_models.config import ModelConfig
from rimuru_models.index import CheckpointIndex


class Ear:
    """Listens to a download."""

    def __init__(self) -> None:
        self.statuses: list[Status] = []
        self.files: dict[str, How] = {}
        self.notices: list[str] = []

    def status(self, status: Status) -> None:
        self.statuses.append(status)

    def file(self, file: RemoteFile, how: How) -> None:
        self.files[file.name] = how

    def notice(self, text: str) -> None:
        self.notices.append(text)


def fits(name: str, config: ModelConfig, index: CheckpointIndex | None = None) -> FitVerdict:
    assert index is not None and len(index.headers) in (1, 3)
    return FitVerdict(True, "cpu", "runs", None, None, {})


def no_wait(seconds: float) -> bool:
    return False


def planned(name: str = "org/name", revision: str = "main", check_fit: Any = fits) -> tuple[Plan, Hub]:
    hub = Hub(wait=no_wait)
    return make_plan(hub, name, revision, check_fit), hub


def pull(name: str = "org/name", revision: str = "main", at_once: int = 4) -> tuple[Pulled, Ear]:
    plan, hub = planned(name, revision)
    ear = Ear()
    return Download(plan, hub, ear, at_once).run(), ear
