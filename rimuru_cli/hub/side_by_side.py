"""Waiting for several things at once, in threads that nobody has to wait for: Ctrl-C must not hang on a server that has gone silent."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(items: Sequence[Item], work: Callable[[Item], Result], at_once: int) -> list[Result]:
    """Do `work` for every item, at most `at_once` at a time.

    Returns:
        The results in the order of the items.

    Raises:
        BaseException: the first one that any of them raised; nothing new is begun after that.
    """
    if not items:
        return []
    todo: queue.SimpleQueue[tuple[int, Item]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, Result | None, BaseException | None]] = queue.SimpleQueue()
    stop = threading.Event()
    for numbered in enumerate(items):
        todo.put(numbered)

    def run() -> None:
        while not stop.is_set():
            try:
                number, item = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((number, work(item), None))
            except BaseException as error:
                done.put((number, None, error))
                return

    for _ in range(min(at_once, len(items))):
        threading.Thread(target=run, daemon=True).start()
    results: dict[int, Result] = {}
    try:
        while len(results) < len(items):
            try:
                number, result, error = done.get(timeout=0.1)  # a wait without end could not be interrupted on Windows
            except queue.Empty:
                continue
            if error is not None:
                raise error
            results[number] = result  # type: ignore[assignment]
    finally:
        stop.set()
    return [results[number] for number in range(len(items))]
