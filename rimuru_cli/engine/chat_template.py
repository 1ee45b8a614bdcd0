"""Conversations to prompts, by the chat template of the checkpoint (Jinja, untrusted: see template_sandbox)."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateSyntaxError

from rimuru_cli.engine.json_files import read_json_object, read_text_file
from rimuru_cli.engine.template_budget import MAX_TEXT, Budget, TemplateLimitError
from rimuru_cli.engine.template_sandbox import ChatEnvironment, TemplateRefusalError
from rimuru_cli.engine.tokenizer import read_special_tokens
from rimuru_models.errors import CheckpointError, NotFoundError, UsageError
from rimuru_models.gguf import gguf_of, open_gguf

MAX_SOURCE = 256 * 1024  # characters; the longest templates in use have about 30,000
_RAW_HINT = "`rimuru run MODEL --raw PROMPT` works without a chat template."


class ChatTemplate:
    """One compiled chat template.

    Attributes:
        model: name for error messages.
        source: the Jinja source ("default" where there are several).
        supports_thinking: the template knows reasoning: it reads `enable_thinking` or writes <think>.
        thinking_switch: it reads `enable_thinking`, so that reasoning can be turned on and off.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        *,
        model: str,
        special_tokens: Mapping[str, str] | None = None,
        budget_units: int | None = None,
        budget_seconds: float | None = None,
    ) -> None:
        self.model = model
        self._special_tokens = dict(special_tokens or {})
        limits = {"units": budget_units, "seconds": budget_seconds}
        self._limits: dict[str, Any] = {k: v for k, v in limits.items() if v is not None}
        self._lock = threading.Lock()  # the environment holds the budget of the rendering under way
        sources = {"default": source} if isinstance(source, str) else dict(source)
        if "default" not in sources:
            names = ", ".join(repr(_printable(n)) for n in sources) or "none"
            raise CheckpointError(f"The chat templates of {model} have no default (they are: {names}).", hint=_RAW_HINT)
        self.source = sources["default"]
        self._environment = ChatEnvironment(Budget(**self._limits))
        self._templates = {name: self._compile(text) for name, text in sources.items() if name in ("default", "tool_use")}
        self.thinking_switch = "enable_thinking" in self.source
        self.supports_thinking = self.thinking_switch or "<think>" in self.source

    @classmethod
    def from_dir(cls, model_dir: Path, *, model: str | None = None) -> ChatTemplate:
        """The template of a checkpoint: chat_template.jinja, else chat_template.json, else tokenizer_config.json; or that of a GGUF file.

        Raises:
            NotFoundError: the folder does not exist.
            CheckpointError: there is no template, or it does not compile (names the line).
        """
        gguf = gguf_of(model_dir)
        if gguf is None and not model_dir.is_dir():
            raise NotFoundError(f"There is no model folder {model_dir}.")
        model = model or model_dir.resolve().name
        if gguf is not None:
            return cls._from_gguf(gguf, model)
        config = read_json_object(model_dir / "tokenizer_config.json") or {}
        source = _find_source(model_dir, config, model)
        if source is None:
            raise CheckpointError(f"{model} has no chat template, so it is probably not a chat model.", hint=_RAW_HINT)
        return cls(source, model=model, special_tokens=read_special_tokens(model_dir, config))

    @classmethod
    def _from_gguf(cls, path: Path, model: str) -> ChatTemplate:
        from rimuru_cli.engine.gguf_tokenizer import chat_templates, special_tokens

        header = open_gguf(path).main
        source = chat_templates(header)
        if source is None:
            raise CheckpointError(f"{model} has no chat template, so it is probably not a chat model.", hint=_RAW_HINT)
        return cls(source, model=model, special_tokens=special_tokens(header, header.strings("tokenizer.ggml.tokens")))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for a conversation; equal to transformers' `apply_chat_template(..., tokenize=False)`.

        Args:
            messages: dicts with "role" and "content" (text, or a list of parts where the template takes one).
            enable_thinking: None leaves it to the template; other keywords reach the template unchanged.

        Raises:
            UsageError: no messages, or the template itself refuses them (its own words).
            CheckpointError: the template fails, takes too long, makes too much text or tries to leave its sandbox.
        """
        if not messages:
            raise UsageError("A conversation needs at least one message.")
        if not all(isinstance(m, Mapping) for m in messages):
            raise UsageError('Each message must be an object with "role" and "content".')
        context: dict[str, Any] = {**self._special_tokens, "documents": None, **kwargs}
        if enable_thinking is not None:
            context["enable_thinking"] = enable_thinking
        context.update(
            messages=[dict(m) for m in messages],
            tools=None if tools is None else [dict(t) for t in tools],
            add_generation_prompt=add_generation_prompt,
        )
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        with self._lock:
            self._environment.budget = Budget(**self._limits)
            try:
                return self._run(self._templates[name], context)
            except TemplateRefusalError as error:
                raise UsageError(f"The chat template of {self.model} refuses this conversation: {_printable(str(error))}") from error
            except TemplateLimitError as error:
                raise CheckpointError(f"The chat template of {self.model} was stopped: {error}.", hint=_RAW_HINT) from error
            except SecurityError as error:
                raise CheckpointError(
                    f"The chat template of {self.model} tries to leave its sandbox and was stopped: {_printable(str(error))}",
                    hint="Do not trust this checkpoint. " + _RAW_HINT,
                ) from error
            except Exception as error:  # whatever a stranger's code raises
                reason = _printable(str(error)) or type(error).__name__
                raise CheckpointError(f"The chat template of {self.model} fails: {reason}", hint=_RAW_HINT) from error

    def _run(self, template: Template, context: dict[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        for piece in template.generate(context):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_TEXT:
                raise TemplateLimitError("it makes too large a text")
        return "".join(pieces)

    def _compile(self, source: str) -> Template:
        if len(source) > MAX_SOURCE:
            raise CheckpointError(f"The chat template of {self.model} is too large ({len(source)} characters).", hint=_RAW_HINT)
        env = self._environment
        try:
            return Template.from_code(env, env.compile(env.metered(source)), env.make_globals(None))
        except TemplateSyntaxError as error:
            what = f"The chat template of {self.model} is broken at line {error.lineno}: {_printable(error.message or '')}"
            raise CheckpointError(what, hint=_RAW_HINT) from error
        except Exception as error:  # too deeply nested, numbers too long, names the compiler rejects
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else _printable(str(error)) or type(error).__name__
            raise CheckpointError(f"The chat template of {self.model} cannot be compiled: {reason}", hint=_RAW_HINT) from error


def _find_source(model_dir: Path, config: dict[str, Any], model: str) -> str | dict[str, str] | None:
    def read(path: Path) -> str | None:
        text = read_text_file(path, max_bytes=4 * MAX_SOURCE)
        # As Python's text mode, which transformers reads the file with.
        return None if text is None else text.replace("\r\n", "\n").replace("\r", "\n")

    own = read(model_dir / "chat_template.jinja")
    if own is not None:
        tool_use = read(model_dir / "additional_chat_templates" / "tool_use.jinja")
        return own if tool_use is None else {"default": own, "tool_use": tool_use}
    for value in ((read_json_object(model_dir / "chat_template.json") or {}).get("chat_template"), config.get("chat_template")):
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            entries = [(e.get("name"), e.get("template")) for e in value if isinstance(e, dict)]
            named = {n: t for n, t in entries if isinstance(n, str) and isinstance(t, str)}
            if len(named) == len(value) > 0:
                return named
        if value is not None:
            raise CheckpointError(f"The chat template of {model} must be a string or a list of named strings.", hint=_RAW_HINT)
    return None


def _printable(text: str) -> str:
    """One line of at most 300 visible characters: the text comes from the checkpoint and goes to a terminal."""
    flat = "".join(c if c.isprintable() else " " for c in text[:1000]).strip()
    return flat if len(flat) <= 300 else flat[:297] + "..."
