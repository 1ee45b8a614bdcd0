"""From a model's name and the settings to a session that can answer. Torch is loaded here, and nowhere above."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rimuru_cli.chat import show
from rimuru_cli.chat.answer import EngineLike
from rimuru_cli.chat.conversation import Conversation
from rimuru_cli.chat.interrupt import loading_libraries
from rimuru_cli.chat.session import ChatSession, Speech
from rimuru_cli.output import Output, format_bytes
from rimuru_cli.settings import MemorySize, Settings
from rimuru_models.errors import CheckpointError, NotFoundError, RimuruError, UsageError

if TYPE_CHECKING:
    from rimuru_cli.chat.speech import ModelSpeech
    from rimuru_cli.engine.config import EngineConfig
    from rimuru_cli.engine.engine import Engine
    from rimuru_cli.engine.telemetry.frame import Role
    from rimuru_cli.hub.resolve import ResolvedModel

# The demonstration model fits everywhere; half of its experts are kept out on purpose, so that there is something to see. Not of a
# quantised copy: whoever asks for one wants it to fit.
DEMO_RESIDENT_SHARE = 0.5


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to talk.

    Attributes:
        notices: what the person should know beyond engine.info.notices.
        publish: lets dashboards look on and says why not if they cannot; None: they are not wanted.
    """

    engine: EngineLike
    speech: Speech
    notices: tuple[str, ...] = ()
    publish: Callable[[Role], str | None] | None = None


class Loader(Protocol):
    """Finds and loads a model; tests put a fake in its place."""

    def __call__(self, name: str | None, settings: Settings, out: Output, *, chat: bool) -> LoadedModel:
        """Load a model; `chat` says that it must have a working chat template."""
        ...


def load_model(name: str | None, settings: Settings, out: Output, *, chat: bool) -> LoadedModel:
    """Find the model (building the demonstration model if need be) and load engine and tokenizer.

    Raises:
        RimuruError: of whatever kind fits; see hub.resolve and Engine.load.
    """
    resolved, engine, speech = open_parts(name, settings, out, chat=chat)
    publish = None if settings["dashboard"] is False else partial(_publish, engine)
    return LoadedModel(engine, speech, speech.notices + (demo_notices() if resolved.embedded else ()), publish)


def _publish(engine: Engine, role: Role) -> str | None:
    from rimuru_cli.engine.telemetry.publish import try_to_publish
    from rimuru_cli.hub.paths import runtime_dir

    return try_to_publish(engine, runtime_dir(), role)


def open_parts(name: str | None, settings: Settings, out: Output, *, chat: bool) -> tuple[ResolvedModel, Engine, ModelSpeech]:
    """What `load_model` does, with the real types of its parts."""
    with out.progress() as progress:
        progress("Starting", 0, 0)
        with loading_libraries():
            from rimuru_cli.chat.speech import ModelSpeech
            from rimuru_cli.engine.engine import Engine
            from rimuru_cli.hub.resolve import resolve_model
            from rimuru_cli.hub.usage import record_use
        resolved = resolve_model(name, progress=progress)
        try:
            resolved = quantized(resolved, settings["quant"], progress)
        except UsageError as error:  # the wish may be a setting of long ago, and no flag
            raise UsageError(error.what, hint="Name the original model, or take this one as it is: --quant none.") from error
        speech = ModelSpeech(resolved.path, resolved.name)
        if chat:
            _ = speech.template  # a broken template must show before the weights are read
        with _of_a_copy(resolved):
            engine = Engine.load(resolved.path, engine_config(resolved, settings, out), progress)
    record_use(resolved.path)
    engine.info = replace(engine.info, model=resolved.name)
    engine.eos_ids |= speech.tokenizer.eos_ids
    return resolved, engine, speech


@contextlib.contextmanager
def _of_a_copy(resolved: ResolvedModel) -> Iterator[None]:
    """A damaged copy of our own is not downloaded again, but made again."""
    from rimuru_cli.hub.paths import quantized_dir

    try:
        yield
    except CheckpointError as error:
        if resolved.path.parent != quantized_dir():
            raise
        raise CheckpointError(error.what, hint="Type the rimuru quantize that made this copy: it makes again what is damaged.") from error


def quantized(resolved: ResolvedModel, to: str | None, progress: Callable[[str, int, int], None]) -> ResolvedModel:
    """The model's quantised copy, made now if there is none; the model itself where `to` is None or none.

    Raises:
        UsageError, NoSpaceError, RimuruError: as `engine.quantizing.quantized_copy`.
    """
    if to in (None, "none"):
        return resolved
    from rimuru_cli.engine.quantizing import quantized_copy
    from rimuru_cli.hub.paths import quantized_dir
    from rimuru_models.quantizer.layout import Recipe

    folder, _ = quantized_copy(resolved.path, resolved.name, Recipe.of(to), store=quantized_dir(), progress=progress)
    return replace(resolved, path=folder)


def engine_config(resolved: ResolvedModel, settings: Settings, out: Output) -> EngineConfig:
    """Memory, context and profile from the settings.

    Raises:
        NotFoundError: the profile that was named is not there.
    """
    from rimuru_cli.engine.config import EngineConfig, device_memory_bytes

    memory: MemorySize | None = settings["memory"]
    config = EngineConfig(
        context=settings["context"], kv=settings["kv"] or "auto", profile=_profile(resolved.path, settings["profile"], out)
    )
    if memory is not None:
        return replace(config, memory_bytes=memory.of(device_memory_bytes()))
    shown = resolved.embedded and settings["quant"] in (None, "none")
    return replace(config, resident_share=DEMO_RESIDENT_SHARE) if shown else config


def profile_file(model_dir: Path) -> Path:
    """Where the hotset profile of a model is kept."""
    from rimuru_cli.engine.experts.hotset import profile_path
    from rimuru_cli.hub.paths import profiles_dir
    from rimuru_models.index import model_identity

    return profile_path(profiles_dir(), model_identity(model_dir))


def _profile(model_dir: Path, wish: str | None, out: Output) -> Path | None:
    """The profile that was named, or the one that was recorded for this model, or None."""
    if wish is not None:
        if wish.lower() == "none":
            return None
        file = Path(wish).expanduser()
        if not file.is_file():
            raise NotFoundError(f"There is no hotset profile {file}.", hint="Record one with: rimuru profile-hotset MODEL")
        return file
    file = profile_file(model_dir)
    if not file.is_file():
        return None
    from rimuru_cli.engine.experts.hotset import load_profile
    from rimuru_models.config import ModelConfig
    from rimuru_models.index import model_identity

    config = ModelConfig.from_dir(model_dir)
    try:
        load_profile(file, identity=model_identity(model_dir), num_layers=len(config.moe_layers), num_experts=config.num_experts)
    except RimuruError as error:  # nobody asked for this profile, so it must not stand in the way
        out.warn(f"the hotset profile is left out: {error.what}")
        return None
    return file


def demo_notices() -> tuple[str, ...]:
    """What to know about the demonstration model, and what to get next."""
    from rimuru_cli.hub.embedded import EMBEDDED_NAME, EMBEDDED_NOTICE, SUGGESTED_MODELS

    models = ", ".join(f"{model.name} ({model.size_gb} GB)" for model in SUGGESTED_MODELS)
    return (f"{EMBEDDED_NAME} is {EMBEDDED_NOTICE}.", f"Real models to get next, with rimuru pull: {models}")


def read_system_prompt(settings: Settings, file: Path | None) -> str | None:
    """The system prompt from --system-file, else from the settings.

    Raises:
        UsageError: both flags were given, or the file is not UTF-8 text.
        NotFoundError: no such file.
    """
    if file is None:
        return settings["system"] or None
    if settings.origins["system"].source == "flag":
        raise UsageError("--system and --system-file cannot both be given.", hint="Leave one of them out.")
    return read_text_file(file).strip() or None


def read_text_file(file: Path, limit_bytes: int = 256 * 2**20) -> str:
    """A whole text file.

    Raises:
        NotFoundError: no such file.
        UsageError: a folder, unreadable, too large, or not UTF-8 (names the byte).
    """
    from rimuru_cli.chat.repl import decode_utf8

    try:
        with file.open("rb") as stream:  # a pipe tells no size beforehand, and a device may never end
            raw = stream.read(limit_bytes + 1)
        if len(raw) > limit_bytes:
            raise UsageError(f"{file} is larger than {format_bytes(limit_bytes)}.")
        return decode_utf8(raw, str(file))
    except FileNotFoundError as error:
        raise NotFoundError(f"There is no file {file}.", hint="Check the path.") from error
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}.") from error


@contextlib.contextmanager
def opened_session(
    load: Loader,
    model: str | None,
    settings: Settings,
    out: Output,
    *,
    system: str | None = None,
    stop: tuple[str, ...] = (),
    banner: bool = True,
    chat: bool = True,
    role: Role = "chat",
) -> Iterator[ChatSession]:
    """Load a model, say what was loaded (stderr), give a session, and free everything at the end."""
    for warning in settings.warnings:
        out.warn(warning)
    loaded = load(model, settings, out, chat=chat)
    try:
        if banner:
            for line in show.banner(loaded.engine.info, loaded.engine.snapshot()):
                out.note(line, "cyan")
        unseen = None if loaded.publish is None else loaded.publish(role)
        notices = (*loaded.engine.info.notices, *loaded.notices, *([] if unseen is None else [unseen]))
        if not out.json:
            for notice in notices:
                out.note(f"note: {notice}", "yellow")
        session = ChatSession(loaded.engine, loaded.speech, Conversation(system), settings.sampling())
        session.think, session.stop, session.notices = settings["think"], stop, notices
        session.engine_notices = loaded.engine.info.notices
        session.flags = {name for name in session.overrides if settings.origins[name].source == "flag"}
        if chat and settings["think"] is not None and not loaded.speech.can_think:
            out.warn("this model has no reasoning to switch on or off, so --think and --no-think do nothing")
        yield session
    finally:
        loaded.engine.close()
