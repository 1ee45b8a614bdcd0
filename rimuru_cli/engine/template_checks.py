"""Steps of a chat template that could make much out of little: measured here before they run."""

from __future__ import annotations

import re
from typing import Any

from jinja2.exceptions import SecurityError

from rimuru_cli.engine.template_budget import MAX_PADDING, STEP, Budget, TemplateLimitError

MAX_INT_BITS = 16_384
_PADDING_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill"})
# printf specifications with a width or precision of five digits or more, or taken from an argument.
_WIDE = re.compile(r"%(?:\([^()%]{0,100}\))?[-+ #0]*(?:\d{5}|\d*\.\d{5}|\d*\.?\*)")
_KEY = re.compile(r"%\([^()%]{0,100}\)")
_CODECS = frozenset({"ascii", "ignore", "latin-1", "replace", "strict", "utf-8", "utf8"})


def check_binop(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """Refuse an operator whose result would be far larger than its operands."""
    if operator == "**":
        bits = left.bit_length() if isinstance(left, int) else 0
        if isinstance(right, int) and bits * abs(right) > MAX_INT_BITS:
            raise TemplateLimitError("it computes a number with too many digits")
    elif operator == "*":
        for value, times in ((left, right), (right, left)):
            if not isinstance(times, int):
                continue
            if isinstance(value, int):
                if value.bit_length() + times.bit_length() > MAX_INT_BITS:
                    raise TemplateLimitError("it computes a number with too many digits")
            elif times > 1:
                budget.check_size(budget.measure(value) * times)
    elif operator == "%" and isinstance(left, (str, bytes)):
        check_format(budget, left, right)


def check_method(budget: Budget, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse calls of builtin methods whose time or result could be far larger than what they get. `args` are measured already."""
    if name in _PADDING_METHODS:
        width = max((abs(a) for a in (*args, *kwargs.values()) if isinstance(a, int)), default=0)
        if width > MAX_PADDING:
            raise TemplateLimitError("it pads text to too large a width")
        if name == "expandtabs" and isinstance(owner, (str, bytes)):
            budget.check_size(len(owner) * (1 + width))
    elif name in ("translate", "from_bytes"):
        raise SecurityError(f"the method {name!r} is not available in chat templates.")
    elif name in ("encode", "decode"):  # some codecs take quadratic time
        if any(a not in _CODECS for a in (*args, *kwargs.values())):
            raise SecurityError(f"the method {name!r} is available in chat templates with common encodings only.")
    elif isinstance(owner, (str, bytes)):
        if name == "replace" and len(args) >= 2:
            _check_replace(budget, owner, args[0], args[1])
        elif name == "join" and args and hasattr(args[0], "__len__"):
            budget.check_size(budget.measure(args[0]) + len(args[0]) * len(owner))
    elif name in ("index", "count"):  # compare every item
        budget.measure(owner)


def _check_replace(budget: Budget, text: Any, old: Any, new: Any) -> None:
    if isinstance(old, type(text)) and isinstance(new, type(text)):
        budget.check_size(len(text) + text.count(old) * len(new))


def check_filter(budget: Budget, name: str, values: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse filters whose time or result could be far larger than what they get. `values` are measured already."""
    if name in ("int", "float") and values and isinstance(values[0], (str, bytes)) and len(values[0]) > 1000:
        raise TemplateLimitError("it reads a number with too many digits")
    if name == "format" and values:
        check_format(budget, str(values[0]), kwargs or values[1:])
    elif name == "replace" and len(values) >= 3:
        _check_replace(budget, str(values[0]), values[1], values[2])
    elif name == "join" and values:
        glue = values[1] if len(values) > 1 else kwargs.get("d", "")
        if hasattr(values[0], "__len__"):
            budget.check_size(budget.measure(values[0]) + len(values[0]) * budget.measure(glue))
    elif name == "indent" and values:
        width = values[1] if len(values) > 1 else kwargs.get("width", 4)
        length = len(width) if isinstance(width, str) else abs(int(width))
        text = str(values[0])
        budget.check_size(len(text) + (1 + len(text.splitlines())) * length)
    elif name == "tojson":
        shape = [*values[1:], *kwargs.values()]
        if any(
            (isinstance(v, int) and abs(v) > 64) or (isinstance(v, (str, tuple, list)) and budget.measure(v) > 64 * STEP) for v in shape
        ):
            raise TemplateLimitError("it asks tojson for too wide an indent")


def check_format(budget: Budget, text: str | bytes, values: Any) -> None:
    """Refuse printf-style formatting whose result would be far larger than its parts."""
    pattern = text if isinstance(text, str) else text.decode("latin-1")
    if len(_KEY.findall(pattern)) != pattern.count("%(") or _WIDE.search(pattern):
        raise TemplateLimitError("it pads text to too large or a computed width")
    budget.check_size(len(text) + pattern.count("%") * (budget.measure(values) + MAX_PADDING // 10))
