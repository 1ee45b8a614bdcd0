"""Where rimuru keeps its files: a few folders per user, or everything below RIMURU_HOME when that is set."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import platformdirs

APP_NAME = "rimuru"


def home_override() -> Path | None:
    """The folder named by RIMURU_HOME, absolute and with ~ expanded; None when the variable is unset or empty."""
    value = os.environ.get("RIMURU_HOME", "")
    return Path(os.path.abspath(Path(value).expanduser())) if value else None


def cache_dir() -> Path:
    """What can be made again: the built demonstration model. Not created here."""
    home = home_override()
    return home / "cache" if home else platformdirs.user_cache_path(APP_NAME, appauthor=False)


def data_dir() -> Path:
    """What a person made and would miss: hotset profiles, chat history, saved conversations. Not created here."""
    home = home_override()
    return home / "data" if home else platformdirs.user_data_path(APP_NAME, appauthor=False)


def profiles_dir() -> Path:
    """Hotset profiles, one file a model. Not created here."""
    return data_dir() / "profiles"


def quantized_dir() -> Path:
    """Quantised copies of models, a folder each. Not created here."""
    return data_dir() / "quantized"


def config_dir() -> Path:
    """The folder of the TOML settings file. Not created here."""
    home = home_override()
    return home / "config" if home else platformdirs.user_config_path(APP_NAME, appauthor=False)


def runtime_dir() -> Path:
    """Where running engines and dashboards of one user meet; emptied by the system or by the next engine. Not created here.

    The session's own folder if the system keeps one (in memory, gone after logging out). Else one with the user's number in its name: in
    memory where there is such a place, since a disk would be written to all the time, or among the temporary files.
    """
    home = home_override()
    if home:
        return home / "run"
    if not hasattr(os, "getuid"):
        return platformdirs.user_runtime_path(APP_NAME, appauthor=False)
    for folder in (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{os.getuid()}"):
        if folder and _usable(folder) and os.stat(folder).st_uid == os.getuid():
            return Path(folder) / APP_NAME
    shared = "/dev/shm" if _usable("/dev/shm") else tempfile.gettempdir()
    return Path(shared) / f"{APP_NAME}-{os.getuid()}"


def _usable(folder: str) -> bool:
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)
