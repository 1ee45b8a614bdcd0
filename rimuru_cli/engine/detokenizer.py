"""Token ids to text while they arrive: never half a character, and in sum exactly what decoding all ids at once gives."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rimuru_cli.engine.tokenizer import Tokenizer

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PROMPT_CONTEXT = 8  # tokens; one is enough for the leading space, more only helps when some decode to nothing
_MAX_WINDOW = 32  # tokens kept while the text ends in invalid bytes, before the window is cut


class StreamDecoder:
    """Decodes one answer.

    Only a short window of ids is decoded at each step: `_context` (already emitted, there because some tokenizers drop the space before
    the first piece they decode) and `_pending`. Special tokens are left out, as `decode` leaves them out, so they never become context.

    With `prompt_ids` the first piece is decoded as a continuation of the prompt (keeps its leading space); the prompt itself is never
    emitted, not even when it ends in half a character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._byte_fallback = tokenizer.decoder_kind == "byte_fallback"
        self._byte_level = tokenizer.decoder_kind == "byte_level"
        self._context: list[int] = []
        self._pending: list[int] = []
        self._sent = 0  # characters of the window's text that were emitted, those of the context included
        if prompt_ids and not self._byte_level:
            tail = [i for i in prompt_ids[-4 * _PROMPT_CONTEXT :] if i not in tokenizer.special_ids][-_PROMPT_CONTEXT:]
            if tail and not (self._byte_fallback and any(self._is_byte(i) for i in tail)):
                self._set_context(tail)

    def feed(self, token_id: int) -> str:
        """Text that became certain with this token; often empty, never ending in half a character."""
        if token_id in self._tokenizer.special_ids or self._tokenizer.id_to_piece(token_id) is None:
            return ""
        self._pending.append(token_id)
        # A run of byte pieces decodes as a whole: one invalid byte at its end turns all of it into U+FFFD.
        if self._byte_fallback and self._is_byte(token_id):
            return ""
        text = self._window_text()
        if self._byte_level and text.endswith("\ufffd"):
            # The last U+FFFD may still become a character; everything before it is certain.
            new = text[self._sent : -1]
            self._sent = max(self._sent, len(text) - 1)
            if len(self._pending) > _MAX_WINDOW:
                self._cut(text)
            return new
        new = text[self._sent :]
        if new:
            self._set_context(self._pending)
        return new

    def flush(self) -> str:
        """What is still held back, at the end of the answer: U+FFFD for the bytes of an incomplete character."""
        new = self._window_text()[self._sent :] if self._pending else ""
        if new:
            self._set_context(self._pending)
        return new

    def _window_text(self) -> str:
        return self._tokenizer.decode(self._context + self._pending)

    def _set_context(self, ids: list[int]) -> None:
        """Make emitted ids the context. They stand at a character boundary, so bytes need no context at all."""
        self._context = [] if self._byte_level else ids
        self._pending = []
        self._sent = len(self._tokenizer.decode(self._context)) if self._context else 0

    def _cut(self, text: str) -> None:
        """Drop ids of a long invalid run. A cut is safe where decoding both sides apart gives the same text as together."""
        for keep in range(2, 6):  # an unfinished character spans at most three tokens
            head, tail = self._pending[:-keep], self._pending[-keep:]
            head_text, tail_text = self._tokenizer.decode(head), self._tokenizer.decode(tail)
            if tail_text and head_text + tail_text == text:
                self._pending = tail
                self._sent -= len(head_text)
                return

    def _is_byte(self, token_id: int) -> bool:
        piece = self._tokenizer.id_to_piece(token_id)
        return piece is not None and _BYTE_PIECE.fullmatch(piece) is not None
