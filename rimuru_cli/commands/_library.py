"""How the models on this machine are laid out for people: `list`, `show` and `rm`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rimuru_cli.commands._tables import parameters_in_words
from rimuru_cli.output import Output, display_width, format_bytes, format_share, is_terminal, table, terminal_columns
from rimuru_models.errors import RimuruError, UsageError
from rimuru_models.headers import DTYPE_BITS
from rimuru_models.quantization.precision import Precision

if TYPE_CHECKING:
    from rimuru_cli.hub.inspection import Inspection
    from rimuru_cli.hub.library import LibraryModel
    from rimuru_cli.hub.removal import Removal

_LONG_AGO_DAYS = 60
_SHORT_CHECKSUM = 12
_FIRST_TO_GO = ("hotset", "architecture", "last used", "precision")


def print_models(models: Sequence[LibraryModel], cache: Path, out: Output, *, everything: bool) -> None:
    """Print a table of models; `everything` adds what cannot be run."""
    shown = [model for model in models if everything or model.status != "unusable"]
    hidden = len(models) - len(shown)
    if out.json:
        out.emit({"models": [model_values(model) for model in shown], "not_shown": hidden, "cache": str(cache)})
        return
    if shown:
        out.line(_fitting_table([_row(model) for model in shown], terminal_columns(out.stdout) if is_terminal(out.stdout) else None))
    else:
        _print_nothing_here(cache, out)
    if any(model.status == "ready" for model in shown):
        out.note("Keys and values (KV) are F32 on a CPU and the model's own numbers on a GPU, or take 8 bits (--kv q8).", "dim")
    for model in shown:
        if model.status == "incomplete":
            ways = {"demo": "rimuru chat builds it again", "copy": "the command that began it goes on with it"}
            what = ways.get(model.kind, f"rimuru pull {model.name} goes on with it")
            out.note(f"{model.name} is incomplete: {what}.", "yellow")
    if hidden:
        out.note(f"{_plural(hidden, 'more model')} that rimuru cannot run: rimuru list --all", "dim")


def model_values(model: LibraryModel) -> dict[str, Any]:
    """A model as JSON."""
    look = model.inspection
    return {
        "name": model.name,
        "kind": model.kind,
        "path": str(model.path),
        "revision": model.revision,
        "variant": model.variant,
        "refs": list(model.refs),
        "size_bytes": model.size_bytes,
        "unfinished_bytes": model.unfinished_bytes,
        "architecture": look.architecture,
        "precision": look.precision,
        "dense_precision": look.dense,
        "kv_precision": _kv_precision(look),
        "experts": None if look.config is None else look.config.num_experts,
        "top_k": None if look.config is None else look.config.top_k,
        "last_used": None if model.last_used is None else model.last_used.isoformat(timespec="seconds"),
        "hotset_profile": model.profile is not None,
        "status": model.status,
        "usable": model.status == "ready",
        "why_not": look.why_not,
    }


def _precision(look: Inspection) -> str:
    """Of the experts, and of the dense part where that is kept otherwise."""
    if look.precision is None or look.dense is None:
        return look.precision or "-"
    return Precision(look.precision, look.dense).words()


def _kv_precision(look: Inspection) -> dict[str, str] | None:
    """What keys and values are stored as unless 8 bits are asked for, by device; None where that is not known."""
    if look.config is None:
        return None
    own = next((name for name in (look.dense, look.precision) if name in ("F32", "F16", "BF16")), "BF16")
    return {"cpu": "F32", "gpu": own}


def _fitting_table(rows: Sequence[Mapping[str, str]], columns: int | None) -> str:
    """A table of models no wider than a terminal of so many columns (None: as wide as it likes): what matters least is left out."""
    headers = list(rows[0])
    while True:
        text = table(headers, [[row[header] for header in headers] for row in rows])
        if columns is None or max(map(display_width, text.splitlines())) <= columns:
            return text
        spare = [header for header in _FIRST_TO_GO if header in headers]
        if not spare:
            return "\n".join(f"{row['model']}\n  {row['size']}, {row['state']}" for row in rows)
        headers.remove(spare[0])


def _row(model: LibraryModel) -> dict[str, str]:
    look = model.inspection
    state = "ready" if model.status == "ready" else f"{model.status}: {look.why_not}"
    if model.unfinished_bytes:
        state += f"; {format_bytes(model.unfinished_bytes)} of an unfinished download"
    architecture = (look.architecture or "-").removesuffix("ForCausalLM")
    profile = "yes" if model.profile is not None else "no"
    return {
        "model": model.name,
        "size": format_bytes(model.size_bytes),
        "precision": _precision(look),
        "architecture": architecture,
        "last used": age(model.last_used),
        "hotset": profile,
        "state": state,
    }


def _print_nothing_here(cache: Path, out: Output) -> None:
    from rimuru_cli.hub.embedded import SUGGESTED_MODELS

    out.line("No models yet.")
    out.note(f"Looked in {cache} and in rimuru's own folder.", "dim")
    out.note("rimuru chat                builds a small demonstration model and talks with it")
    for model in SUGGESTED_MODELS:
        out.note(f"rimuru pull {model.name}   downloads {model.size_gb} GB; `rimuru fit {model.name}` says first whether it runs here")


def age(moment: datetime | None, now: datetime | None = None) -> str:
    """How long ago a moment was: "3 h ago", "2 days ago", a date when it is long ago; "-" for None."""
    if moment is None:
        return "-"
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    if seconds < 60:
        return "just now"
    for unit, size, limit in (("min", 60, 60), ("h", 3600, 24), ("day", 86400, _LONG_AGO_DAYS)):
        count = int(seconds // size)
        if count < limit:
            return f"{_plural(count, unit) if unit == 'day' else f'{count} {unit}'} ago"
    return moment.astimezone().date().isoformat()


def print_model(facts: Mapping[str, Any], out: Output) -> None:
    """Print what a model is made of."""
    if out.json:
        out.emit(facts)
        return
    lines = _identity_lines(facts) + _shape_lines(facts)
    width = max(len(label) for label, _ in lines)
    for label, text in lines:
        out.line(f"{label.ljust(width)}  {text}")
    out.line()
    total = facts["bytes"]
    parts = [[part, format_bytes(size), format_share(size / total if total else None)] for part, size in facts["bytes_by_part"].items()]
    out.line(table(["part", "bytes", "share"], parts))
    for line in (*facts["not_used"], *facts["notices"]):
        out.note(f"note: {line}", "dim")
    out.line()
    out.line(_page_table(facts))
    out.line()
    _print_profile(facts, out)
    rows = [[file["name"], format_bytes(file["bytes"]), file["sha256"] or "-"] for file in facts["files"]]
    files = table(["file", "bytes", "sha256"], rows)
    if is_terminal(out.stdout) and max(map(display_width, files.splitlines())) > terminal_columns(out.stdout):
        files = table(["file", "bytes", "sha256"], [[*row[:2], row[2][:_SHORT_CHECKSUM]] for row in rows])
    out.line(files)


def _identity_lines(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    places = {
        "demo": "built by rimuru",
        "cache": "in the shared cache",
        "folder": "local folder",
        "hub": "on the hub, not (or not all of it) downloaded",
    }
    place = places[facts["place"]] + (f": {facts['path']}" if facts["path"] else "")
    lines = [("model", facts["name"]), ("where", place)]
    if facts["revision"] is not None:
        lines.append(("revision", facts["revision"]))
    lines.append(("licence", facts["licence"] or "its files do not say"))
    return lines


def _shape_lines(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    layers = f"{facts['layers']}, {facts['moe_layers']} of them with experts"
    if facts["recurrent_layers"]:
        layers += f", {facts['attention_layers']} with attention, {facts['recurrent_layers']} recurrent"
    shared = f", and a shared expert of {facts['shared_intermediate']}" if facts["shared_intermediate"] else ""
    return [
        ("architecture", facts["architecture"]),
        ("precision", Precision(facts["precision"], facts["dense_precision"]).words()),
        ("parameters", parameters_in_words(facts["parameters"])),
        ("layers", layers),
        ("experts", f"{facts['experts']} a layer, {facts['top_k']} a token, {facts['expert_intermediate']} wide{shared}"),
        ("hidden size", str(facts["hidden_size"])),
        ("attention", f"{facts['heads']} heads over {facts['kv_heads']} of {facts['head_dim']}"),
        ("context", f"{facts['context']:,} tokens"),
        ("vocabulary", f"{facts['vocab_size']:,} tokens"),
    ]


def _page_table(facts: Mapping[str, Any]) -> str:
    """Pages on a GPU and on a CPU side by side; where no geometry holds the model there is no column."""
    plain = facts["precision"] in DTYPE_BITS  # packed experts are the same on both
    places = {"gpu": f"GPU ({facts['precision']})", "cpu": "CPU (F32)"} if plain else {"gpu": "GPU", "cpu": "CPU"}
    columns = {words: facts["pages"][name] for name, words in places.items() if facts["pages"][name] is not None}
    if not columns:
        return "No page size holds this model's experts."
    names = [
        ("P_e, expert page", "P_e"),
        ("P_s, recurrent state", "P_s"),
        ("P_h, huge page", "P_h"),
        ("one expert", "expert_bytes"),
        ("KV cache a token", "kv_bytes_per_token"),
        ("... with --kv q8", "kv_q8_bytes_per_token"),
        ("states of a conversation", "state_bytes_per_sequence"),
        ("tokens of a KV page", "block_tokens"),
    ]
    shown = [(label, key) for label, key in names if any(pages[key] for pages in columns.values())]
    kinds = [pages["kv_precision"] for pages in columns.values()]
    rows = [[label, *(f"{pages[key] or 0:,}" for pages in columns.values())] for label, key in shown]
    uneven = any(pages["layer_tiles"] for pages in columns.values())
    rows.append(["tiles of gate, up, down" if uneven else "tiles of a projection", *(_tiles(pages) for pages in columns.values())])
    return table(["bytes in memory", *columns], [*rows, ["KV cache stored as", *kinds]])


def _tiles(pages: Mapping[str, Any]) -> str:
    """Into how many row tiles projections are cut: one number, or all that there are where layers or projections differ."""
    if pages["layer_tiles"] is None:
        return f"{pages['tiles_per_projection']:,}"
    kinds = sorted({(layer["gate"], layer["up"], layer["down"]) for layer in pages["layer_tiles"]})
    return " or ".join(", ".join(map(str, kind)) for kind in kinds)


def _print_profile(facts: Mapping[str, Any], out: Output) -> None:
    profile = facts["profile"]
    if profile is None:
        out.line("hotset profile: none (rimuru profile-hotset records one)")
    else:
        covered = ", ".join(
            f"{format_share(row['share_of_selections'])} of selections in {format_share(row['share_of_experts'])} of experts"
            for row in profile["coverage"]
        )
        out.line(f"hotset profile: {profile['tokens']:,} tokens, {profile['created'][:10]}; {covered}")
    out.line()


def agree_to_remove(removal: Removal, out: Output, *, yes: bool) -> None:
    """Ask before deleting.

    Raises:
        UsageError: nobody can be asked, and --yes was not given.
        RimuruError: the answer was no.
    """
    if yes:
        return
    if out.json or not is_terminal(sys.stdin) or not is_terminal(out.stderr):
        raise UsageError(f"{_what(removal)}. Nobody can be asked here, so nothing was deleted.", hint="add --yes to delete it")
    for line in _removal_lines(removal, done=False):
        out.note(line)
    out.write_note("Delete? [y/N] ")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RimuruError("Nothing was deleted.")


def print_removal(removal: Removal, out: Output, *, done: bool) -> None:
    """Say what was deleted, or what would be."""
    if out.json:
        out.emit(
            {
                "deleted": done,
                "models": [
                    {"name": model.name, "revision": model.revision, "path": str(model.path), "size_bytes": model.size_bytes}
                    for model in removal.models
                ],
                "freed_bytes": removal.freed_bytes,
                "kept_bytes": removal.kept_bytes,
                "folders": [str(folder) for folder in removal.folders],
            }
        )
        return
    for line in _removal_lines(removal, done=done):
        out.line(line)


def _removal_lines(removal: Removal, *, done: bool) -> list[str]:
    verb = "Deleted" if done else "Would delete"
    lines = [f"{verb} {model.name}{f' ({model.revision[:12]})' if model.revision else ''}: {model.path}" for model in removal.models]
    lines.append(f"{'Freed' if done else 'Would free'} {format_bytes(removal.freed_bytes)}.")
    if removal.kept_bytes:
        lines.append(f"{format_bytes(removal.kept_bytes)} {'stay' if not done else 'stayed'}: other revisions or models share these files.")
    if any(model.profile is not None for model in removal.models):
        lines.append("Its hotset profile stays.")
    return lines


def _what(removal: Removal) -> str:
    names = removal.models[0].name if len(removal.models) == 1 else f"{removal.models[0].repository} ({len(removal.models)} revisions)"
    return f"Deleting {names} frees {format_bytes(removal.freed_bytes)}"


def _plural(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
