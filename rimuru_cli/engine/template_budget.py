"""What a chat template may use up: a count of units and a deadline. Knows nothing of Jinja's syntax."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Set
from typing import Any

from jinja2.utils import Namespace

STEP = 64  # units for one loop iteration, call, filter or operator: about its time, counted in copied characters
_ITEM = 16  # units for looking at one item of a list
MAX_PADDING = 10_000  # characters or digits that one padding may ask for
MAX_TEXT = 16 * 2**20  # characters of any one string, and of the rendered prompt


class TemplateLimitError(Exception):
    """The template needs more than it may use; the message is the end of a sentence ("it ...").

    Bare Exception on purpose: several filters of Jinja swallow TypeError, ValueError and LookupError.
    """


class Budget:
    """Pays for one rendering.

    Args:
        units: total; one unit is a character looked at or made. The default lets a template take 2.5 million steps.
        seconds: wall time after which the next payment fails; a second line of defence, so generous.
    """

    def __init__(self, *, units: int = 160_000_000, seconds: float = 10.0) -> None:
        self._left = units
        self._deadline = time.monotonic() + seconds

    def spend(self, units: int) -> None:
        """Pay `units`. TemplateLimitError when they are used up or time is over."""
        self._left -= units
        if self._left < 0:
            raise TemplateLimitError("it does not come to an end, or makes too much text")
        if time.monotonic() > self._deadline:
            raise TemplateLimitError("it takes too long")

    def spend_shallow(self, value: Any) -> None:
        """Pay for having made `value`, without looking inside."""
        if isinstance(value, (str, bytes)):
            self.check_size(len(value))
            self.spend(len(value))
        elif isinstance(value, (list, tuple, dict, set)):
            self.spend(_ITEM * len(value))

    def check_size(self, chars: int) -> None:
        """Refuse a text or list of `chars` before it is made."""
        if chars > MAX_TEXT:
            raise TemplateLimitError("it makes too large a text")

    def measure(self, value: Any) -> int:
        """Pay for all of `value`, however deeply nested, before it is compared, hashed or turned into text. Returns the units."""
        if isinstance(value, str):
            size = len(value)
            self.spend(size)
            return size
        if value is None or isinstance(value, (bool, int, float)):
            return _ITEM
        total = 0
        unpaid = 0
        stack: list[Any] = [value]
        while stack:
            item = stack.pop()
            size = _ITEM
            if isinstance(item, (str, bytes)):
                size += len(item)
            elif isinstance(item, Namespace):  # prints its attributes
                stack.append(object.__getattribute__(item, "_Namespace__attrs"))
            elif isinstance(item, Mapping):
                stack.extend(item.keys())
                stack.extend(item.values())
            elif isinstance(item, (list, tuple, deque, Set)) or type(item).__name__ == "dict_values":
                stack.extend(item)
            total += size
            unpaid += size
            if unpaid > 100_000:
                self.spend(unpaid)
                unpaid = 0
        self.spend(unpaid)
        return total

    def drain(self, items: Iterator[Any]) -> list[Any]:
        """All items of a generator, paid one by one."""
        result = []
        for item in items:
            self.spend(_ITEM)
            result.append(item)
        return result
