"""Where rimuru keeps its files: three folders per user, or everything below RIMURU_HOME when that is set."""

from __future__ import annotations

import os
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


def config_dir() -> Path:
    """The folder of the TOML settings file. Not created here."""
    home = home_override()
    return home / "config" if home else platformdirs.user_config_path(APP_NAME, appauthor=False)
