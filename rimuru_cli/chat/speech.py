"""Text in and out of a real model: the tokenizer, chat template and sampling defaults of its checkpoint behind one small face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rimuru_cli.engine.chat_template import ChatTemplate
from rimuru_cli.engine.generation_defaults import load_generation_defaults, merge_sampling
from rimuru_cli.engine.request import SamplingParams
from rimuru_cli.engine.text import TextStream
from rimuru_cli.engine.tokenizer import Tokenizer


class ModelSpeech:
    """Satisfies `session.Speech` for a checkpoint folder.

    The chat template is compiled on first use, because `run --raw` works with models that have none.

    Attributes:
        notices: what in generation_config.json was ignored.
    """

    def __init__(self, model_dir: Path, name: str) -> None:
        self._model_dir = model_dir
        self._name = name
        self.tokenizer = Tokenizer.from_dir(model_dir)
        self._defaults, self.notices = load_generation_defaults(model_dir)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template. Raises CheckpointError if there is none or it is broken."""
        return ChatTemplate.from_dir(self._model_dir, model=self._name)

    @property
    def can_think(self) -> bool:
        """Whether the template has a switch for reasoning."""
        return self.template.thinking_switch

    def render(self, messages: Sequence[Mapping[str, Any]], *, think: bool | None, answer_next: bool = True) -> str:
        """The prompt text of a conversation."""
        return self.template.render(messages, add_generation_prompt=answer_next, enable_thinking=think)

    def encode(self, text: str, *, raw: bool = False) -> list[int]:
        """Token ids; a rendered template spells its special tokens out itself, raw text does not."""
        return self.tokenizer.encode(text, add_special_tokens=raw)

    def reader(self, prompt: str, params: SamplingParams, *, raw: bool = False) -> TextStream:
        """A fresh reader; reasoning is split off where the template knows of it."""
        return TextStream(self.tokenizer, params, reasoning=not raw and self.template.supports_thinking, prompt_text=prompt)

    def sampling(self, overrides: Mapping[str, Any]) -> SamplingParams:
        """The checkpoint's own sampling settings with some of them replaced."""
        return merge_sampling(self._defaults, overrides)
