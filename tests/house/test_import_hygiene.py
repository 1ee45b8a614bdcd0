"""Slow libraries stay out of the way: what a command imports is measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

SLOW = ["torch", "textual", "huggingface_hub", "transformers", "safetensors", "tokenizers", "triton"]


def modules_after(code: str) -> set[str]:
    """The top-level names in sys.modules of a fresh interpreter after running code."""
    probe = f"""
import sys
try:
    {code}
except SystemExit:
    pass
print("MODULES", *sorted({{name.partition(".")[0] for name in sys.modules}}))
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["chat", "--help"],
        ["run", "--help"],
        ["config", "--json"],
        ["pull", "--help"],
        ["verify", "--help"],
        ["doctor", "--help"],
        ["dashboard", "--help"],
        ["bench", "pp", "--help"],
    ],
    ids=" ".join,
)
def test_light_commands_import_nothing_slow(arguments: list[str]) -> None:
    loaded = modules_after(f"sys.argv = {['rimuru', *arguments]!r}; import rimuru_cli.main; rimuru_cli.main.main()")
    assert "typer" in loaded, "the probe did not reach the command line"
    assert loaded.isdisjoint(SLOW)


@pytest.mark.parametrize(
    "module",
    [
        "rimuru_models",
        "rimuru_kernels",
        "rimuru_models.headers",
        "rimuru_models.config",
        "rimuru_models.errors",
        "rimuru_models.tensor_map",
        "rimuru_kernels.sizes",
        "rimuru_kernels.backend",
        "rimuru_cli.engine.device.plan",
        "rimuru_cli.fit",
    ],
)
def test_reading_headers_and_dividing_memory_need_no_torch(module: str) -> None:
    assert modules_after(f"import {module}").isdisjoint(["torch", "triton", "transformers"])


def test_the_hub_needs_no_torch() -> None:
    code = """import importlib, pkgutil, rimuru_cli.hub
    for found in pkgutil.iter_modules(rimuru_cli.hub.__path__):
        importlib.import_module("rimuru_cli.hub." + found.name)"""
    assert modules_after(code).isdisjoint(["torch", "textual", "transformers"])


def test_the_engine_needs_no_user_interface_and_no_oracle() -> None:
    loaded = modules_after("import rimuru_cli.engine.engine")
    assert "torch" in loaded
    assert loaded.isdisjoint(["typer", "rich", "textual", "prompt_toolkit", "huggingface_hub", "transformers"])


@pytest.mark.parametrize("folder", ["kernels", "models"])
def test_the_checkout_is_not_a_second_copy(folder: str) -> None:
    # From the checkout's root, `import kernels` would find the folder; it must say the right name instead of loading the code twice.
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=root, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode != 0
    assert f"rimuru_{folder}" in done.stderr
