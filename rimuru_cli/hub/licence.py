"""Which licence a model comes under, as far as its own files say: the card's front matter, or the text of its licence file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

# A phrase of the text, in any case and with any white space between its words -> how the licence is called.
_TEXTS = (
    (r"Apache License,? (?:Version )?2\.0", "Apache-2.0"),
    (r"Permission is hereby granted, free of charge, to any person obtaining a copy of this software", "MIT"),
    (r"Llama\s+(?P<version>[\d.]+)\s+Community License", "Llama {version} Community License"),
    (r"Gemma Terms of Use", "Gemma Terms of Use"),
    (r"Qwen(?:\s+\w+)? LICENSE AGREEMENT", "Qwen licence agreement"),
    (r"Creative Commons Attribution-NonCommercial 4\.0", "CC-BY-NC-4.0"),
    (r"Creative Commons Attribution 4\.0", "CC-BY-4.0"),
    (r"GNU GENERAL PUBLIC LICENSE\s+Version 3", "GPL-3.0"),
)
_FRONT_MATTER = re.compile(r"\A---\r?\n(?P<body>.*?)\r?\n---\s*$", re.DOTALL | re.MULTILINE)
_FIELD = re.compile(r"^(?P<name>license|license_name)[ \t]*:[ \t]*[\"']?(?P<value>[A-Za-z0-9][\w.+ -]{0,79}?)[\"']?[ \t]*$", re.MULTILINE)
_FILE = re.compile(r"licen[cs]e(?:[._-][^/]*)?", re.IGNORECASE)
_MOST_BYTES = 1 << 16
_LONGEST = 80


def licence_of_folder(folder: Path) -> str | None:
    """The licence of a model's folder; None when none of its files says."""
    card = _read(folder / "README.md")
    named = None if card is None else licence_of_card(card)
    if named is not None:
        return named
    try:
        files = sorted(path for path in folder.iterdir() if is_licence_file(path.name))
    except OSError:
        return None
    return next((name for path in files if (text := _read(path)) is not None and (name := licence_of_text(text)) is not None), None)


def is_licence_file(name: str) -> bool:
    """Whether a file of this name holds a licence."""
    return _FILE.fullmatch(name) is not None


def licence_of_card(text: str) -> str | None:
    """What the front matter of a model card names."""
    matter = _FRONT_MATTER.match(text.lstrip("\ufeff"))
    if matter is None:
        return None
    fields: Mapping[str, str] = {match["name"]: match["value"] for match in _FIELD.finditer(matter["body"])}
    value = fields.get("license")
    return fields.get("license_name", value) if value == "other" else value


def licence_of_text(text: str) -> str | None:
    """A licence by its text; one that is not known by its first line; None without any text."""
    for pattern, name in _TEXTS:
        match = re.search(pattern.replace(" ", r"\s+"), text, re.IGNORECASE)
        if match is not None:
            return name.format(**match.groupdict())
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return next((line[:_LONGEST] for line in lines if line), None)


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
