"""Which files of a repository are a model, and whether their names may be written to a disk at all. Nothing here uses the network."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rimuru_cli.hub.variants import choose, variants_of
from rimuru_models.errors import CheckpointError, NotFoundError

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
COMMIT = re.compile(r"[0-9a-f]{40}")
"""A full commit."""

_PLAIN = {
    CONFIG,
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "hf_quant_config.json",
    "quantize_config.json",
}
_PATTERNS = (re.compile(r"additional_chat_templates/[^/]+\.jinja"), re.compile(r"(?i:licen[cs]e|notice|copying|use_policy)(?:[._-][^/]*)?"))
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Root files of these kinds are looked at closely even when they are not taken: whoever sends such a name means no good.
_WATCHED = (".safetensors", ".json", ".jinja", ".txt", ".model")
_RESERVED = re.compile(r"(?:con|prn|aux|nul|conin\$|conout\$|com[0-9¹²³]|lpt[0-9¹²³])(?:\..*)?", re.IGNORECASE)
_DRIVE = re.compile(r"[A-Za-z]:")
_FORBIDDEN = re.compile(r'[<>:"|?*\\]')
_LONGEST_NAME, _LONGEST_PATH = 255, 1024
_ANOTHER = "look for a repository that has config.json and *.safetensors side by side"


@dataclass(frozen=True)
class RemoteFile:
    """One file of a commit.

    Attributes:
        name: its path in the repository, with slashes.
        num_bytes: its size.
        etag: what the cache calls its content: the sha256 of large (LFS) files, git's own sha1 of the others; lower-case hex.
    """

    name: str
    num_bytes: int
    etag: str


@dataclass(frozen=True)
class Selection:
    """What `pull` takes of a repository.

    Attributes:
        weights: safetensors files, sorted by name (with `needs_index` not known until the index has been read), or the parts of a GGUF
            model.
        others: config, tokenizer, templates, licence, index; sorted by name.
        needs_index: whether the index says which of `weights` count.
        variant: what the GGUF model is called among others of its repository; None: safetensors.
    """

    weights: tuple[RemoteFile, ...]
    others: tuple[RemoteFile, ...]
    needs_index: bool
    variant: str | None = None

    @property
    def files(self) -> tuple[RemoteFile, ...]:
        """All files, small ones first."""
        return self.others + self.weights

    def narrowed(self, shards: Iterable[str]) -> Selection:
        """The selection with exactly these weights, those that the index names.

        Raises:
            CheckpointError: the repository lacks one of them.
        """
        by_name = {file.name: file for file in self.weights}
        wanted = sorted(set(shards))
        missing = [name for name in wanted if name not in by_name]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(f"{INDEX} names {missing[0]!r}{more}, which the repository does not have.")
        return Selection(tuple(by_name[name] for name in wanted), self.others, False)


def select(repository: str, files: Sequence[RemoteFile], variant: str | None = None) -> Selection:
    """Choose what `pull` takes: safetensors weights, config, tokenizer, templates, licence; or a GGUF model and its licence.

    Safetensors lie in the root and are chosen as the loader does: model.safetensors, else what the index names, else every *.safetensors.
    GGUF models may lie in folders; one is taken if it was named, or if it is all there is.

    Args:
        variant: which GGUF model; None: safetensors, else the only GGUF model.

    Raises:
        CheckpointError: a name that must not be written, no config.json, or no weights (pickles are refused).
        NotFoundError: no GGUF model of this name.
        UsageError: several GGUF models, and none was named.
    """
    names = [file.name for file in files]
    check_names(repository, names)
    plain = any("/" not in name and name.endswith(".safetensors") and not name.startswith(".") for name in names)
    if variant is not None or not plain:
        gguf = _select_gguf(repository, files, variant)
        if gguf is not None:
            return gguf
    others = [file for file in files if file.name in _PLAIN or any(pattern.fullmatch(file.name) for pattern in _PATTERNS)]
    weights = [file for file in files if "/" not in file.name and file.name.endswith(".safetensors") and not file.name.startswith(".")]
    if not weights:
        raise _no_weights(repository, names)
    if CONFIG not in names:
        raise CheckpointError(
            f"{repository} has no {CONFIG}, so it is not a whole model (an adapter, or another kind of repository).",
            hint="pull the model that it belongs to",
        )
    index = next((file for file in files if file.name == INDEX), None)
    single = [file for file in weights if file.name == SINGLE]
    if single:
        weights, index = single, None
    elif index is not None:
        others.append(index)

    def by_name(file: RemoteFile) -> str:
        return file.name

    return Selection(tuple(sorted(weights, key=by_name)), tuple(sorted(others, key=by_name)), index is not None)


def _select_gguf(repository: str, files: Sequence[RemoteFile], wanted: str | None) -> Selection | None:
    """The parts of one GGUF model and the licence; None where there is none and none was asked for."""
    by_name = {file.name: file for file in files}
    variants = variants_of({file.name: file.num_bytes for file in files})
    if not variants:
        if wanted is None:
            return None
        raise NotFoundError(f"{repository} has no GGUF files, so it has no {wanted}.", hint=f"`rimuru pull {repository}` takes it as it is")
    chosen = choose(repository, variants, wanted)
    if chosen.missing:
        raise CheckpointError(f"{repository} lacks {chosen.missing[0]}, a part of {chosen.label}.", hint="report it to whoever made it")
    for name in chosen.names:
        trouble = _unportable(name) or _taken_for_one(name, by_name)
        if trouble is not None:
            raise _hostile(repository, name, trouble)
    licences = sorted((file for file in files if _PATTERNS[1].fullmatch(file.name)), key=lambda file: file.name)
    return Selection(tuple(by_name[name] for name in chosen.names), tuple(licences), False, chosen.label)


def _taken_for_one(name: str, others: Iterable[str]) -> str | None:
    """Two GGUF files that differ in case only: where case does not count, one would overwrite the other."""
    same = unicodedata.normalize("NFC", name).casefold()
    twin = next((other for other in others if other != name and unicodedata.normalize("NFC", other).casefold() == same), None)
    return None if twin is None else f"differs from {twin!r} in case only"


def _no_weights(repository: str, names: Sequence[str]) -> CheckpointError:
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        return CheckpointError(
            f"{repository} has only pickled weights ({pickles[0]}), which can run any code when they are loaded; they are refused.",
            hint="look for a repository with the safetensors version of this model",
        )
    inner = sorted(name for name in names if name.endswith(".safetensors"))
    if inner:
        return CheckpointError(
            f"{repository} has weights in subfolders only ({inner[0]}), so it is not a language model that can be loaded.",
            hint=_ANOTHER,
        )
    return CheckpointError(f"{repository} has no *.safetensors weights.", hint=_ANOTHER)


def check_names(repository: str, names: Sequence[str]) -> None:
    """Refuse a repository whose file names would leave its folder, or mean something else on some system.

    Names that leave the folder are refused anywhere; what only some systems trip over (CON, a colon, a final dot, two names that differ in
    case) is refused for files of the kinds that are taken.

    Raises:
        CheckpointError: names the file and what is wrong with it.
    """
    seen: dict[str, str] = {}
    for name in names:
        trouble = _leaves_the_folder(name)
        watched = name in _PLAIN or any(pattern.fullmatch(name) for pattern in _PATTERNS)
        watched = watched or ("/" not in name and name.lower().endswith(_WATCHED))
        if trouble is None and watched:
            trouble = _unportable(name)
            key = unicodedata.normalize("NFC", name).casefold()
            if trouble is None and key in seen:
                trouble = f"differs from {seen[key]!r} in case only"
            seen[key] = name
        if trouble is not None:
            raise _hostile(repository, name, trouble)


def _hostile(repository: str, name: str, trouble: str) -> CheckpointError:
    return CheckpointError(
        f"{repository} has a file named {name[:120]!r}, which {trouble}; nothing of this repository is written.",
        hint="report the repository to the hub it comes from",
    )


def _leaves_the_folder(name: str) -> str | None:
    parts = name.replace("\\", "/").split("/")
    if not name or len(name) > _LONGEST_PATH:
        return "is empty or far too long"
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
        return "has control characters in it"
    if parts[0] == "" or _DRIVE.match(name):
        return "is an absolute path"
    if any(part in ("", ".", "..") for part in parts):
        return "leaves the model's folder"
    return None


def _unportable(name: str) -> str | None:
    for part in name.split("/"):
        if _FORBIDDEN.search(part):
            return "has a character that not every system allows in a file name"
        if part.endswith((".", " ")) or part.startswith(" "):
            return "begins or ends with a space or a dot, which some systems drop"
        if _RESERVED.fullmatch(part):
            return "is the name of a device on Windows"
        if len(part.encode("utf-8")) > _LONGEST_NAME:
            return "is too long"
    return None
