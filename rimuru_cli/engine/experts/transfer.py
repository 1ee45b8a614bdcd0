"""Copies between the host tier and the pool that run beside the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Loader:
    """One background thread that fills pages, first come, first served.

    Expanded experts are queued at the step's beginning, before the loading buffers' contents, and so come first.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rimuru-loader")

    def submit(self, copy: Callable[[], None]) -> Future[None]:
        """Queue a copy; the future is done when its bytes are in place, or carries what went wrong."""
        return self._threads.submit(copy)

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._threads.shutdown(wait=True)
