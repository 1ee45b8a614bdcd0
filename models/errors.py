"""Errors a person or a checkpoint can cause; every message says what happened, the hint says what to do next."""

from __future__ import annotations


class RimuruError(Exception):
    """Base of all errors that are shown to a person.

    Attributes:
        what: one or two sentences: what happened and why.
        hint: what to type or change next, or None.
        exit_code: exit status of the command line (see README).
    """

    exit_code = 1

    def __init__(self, what: str, *, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint


class CheckpointError(RimuruError, ValueError):
    """A checkpoint is broken, unsupported or contradicts itself. Names the file and, where there is one, the tensor."""


class UsageError(RimuruError, ValueError):
    """A command, flag or request that cannot be carried out as given."""

    exit_code = 2


class NotFoundError(RimuruError):
    """A model, file or profile that is not there or not accessible."""

    exit_code = 3


class VerificationError(RimuruError):
    """Content does not match its checksum or manifest."""

    exit_code = 4


class NoSpaceError(RimuruError):
    """The disk is full or would become full."""

    exit_code = 5


class DoesNotFitError(RimuruError, ValueError):
    """The model, prompt or request needs more memory or context than there is."""

    exit_code = 6
