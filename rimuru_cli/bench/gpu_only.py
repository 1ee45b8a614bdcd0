"""Which measurements this machine can make."""

from __future__ import annotations

from rimuru_kernels.backend import select_backend
from rimuru_models.errors import DoesNotFitError


def require_gpu(what: str, hint: str) -> None:
    """Refuse what only the kernels can do.

    Args:
        what: the refused measurement, the subject of a sentence.
        hint: what to type instead.

    Raises:
        DoesNotFitError: the kernels do not run here; says why.
    """
    backend = select_backend()
    if backend.name != "triton":
        raise DoesNotFitError(f"{what} needs a CUDA device that runs the kernels: {backend.reason}.", hint=hint)
