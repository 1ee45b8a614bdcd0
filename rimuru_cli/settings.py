"""Settings: one table, and where each value came from: flags beat RIMURU_* variables, which beat the TOML file, which beats defaults.

A value of None means that nobody said anything; the model (its generation_config.json) or the engine then decides.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rimuru_models.errors import UsageError

ENV_PREFIX = "RIMURU_"
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
    # A bare letter means the binary unit, as it does for most tools that take sizes.
    **{prefix: 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(%|[a-z]*)\s*", re.IGNORECASE | re.ASCII)
_MAX_BYTES = 1 << 60
_MAX_DIGITS = 30
_YES, _NO = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


@dataclass(frozen=True)
class MemorySize:
    """An amount of memory: exactly one of num_bytes and share (of the device, above 0 and at most 1) is set."""

    num_bytes: int | None = None
    share: float | None = None

    def of(self, device_bytes: int) -> int:
        """The amount in bytes on a device of this size."""
        if self.num_bytes is not None:
            return self.num_bytes
        assert self.share is not None, "one of the two is always set"
        return int(device_bytes * self.share)

    def __str__(self) -> str:
        return str(self.num_bytes) if self.num_bytes is not None else f"{(self.share or 0) * 100:g}%"


def parse_size(value: str | int) -> MemorySize:
    """Read a size: bytes, a number with a unit ('8GiB' and '8g' are binary, '8GB' decimal), or a share of the device ('50%').

    Raises:
        UsageError: it is none of these, zero, or absurdly large.
    """
    text = str(value)
    match = _SIZE.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or len(match[1]) > _MAX_DIGITS or (unit != "%" and unit not in _UNITS):
        raise UsageError(f"{text[:60]!r} is not a size.", hint="Write it like 8GiB, 8GB, 8589934592 or 50%.")
    number = float(match[1])
    if unit == "%":
        if not 0 < number <= 100:
            raise UsageError(f"A share must be above 0% and at most 100%, not {text.strip()}.")
        return MemorySize(share=number / 100)
    whole = match[1].isdecimal()
    num_bytes = int(match[1]) * _UNITS[unit] if whole else int(number * _UNITS[unit])
    if not 0 < num_bytes <= _MAX_BYTES:
        raise UsageError(f"A size must be at least 1 byte and at most 1 EiB, not {text.strip()}.")
    return MemorySize(num_bytes=num_bytes)


def parse_share(value: str, place: str) -> float:
    """Read a share such as '50%' or 0.5: above 0 and at most 1.

    Raises:
        UsageError: it is something else; names the place.
    """
    text = value.strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise UsageError(f"{place}: {value!r} is not a share above 0% and at most 100%.", hint="Write it like 50%.")
    return share


def parse_switch(value: object) -> bool:
    """Read on/off, yes/no, true/false, 1/0."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word not in _YES | _NO:
        raise UsageError(f"{_quoted(value)} is neither on nor off.")
    return word in _YES


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _number(low: float, high: float = math.inf) -> Callable[[object], float]:
    def parse(value: object) -> float:
        try:
            number = math.nan if isinstance(value, bool) else float(str(value))
        except ValueError:
            number = math.nan
        if math.isnan(number) or math.isinf(number):
            raise UsageError(f"{_quoted(value)} is not a number.")
        if not low <= number <= high:
            raise UsageError(f"it must be {_span(low, high)}, not {value}.")
        return number

    return parse


def _whole(low: int, high: int = 2**63 - 1) -> Callable[[object], int]:
    def parse(value: object) -> int:
        text = str(value).strip()
        if isinstance(value, bool) or not re.fullmatch(r"[+-]?[0-9]{1,20}", text):
            raise UsageError(f"{_quoted(value)} is not a whole number.")
        if not low <= int(text) <= high:
            raise UsageError(f"it must be {_span(low, high)}, not {text}.")
        return int(text)

    return parse


def _span(low: float, high: float) -> str:
    return f"at least {low:g}" if high in (math.inf, 2**63 - 1) else f"between {low:g} and {high:g}"


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{_quoted(value)} is not text.")
    return value


def _one_of(*words: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        word = str(value).strip().lower()
        if word not in words:
            raise UsageError(f"{str(value)[:40]!r} is not one of {', '.join(words)}.")
        return word

    return parse


def _size(value: object) -> MemorySize:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise UsageError(f"{value!r} is not a size.", hint="Write it like 8GiB, 8GB, 8589934592 or 50%.")
    return parse_size(value)


@dataclass(frozen=True)
class Setting:
    """One setting. Its variable is RIMURU_ and the name in capitals, its flag the name with dashes."""

    name: str
    parse: Callable[[object], Any]
    help: str
    default: str
    sampling: bool = False

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return ENV_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """The command line flag that sets it."""
        return "MODEL" if self.name == "model" else "--" + self.name.replace("_", "-")


_MODELS_OWN = "the model's own"
SETTINGS: tuple[Setting, ...] = (
    Setting("model", _text, "Model that `chat` talks to.", "rimuru-demo"),
    Setting("memory", _size, "Most memory the whole process may use.", "chosen for the model and the device"),
    Setting("context", _whole(1), "Most tokens of one conversation.", _MODELS_OWN),
    Setting("kv", _one_of("auto", "q8"), "What the conversation's keys and values are stored as.", "auto, which is what is computed with"),
    Setting("quant", _one_of("none", "int8", "int4"), "What to quantise experts to before loading them.", "none: as the files have them"),
    Setting("system", _text, "System prompt.", "none"),
    Setting("think", parse_switch, "Whether a model that can reason does so.", _MODELS_OWN),
    Setting("temperature", _number(0), "0 always takes the likeliest token; higher is more varied.", _MODELS_OWN, True),
    Setting("top_k", _whole(0), "Choose among this many likeliest tokens; 0 is all.", _MODELS_OWN, True),
    Setting("top_p", _number(0, 1), "Choose among the likeliest tokens that reach this probability together.", _MODELS_OWN, True),
    Setting("min_p", _number(0, 1), "Leave out tokens less likely than this share of the likeliest.", _MODELS_OWN, True),
    Setting("repetition_penalty", _number(1e-3), "Above 1, tokens already seen become less likely.", _MODELS_OWN, True),
    Setting("presence_penalty", _number(-100, 100), "Taken off once for tokens already in the answer.", _MODELS_OWN, True),
    Setting("frequency_penalty", _number(-100, 100), "Taken off for each time a token is in the answer.", _MODELS_OWN, True),
    Setting("seed", _whole(0), "Makes sampling repeatable.", "a new one for each answer", True),
    Setting("max_tokens", _whole(1), "Most tokens of one answer.", "what the context holds", True),
    Setting("profile", _text, "Hotset profile: a file, or none.", "the one recorded for the model, if any"),
    Setting("dashboard", parse_switch, "Whether `rimuru dashboard` can look on.", "on"),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}


@dataclass(frozen=True)
class Origin:
    """A value and who said so: 'flag', 'variable', 'file' or 'default', and the flag's, variable's or file's name."""

    value: Any
    source: str
    where: str | None


@dataclass(frozen=True)
class Settings:
    """All settings with their origins, and what was odd about the file."""

    origins: Mapping[str, Origin]
    warnings: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.origins[name].value

    def sampling(self) -> dict[str, Any]:
        """The sampling settings that somebody set; all others are the model's own."""
        return {s.name: self[s.name] for s in SETTINGS if s.sampling and self[s.name] is not None}


def resolve(flags: Mapping[str, object], *, file: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Bring flags, variables and the file together. A flag of None was not given; an empty variable counts as unset.

    Args:
        flags: values of flags by setting name.
        file: the TOML file; the user's own when None. It need not exist.
        environ: the environment; the process's when None.

    Raises:
        UsageError: a value is wrong, or the file cannot be read; names the flag, variable or file.
    """
    file = config_file() if file is None else file
    environ = os.environ if environ is None else environ
    table, warnings = read_file(file)
    origins: dict[str, Origin] = {}
    for setting in SETTINGS:
        value: object
        if (value := flags.get(setting.name)) is not None:
            origins[setting.name] = Origin(checked(setting, value, setting.flag), "flag", setting.flag)
        elif value := environ.get(setting.variable):
            origins[setting.name] = Origin(checked(setting, value, setting.variable), "variable", setting.variable)
        elif (value := table.get(setting.name)) is not None:
            origins[setting.name] = Origin(checked(setting, value, f"{setting.name} in {file}"), "file", str(file))
        else:
            origins[setting.name] = Origin(None, "default", None)
    return Settings(origins, warnings)


def checked(setting: Setting, value: object, place: str) -> Any:
    """Read a value; an error names the place that it stands in."""
    try:
        return setting.parse(value)
    except UsageError as error:
        raise UsageError(f"{place}: {error.what}", hint=error.hint) from error


def read_file(file: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Read the TOML file into known keys and warnings about unknown ones. A file that is not there is empty.

    Raises:
        UsageError: it cannot be read or is not TOML.
    """
    try:
        raw = tomllib.loads(file.read_bytes().decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}, ()
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 (byte {error.start}).") from error
    except ValueError as error:  # TOMLDecodeError, and integers of thousands of digits
        raise UsageError(f"{file} is not valid TOML: {error}.", hint="`rimuru config --path` prints the file's place.") from error
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}.") from error
    known: dict[str, Any] = {}
    warnings = []
    for key, value in raw.items():
        name = key.replace("-", "_")
        if name in BY_NAME:
            known[name] = value
        else:
            close = get_close_matches(name, BY_NAME, n=1)
            warnings.append(f"{file}: unknown setting {key!r}" + (f"; did you mean {close[0]!r}?" if close else "."))
    return known, tuple(warnings)


def config_file() -> Path:
    """The user's settings file. RIMURU_HOME moves it together with everything else."""
    from rimuru_cli.hub.paths import config_dir

    return config_dir() / "config.toml"


def describe(settings: Settings) -> list[dict[str, Any]]:
    """One row a setting: name, value (JSON-able, sizes in bytes or as a share), the value in words, source, where, variable, flag, help."""
    rows = []
    for setting in SETTINGS:
        origin = settings.origins[setting.name]
        value = origin.value
        if isinstance(value, MemorySize):
            value = value.num_bytes if value.num_bytes is not None else str(value)
        rows.append(
            {
                "name": setting.name,
                "value": value,
                "shown": _in_words(setting, value),
                "source": origin.source,
                "where": origin.where,
                "variable": setting.variable,
                "flag": setting.flag,
                "help": setting.help,
            }
        )
    return rows


def _in_words(setting: Setting, value: object) -> str:
    if value is None:
        return f"({setting.default})"
    if isinstance(value, bool):
        return "on" if value else "off"
    text = str(value).replace("\n", "\\n")
    return text if len(text) <= 60 else text[:59] + "…"
