"""The project's prompts as token ids of a model: what measurements of a model's answers run over."""

from __future__ import annotations

from pathlib import Path

from rimuru_cli.engine.chat_template import ChatTemplate
from rimuru_cli.engine.experts.prompt_mix import PROMPT_MIX
from rimuru_cli.engine.text import render_prompt
from rimuru_cli.engine.tokenizer import Tokenizer
from rimuru_models.errors import CheckpointError


def prompt_ids(model_dir: Path, count: int | None = None) -> list[list[int]]:
    """The first `count` (None: all) prompts of the mix, as a chat's first message, or as plain text for a model without a chat template.

    Raises:
        CheckpointError: the folder has no usable tokenizer.
    """
    tokenizer = Tokenizer.from_dir(model_dir)
    try:
        template = ChatTemplate.from_dir(model_dir)
    except CheckpointError:
        return [tokenizer.encode(text, add_special_tokens=True) for text in PROMPT_MIX[:count]]
    return [render_prompt(tokenizer, template, [{"role": "user", "content": text}]) for text in PROMPT_MIX[:count]]
