"""`rimuru pull` from beginning to end: find, plan, ask, download; or find out that there is nothing to do."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from rimuru_cli.hub.download import Download, Listener, Pulled
from rimuru_cli.hub.download_plan import CacheRefusedError, Plan, finished_plan, make_plan
from rimuru_cli.hub.fit import FitCheck
from rimuru_cli.hub.manifest import Progress
from rimuru_cli.hub.patience import UnreachableError
from rimuru_cli.hub.pull_manifest import PullManifest, renamed_to
from rimuru_cli.hub.remote import Hub
from rimuru_cli.hub.remote_files import COMMIT
from rimuru_cli.hub.resolve import RepositoryName, ResolvedModel, parse_repository, resolve_here, resolve_snapshot
from rimuru_cli.hub.sizes import size_in_words
from rimuru_models.errors import NotFoundError, RimuruError, UsageError


class PullScreen(Listener, Protocol):
    """Who talks to the person or the program that wants a model."""

    def looking(self) -> AbstractContextManager[Progress]:
        """Entered while the hub is asked or the demonstration model is built; gives who is told how far that is."""

    def plan(self, plan: Plan) -> None:
        """What is going to happen."""

    def agree(self, plan: Plan, *, yes: bool) -> None:
        """Raise unless it may go on."""

    def watching(self) -> AbstractContextManager[None]:
        """Entered while files are fetched."""

    def here(self, model: ResolvedModel) -> None:
        """It is a folder, the demonstration model, or what another tool downloaded: nothing to download."""

    def done(self, plan: Plan, pulled: Pulled) -> None:
        """The snapshot is there."""


def pull_model(name: str, screen: PullScreen, *, yes: bool, at_once: int, check_fit: FitCheck | None) -> None:
    """Make a model be on this machine, whole and checked.

    Args:
        name: `org/name[:variant][@revision]`; a folder, a GGUF file or the demonstration model are there already (the latter is built if
            need be).
        screen: who is told.
        yes: go on whatever speaks against it.
        at_once: files to fetch side by side.
        check_fit: says whether a model runs on this machine; None: not asked.

    Raises:
        UsageError: the name cannot be one of a model.
        NotFoundError: missing, gated, private.
        CheckpointError: pickled weights only, or a repository that is no model.
        NoSpaceError: too little space, before or during the download.
        VerificationError: the hub sends other content than it announces.
        RimuruError: the hub cannot be reached; or something spoke against it (then with the exit code of that).
    """
    with screen.looking() as progress:
        here = resolve_here(name, progress=progress)
    if here is not None:
        screen.here(here)
        return
    wanted = parse_repository(name)
    repository, variant, revision = wanted.repository, wanted.variant, wanted.revision or "main"
    if COMMIT.fullmatch(revision) and (plan := finished_plan(repository, revision, variant)) is not None:
        screen.done(plan, as_it_is(plan))  # a commit never changes: nothing to ask
        return
    try:
        with screen.looking() as progress:
            progress(f"Asking for {repository}", 0, 0)
            hub = Hub(notice=screen.notice)
            plan = make_plan(hub, repository, revision, check_fit, variant)
    except UnreachableError as error:
        names = (repository, renamed_to(repository))
        finished = next((plan for one in names if one is not None and (plan := finished_plan(one, revision, variant)) is not None), None)
        if finished is None:
            if not _shown_as_it_is(name, wanted, error, screen):
                raise
            return
        screen.notice(f"{error.what} What is here of {finished.origin.repository} is complete, but there may be a newer version.")
        screen.done(finished, as_it_is(finished))
        return
    screen.plan(plan)
    known = COMMIT.fullmatch(revision) is not None or plan.cache.commit_of(revision) == plan.origin.commit
    if plan.complete and known and not plan.renamed:
        screen.done(plan, as_it_is(plan))  # without a write: the cache may be read-only
        return
    screen.agree(plan, yes=yes)
    with screen.watching():
        download = Download(plan, hub, screen, at_once)
        try:
            pulled = download.run()
        except KeyboardInterrupt:
            kept = f"{size_in_words(download.kept_bytes)} of {size_in_words(plan.total_bytes)}"
            screen.notice(f"{kept} are kept; the same command goes on from there")
            raise
        except CacheRefusedError as error:
            here_already = RepositoryName(plan.origin.repository, plan.origin.commit, variant)
            if not _shown_as_it_is(name, here_already, error, screen):
                raise
            return
    screen.done(plan, pulled)


def _shown_as_it_is(name: str, wanted: RepositoryName, why: RimuruError, screen: PullScreen) -> bool:
    """Show a snapshot that lacks nothing and that rimuru did not pull, since `why` keeps it from doing more; False when there is none."""
    try:
        found = resolve_snapshot(wanted)
    except (NotFoundError, UsageError):
        return False
    repository = wanted.repository if found.revision is None else found.name.partition(":")[0]
    if found.revision is None or PullManifest.read(repository, found.revision) is not None:
        return False
    compare = f"`rimuru verify {name}` compares its checksums"
    screen.notice(f"{why.what} What another tool downloaded of {found.name} is here; {compare}.")
    screen.here(found)
    return True


def as_it_is(plan: Plan) -> Pulled:
    """What a pull of a finished plan gives."""
    manifest = PullManifest.read(plan.origin.repository, plan.origin.commit)
    names = {file.name for file in plan.files}
    files = {name: file for name, file in manifest.files.items() if name in names} if manifest else {}
    return Pulled(plan.path, files, 0, 0.0)
