"""GGUF models side by side in one repository or folder, each quantised in another way: their names, their files, and which one is meant.

A variant is called by the quantisation in its files' names (`Q4_K_M`, `UD-Q4_K_XL`, `MXFP4`, `BF16`), else in the name of the folder that
they lie in, else by the name of its file. Nothing here uses the network.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from rimuru_cli.hub.sizes import size_in_words
from rimuru_models.errors import NotFoundError, UsageError
from rimuru_models.gguf.files import first_part, is_gguf, is_model_name, part_names, variant_stem

_LABEL = re.compile(
    r"(?<![A-Za-z0-9])(?:UD-)?(?:I?Q[1-8](?:_[A-Z0-9]+)*|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|BF16|F16|FP16|F32|FP32)(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_SHOWN = 12


class Variant(NamedTuple):
    """One GGUF model among others.

    Attributes:
        label: what to type after the colon.
        names: its files, with slashes, in the order of their parts; those that should be there.
        num_bytes: of those that are.
        missing: names of those that are not.
    """

    label: str
    names: tuple[str, ...]
    num_bytes: int
    missing: tuple[str, ...] = ()


def shown_name(repository: str, variant: str | None, revision: str | None) -> str:
    """What to type for a model of a repository: `org/name[:variant][@revision]`."""
    return repository + (f":{variant}" if variant else "") + (f"@{revision}" if revision else "")


def variants_of(files: Mapping[str, int]) -> list[Variant]:
    """All GGUF models among files (name with slashes -> bytes), by label. What accompanies a model (mmproj, imatrix) is none."""
    found: dict[str, list[Variant]] = {}
    seen: set[str] = set()
    for name in sorted(files):
        folder, slash, own = name.rpartition("/")
        first = folder + slash + first_part(own)
        # Parts without their first are a model, too: one that is not complete.
        if first in seen or own.startswith(".") or not is_model_name(first_part(own)):
            continue
        seen.add(first)
        names = tuple(folder + slash + part for part in part_names(own))
        missing = tuple(one for one in names if one not in files)
        label = _label(PurePosixPath(name))
        num_bytes = sum(files[one] for one in names if one in files)
        found.setdefault(label, []).append(Variant(label, names, num_bytes, missing))
    # Two models with one quantisation: their files' names tell them apart; those that differ in case only, their whole names.
    alone = [one if len(same) == 1 else one._replace(label=variant_stem(one.names[0])) for same in found.values() for one in same]
    shared = {label for label, count in Counter(one.label.casefold() for one in alone).items() if count > 1}
    told = [one._replace(label=one.names[0]) if one.label.casefold() in shared else one for one in alone]
    return sorted(told, key=lambda one: (one.label.lower(), one.label))


def _label(path: PurePosixPath) -> str:
    for text in (variant_stem(path.name), *reversed(path.parts[:-1])):
        labels = _LABEL.findall(text)
        if labels:
            label = str(labels[-1])
            return label.upper() if label[:2].lower() != "ud" else "UD-" + label[3:].upper()
    return variant_stem(path.name)


def gguf_files(folder: Path) -> dict[str, int]:
    """GGUF files in a folder and the folders in it: name with slashes -> bytes."""
    files: dict[str, int] = {}
    for path in folder.rglob("*"):
        if is_gguf(path):
            with contextlib.suppress(OSError):
                if path.is_file():
                    files[path.relative_to(folder).as_posix()] = path.stat().st_size
    return files


def matching(variants: Sequence[Variant], wanted: str) -> list[Variant]:
    """Those that a word means: by label or file name letter for letter, by label, by label without UD-, by a file's name, by quantisation;
    the first of these that gives any.
    """
    word = wanted.lower()

    def stems(one: Variant) -> set[str]:
        paths = [PurePosixPath(name) for name in one.names]
        return {name.lower() for path in paths for name in (str(path), path.name, variant_stem(path.name))}

    keys: tuple[Callable[[Variant], bool], ...] = (
        lambda one: wanted in (one.label, *one.names),
        lambda one: one.label.lower() == word,
        lambda one: one.label.lower().removeprefix("ud-") == word,
        lambda one: word in stems(one),
        lambda one: _label(PurePosixPath(one.names[0])).lower() == word,
    )
    return next((found for key in keys if (found := [one for one in variants if key(one)])), [])


def choose(shown: str, variants: Sequence[Variant], wanted: str | None) -> Variant:
    """The variant that is meant.

    Args:
        shown: `org/name` or a folder, for errors.
        variants: what there is; at least one.
        wanted: what was typed after the colon; None: the only one.

    Raises:
        NotFoundError: there is none of this name; lists what there is.
        UsageError: several are meant.
    """
    found = list(variants) if wanted is None else matching(variants, wanted)
    if len(found) == 1:
        return found[0]
    example = f"{shown}:{(found or variants)[0].label}"
    if not found:
        raise NotFoundError(f"{shown} has no {wanted}; there are {in_words(variants)}.", hint=f"name one of them, for one {example}")
    what = "holds several quantisations" if wanted is None else f"has several models that {wanted} can mean"
    raise UsageError(f"{shown} {what}: {in_words(found)}.", hint=f"name one of them, for one {example}")


def in_words(variants: Iterable[Variant]) -> str:
    """Variants with their sizes: "Q4_0 (16.2 GiB), Q8_0 (30.3 GiB)"."""
    listed = [f"{one.label} ({size_in_words(one.num_bytes)})" for one in variants]
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more
