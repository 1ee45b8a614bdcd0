"""Splits a model's text into its reasoning (`<think>...</think>`) and the answer, while it streams."""

from __future__ import annotations

from typing import Literal, NamedTuple

OPEN_TAG = "<think>"
CLOSE_TAG = "</think>"

TextKind = Literal["reasoning", "content"]


class TextDelta(NamedTuple):
    """A piece of new text and which of the two streams it belongs to."""

    kind: TextKind
    text: str


def opens_thinking(prompt_text: str) -> bool:
    """Whether the prompt itself already opened the reasoning, so that the answer starts inside it."""
    return prompt_text.rstrip().endswith(OPEN_TAG)


class ReasoningParser:
    """Incremental parser; how the text is cut into chunks never changes the sum of the deltas.

    Reasoning is one block at the very start (white space may precede it): a tag written later is part of the answer, since models also
    talk about such tags. Line breaks just inside the tags and between the block and the answer belong to neither.
    """

    def __init__(self, start_in_reasoning: bool = False) -> None:
        self._state: Literal["start", "reasoning", "gap", "content"] = "reasoning" if start_in_reasoning else "start"
        self._held = ""  # text whose meaning is still open
        self._skip_breaks = start_in_reasoning

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text belongs to the reasoning, as far as is known."""
        return self._state == "reasoning"

    def feed(self, text: str) -> list[TextDelta]:
        """Deltas that are certain now; never empty ones."""
        if self._state == "content":
            return [TextDelta("content", text)] if text else []
        self._held += text
        deltas: list[TextDelta] = []
        while self._advance(deltas):
            pass
        return deltas

    def finish(self) -> list[TextDelta]:
        """What was held back, at the end of the answer."""
        held, self._held = self._held, ""
        if self._state == "reasoning":
            held = held.rstrip("\n")
            return [TextDelta("reasoning", held)] if held else []
        return [TextDelta("content", held)] if held else []

    def _advance(self, deltas: list[TextDelta]) -> bool:
        """One transition; False when more text is needed."""
        if self._state == "start":
            rest = self._held.lstrip()
            if rest.startswith(OPEN_TAG):
                self._state, self._held, self._skip_breaks = "reasoning", rest[len(OPEN_TAG) :], True
                return True
            if OPEN_TAG.startswith(rest):
                return False
        elif self._state == "reasoning":
            if self._skip_breaks:
                self._held = self._held.lstrip("\n")
                self._skip_breaks = not self._held
            inside, tag, after = self._held.partition(CLOSE_TAG)
            if tag:
                self._emit(deltas, inside.rstrip("\n"))
                self._state, self._held = "gap", after
                return True
            # Keep the start of a tag, and the line breaks before it or at the end: the tag would swallow them.
            keep = _overlap(self._held, CLOSE_TAG)
            certain = self._held[: len(self._held) - keep].rstrip("\n")
            self._held = self._held[len(certain) :]
            self._emit(deltas, certain)
            return False
        elif self._state == "gap":
            self._held = self._held.lstrip("\n")
            if not self._held:
                return False
        self._state = "content"
        if self._held:
            deltas.append(TextDelta("content", self._held))
            self._held = ""
        return False

    def _emit(self, deltas: list[TextDelta], text: str) -> None:
        if text:
            deltas.append(TextDelta("reasoning", text))


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a proper start of `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0
