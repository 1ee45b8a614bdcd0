"""Typed, bounded reads of config.json fields: a checkpoint's config is input from outside. No torch."""

from __future__ import annotations

import math
from typing import Any

from rimuru_models.errors import CheckpointError
from rimuru_models.headers import brief

_ABSENT = object()
_DAMAGED = "Such a config.json is damaged, or was changed by hand: download the model's files again."


class Fields:
    """The dict of a config.json with checked getters; every refusal names the file, the field, the value and what is allowed.

    `default=None` makes a field optional: absent or null reads as None.
    """

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def error(self, what: str, hint: str | None = None) -> CheckpointError:
        """An error to raise, with the file named in front."""
        return CheckpointError(f"{self.where}: {what}", hint=hint)

    def contradiction(self, what: str) -> CheckpointError:
        """An error to raise where no model can be meant, with advice."""
        return self.error(what, hint=_DAMAGED)

    def present(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def _raw(self, name: str, default: object) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is _ABSENT:
                raise self.contradiction(f"the field {name!r} is missing.")
            return default
        return value

    def _bad(self, name: str, value: object, wanted: str) -> CheckpointError:
        return self.contradiction(f"{name} is {brief(value)}, expected {wanted}.")

    def integer(self, name: str, low: int, high: int, default: Any = _ABSENT) -> Any:
        """An int in [low, high]; `default` (returned unchecked) if absent. Any: callers know whether None can come."""
        value = self._raw(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._bad(name, value, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: Any = _ABSENT) -> Any:
        """A finite number in [low, high] as float; `default` (unchecked) if absent."""
        value = self._raw(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high or not math.isfinite(value):
            raise self._bad(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """true or false; `default` if absent."""
        value = self._raw(name, default)
        if not isinstance(value, bool):
            raise self._bad(name, value, "true or false")
        return value

    def text(self, name: str, default: Any = _ABSENT) -> Any:
        """A string; `default` if absent."""
        value = self._raw(name, default)
        if value is default:
            return value
        if not isinstance(value, str):
            raise self._bad(name, value, "a string")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """A JSON object; empty if absent."""
        value = self._raw(name, {})
        if not isinstance(value, dict):
            raise self._bad(name, value, "an object")
        return value

    def list_of(self, name: str, kind: type, limit: int) -> list[Any] | None:
        """A list of at most `limit` values that are all of `kind` (bool is no int); None if absent."""
        value = self._raw(name, None)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > limit or not all(type(item) is kind for item in value):
            raise self._bad(name, value, f"a list of at most {limit} {kind.__name__} values")
        return value
