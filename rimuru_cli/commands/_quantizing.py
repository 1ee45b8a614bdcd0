"""What `rimuru quantize` prints."""

from __future__ import annotations

from pathlib import Path

from rimuru_cli.hub.library import files_below, size_on_disk
from rimuru_cli.output import Output, format_bytes
from rimuru_models.index import read_json_file
from rimuru_models.quantizer.layout import Recipe


def _group_of(folder: Path) -> int:
    """Weights that share a scale, as the copy's own config.json says."""
    config = read_json_file(folder / "config.json")
    assert isinstance(config, dict), "it has just been written"
    return int(config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"])


def print_copy(name: str, original: Path, folder: Path, recipe: Recipe, out: Output, *, was_there: bool, chosen: bool) -> None:
    """The folder and its size, and what to type next. `chosen`: the person named the folder."""
    group = _group_of(folder)
    before, after = (size_on_disk(files_below(place)) for place in (original, folder))
    method = "least squares, rounding errors made up for over a calibration text" if recipe.feedback else "least squares"
    if out.json:
        out.emit(
            {
                "model": name,
                "to": recipe.name,
                "group": group,
                "asked_group": recipe.group,
                "method": method,
                "folder": str(folder),
                "name": None if chosen else folder.name,
                "size_bytes": after,
                "original_bytes": before,
                "was_there": was_there,
            }
        )
        return
    out.line(str(folder))
    state = "was there already" if was_there else "is ready"
    out.note(f"{name} at {recipe.name} {state}: {format_bytes(after)} instead of {format_bytes(before)} ({method}).")
    if group != recipe.group:
        out.note(
            f"Groups of {group} weights share a scale, not of {recipe.group}: they have to fill all rows of this model's experts exactly."
        )
    typed = f"'{folder}'" if chosen and " " in str(folder) else str(folder) if chosen else folder.name
    out.note(f"Talk with it: rimuru chat {typed}")
