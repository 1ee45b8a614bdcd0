"""The state of a talk with one model, and the logic of a turn. Prints nothing; the line editor and the pipe both sit on top of it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rimuru_cli.chat.answer import Answer, AnswerStream, EngineLike, PieceReader
from rimuru_cli.chat.conversation import Conversation, Message, whole_characters
from rimuru_cli.settings import BY_NAME, SETTINGS, checked
from rimuru_models.errors import UsageError

if TYPE_CHECKING:
    from rimuru_cli.engine.reasoning import TextDelta
    from rimuru_cli.engine.request import SamplingParams


class Speech(Protocol):
    """Text in and out of one model: its chat template and its tokenizer."""

    @property
    def can_think(self) -> bool:
        """Whether reasoning can be switched on and off."""
        ...

    def render(self, messages: list[dict[str, str]], *, think: bool | None, answer_next: bool = True) -> str:
        """Lay the messages out as the model expects them. Raises CheckpointError or UsageError if the template refuses."""
        ...

    def encode(self, text: str, *, raw: bool = False) -> list[int]:
        """Turn text into tokens; raw text gets the special tokens (such as the beginning mark) that a template would have written."""
        ...

    def reader(self, prompt: str, params: SamplingParams, *, raw: bool = False) -> PieceReader:
        """A fresh reader for the answer to a prompt."""
        ...

    def sampling(self, overrides: dict[str, Any]) -> SamplingParams:
        """The model's own sampling settings with some of them replaced."""
        ...


SAMPLING_NAMES = tuple(setting.name for setting in SETTINGS if setting.sampling)


@dataclass
class Turn:
    """A turn in progress: iterate `stream` for the pieces, then call `ChatSession.settle`."""

    stream: AnswerStream
    prompt: str
    undo: list[Message]


@dataclass
class ChatSession:
    """A conversation with a model.

    Attributes:
        overrides: sampling settings that somebody set; all others are the model's own.
        flags: names of those that the command line set, and nobody since.
        think: whether a model that can reason does so; None leaves it to the model.
        stop: strings that end an answer.
        notices: what the person should know about this model and how it runs; engine_notices: those of them that come from the engine.
        last_prompt: the text the model was last given, template and all.
        last_answer: the newest answer.
    """

    engine: EngineLike
    speech: Speech
    conversation: Conversation = field(default_factory=Conversation)
    overrides: dict[str, Any] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    think: bool | None = None
    stop: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    engine_notices: tuple[str, ...] = ()
    last_prompt: str | None = None
    last_answer: Answer | None = None

    def params(self) -> SamplingParams:
        """The sampling settings of the next answer."""
        return self.speech.sampling({**self.overrides, "stop": self.stop} if self.stop else self.overrides)

    def ask(self, question: str, stop_now: Callable[[], object]) -> Turn:
        """Begin a turn. If it cannot begin, the conversation is as before.

        Raises:
            UsageError: the question is empty, or the template refuses it.
            DoesNotFitError: the conversation no longer fits the context; says the numbers.
        """
        if not question.strip():
            raise UsageError("The message is empty.")
        return self._begin([*self.conversation.messages, Message("user", question)], stop_now)

    def regenerate(self, stop_now: Callable[[], object]) -> Turn:
        """Begin the last turn again; its old answer is put back if the new one stays empty.

        Raises:
            UsageError: nothing was asked yet.
        """
        index = self.conversation.last_question()
        if index is None:
            raise UsageError("There is no answer to make again yet.")
        return self._begin(self.conversation.messages[: index + 1], stop_now)

    def _begin(self, messages: list[Message], stop_now: Callable[[], object]) -> Turn:
        params = self.params()
        prompt = self.speech.render(Conversation(self.conversation.system, messages).prompt(), think=self.think)
        prompt_ids = self.speech.encode(prompt)
        request = self.engine.submit(prompt_ids, params)  # refuses what does not fit: nothing is ever cut away silently
        undo, self.conversation.messages = self.conversation.messages, messages
        self.last_prompt = prompt
        return Turn(AnswerStream(self.engine, request, self.speech.reader(prompt, params), stop_now), prompt, undo)

    def settle(self, turn: Turn) -> Answer:
        """End a turn: keep its answer, also a partial one; take the question back if there is no text at all."""
        answer = turn.stream.answer
        self.last_answer = answer
        stopped = answer.finish_reason == "cancelled"
        if answer.text.strip() or not stopped:
            self.conversation.messages = [
                *self.conversation.messages,
                Message("assistant", answer.text, answer.reasoning, stopped),
            ]
        else:
            self.conversation.messages = turn.undo
        return answer

    def abandon(self, turn: Turn) -> None:
        """Forget a turn that failed."""
        self.conversation.messages = turn.undo

    def pieces(self, turn: Turn) -> Generator[TextDelta, None, None]:
        """The pieces of a turn; if the engine fails meanwhile, or the iterator is closed early, the turn is forgotten."""
        try:
            yield from turn.stream
        except BaseException:  # also when whoever takes the pieces cannot go on
            self.abandon(turn)
            raise

    def clear(self) -> None:
        """Forget everything that was said; the system prompt stays."""
        self.conversation = Conversation(self.conversation.system)
        self.last_prompt = self.last_answer = None

    def used_tokens(self) -> int:
        """Tokens that the conversation takes in the context now."""
        spoken = self.conversation.prompt()
        if not self.conversation.messages:
            return 0
        return len(self.speech.encode(self.speech.render(spoken, think=self.think, answer_next=False)))

    def set_param(self, name: str, value: str) -> None:
        """Change one sampling setting; 'default' gives it back to the model.

        Raises:
            UsageError: unknown name or wrong value.
        """
        name = name.replace("-", "_")
        if name not in SAMPLING_NAMES:
            raise UsageError(f"There is no sampling setting {name!r}.", hint="There are: " + ", ".join(SAMPLING_NAMES))
        if value.lower() in ("default", "none"):
            self.overrides.pop(name, None)
            self.flags.discard(name)
            return
        changed = {**self.overrides, name: checked(BY_NAME[name], value, name)}
        self.speech.sampling(changed)  # a combination that is refused must not stay
        self.overrides = changed
        self.flags.discard(name)

    def set_system(self, text: str | None) -> None:
        """Change or remove the system prompt.

        Raises:
            UsageError: it is not valid Unicode, so nothing could be asked under it.
        """
        if text is not None and whole_characters(text) != text:
            raise UsageError("The text is not valid Unicode (it contains half of a surrogate pair).")
        self.conversation.system = text

    def renew_notices(self) -> tuple[str, ...]:
        """Take over what the engine has to say after a change; returns the notices that are new."""
        now = self.engine.info.notices
        new = tuple(notice for notice in now if notice not in self.notices)
        others = tuple(notice for notice in self.notices if notice not in self.engine_notices)
        self.notices, self.engine_notices = now + others, now
        return new

    def save(self, file: Path, *, overwrite: bool) -> None:
        """Write conversation and settings to a file."""
        self.conversation.save(file, model=self.engine.info.model, params=self.overrides, overwrite=overwrite)

    def load(self, file: Path) -> list[str]:
        """Take conversation and settings from a file; all or nothing. Flags of the command line win.

        Returns:
            what in it was left out, in words.
        """
        conversation, params = Conversation.load(file)
        overrides: dict[str, Any] = {}
        ignored = []
        given = {name: self.overrides[name] for name in self.flags if name in self.overrides}
        for name, value in params.items():
            if name in SAMPLING_NAMES and value is not None:
                overrides[name] = checked(BY_NAME[name], value, f"{name} in {file}")
            else:
                ignored.append(f"unknown setting {name!r} in {file} was left out")
        for name, value in given.items():
            if name in overrides and overrides[name] != value:
                ignored.append(f"{name} stays {value}, as on the command line; {file} has {overrides[name]}")
        self.conversation, self.overrides = conversation, {**overrides, **given}
        return ignored

    def param_rows(self) -> list[tuple[str, Any, str]]:
        """(name, value in force, 'set' or 'model') for each sampling setting."""
        params = self.params()
        return [(name, getattr(params, name), "set" if name in self.overrides else "model") for name in SAMPLING_NAMES]
