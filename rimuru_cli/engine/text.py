"""From messages to prompt ids, and from generated ids to the text a person reads: detokenising, reasoning, stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rimuru_cli.engine.chat_template import ChatTemplate
from rimuru_cli.engine.detokenizer import StreamDecoder
from rimuru_cli.engine.reasoning import CLOSE_TAG, OPEN_TAG, ReasoningParser, TextDelta, opens_thinking
from rimuru_cli.engine.request import SamplingParams
from rimuru_cli.engine.tokenizer import Tokenizer

__all__ = ["StopStrings", "TextDelta", "TextStream", "render_prompt"]


def render_prompt(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    enable_thinking: bool | None = None,
    **kwargs: Any,
) -> list[int]:
    """Token ids of a conversation. Errors as ChatTemplate.render and Tokenizer.encode."""
    text = template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, enable_thinking=enable_thinking, **kwargs)
    return tokenizer.encode(text, add_special_tokens=False)


class StopStrings:
    """Ends a stream of text at the first stop string that is complete; the string and what follows are dropped.

    Text is held back only while it may still be the start of a stop string. Of several that end at the same character the longest counts,
    so the result does not depend on how the text was cut into chunks.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._firsts = frozenset(s[0] for s in self._stop)
        self._longest = max((len(s) for s in self._stop), default=0)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Text that is certain not to belong to a stop string. Nothing any more once `stopped`."""
        if self.stopped:
            return ""
        if not self._stop:
            return text
        text = self._held + text
        hits = [(start + len(s), start) for s in self._stop if (start := text.find(s)) >= 0]
        if hits:
            self.stopped = True
            self._held = ""
            return text[: min(hits)[1]]
        cut = self._certain(text)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """The text held back, when the stream ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _certain(self, text: str) -> int:
        """Where the longest end of `text` that starts a stop string begins."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts and any(s.startswith(text[start:]) for s in self._stop):
                return start
        return len(text)


class TextStream:
    """The text of one answer, fed token by token. End-of-answer tokens are not fed.

    Args:
        reasoning: split `<think>...</think>` off; otherwise all text is content, tags included.
        prompt_text: the rendered prompt, which may have opened the reasoning already.

    Attributes:
        text, reasoning_text: all that was returned so far.
        stopped: a stop string was completed; the caller ends the request. Stop strings end the answer, so they are looked for in content,
            not in reasoning (a stop string "\\n\\n" would otherwise end nearly every reasoned answer before it begins).
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, reasoning: bool = False, prompt_text: str = "") -> None:
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer)
        self._parser = ReasoningParser(opens_thinking(prompt_text)) if reasoning else None
        self._stop = StopStrings(params.stop)
        self._pieces: dict[str, list[str]] = {"content": [], "reasoning": []}
        # Where the tags are special tokens the decoder leaves them out, but the parser needs them.
        tags = {tokenizer.piece_to_id(tag): tag for tag in (OPEN_TAG, CLOSE_TAG)} if reasoning else {}
        self._tags = {i: tag for i, tag in tags.items() if i is not None and i in tokenizer.special_ids}

    @property
    def stopped(self) -> bool:
        """A stop string was completed."""
        return self._stop.stopped

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._pieces["content"])

    @property
    def reasoning_text(self) -> str:
        """The reasoning so far."""
        return "".join(self._pieces["reasoning"])

    def feed(self, token_id: int) -> list[TextDelta]:
        """New text that is certain; often none. Nothing any more once `stopped`."""
        tag = self._tags.get(token_id)
        if tag is not None:
            text = self._decoder.flush() + tag
            self._decoder = StreamDecoder(self._tokenizer)
        else:
            text = self._decoder.feed(token_id)
        return self._take(self._split(text)) if text else []

    def finish(self) -> list[TextDelta]:
        """Text held back until the end. Call once, after the last token."""
        if self.stopped:
            return []
        deltas = self._split(self._decoder.flush())
        if self._parser is not None:
            deltas += self._parser.finish()
        result = self._take(deltas)
        rest = self._stop.finish()
        if rest:
            self._pieces["content"].append(rest)
            result.append(TextDelta("content", rest))
        return result

    def _split(self, text: str) -> list[TextDelta]:
        if self._parser is not None:
            return self._parser.feed(text)
        return [TextDelta("content", text)] if text else []

    def _take(self, deltas: list[TextDelta]) -> list[TextDelta]:
        result = []
        for kind, text in deltas:
            certain = text if kind == "reasoning" else self._stop.feed(text)
            if certain:
                self._pieces[kind].append(certain)
                result.append(TextDelta(kind, certain))
        return result
