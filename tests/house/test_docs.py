"""The documents name what exists: files in the tree, commands, flags, exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rimuru_cli import __version__
from rimuru_cli.settings import BY_NAME
from rimuru_models import errors

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/glossary.md"]


def code_lines() -> list[str]:
    """Indented lines and inline code of the README."""
    return [line.strip() for line in README.splitlines() if line.startswith("    ")] + re.findall(r"`([^`]+)`", README)


def commands() -> list[str]:
    """Every `rimuru …` command line in the README, up to a comment, pipe or redirection."""
    pattern = re.compile(r"(?:^|[|/] ?|&& ~/\.local/bin/)rimuru ([a-z][^|<#]*)")
    return [re.split(r"\s{2,}", match.group(1).strip())[0] for line in code_lines() for match in pattern.finditer(line)]


def help_of(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rimuru_cli", *words, "--help"],
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, f"rimuru {' '.join(words)} --help: {done.stderr}"
    return done.stdout


def tree_paths() -> list[str]:
    """Paths named by the tree in the README."""
    tree = README.partition("<!-- tree -->")[2].partition("<!-- /tree -->")[0]
    folders: list[str] = []
    paths = []
    for line in tree.splitlines():
        match = re.match(r"    ([│├└─ ]*)(\S+)", line)
        if not match or match.group(2) == "rimuru/":
            continue
        depth = len(match.group(1)) // 4
        folders = [*folders[: depth - 1], match.group(2)]
        paths.append("".join(folders))
    return paths


def test_the_tree_names_what_exists() -> None:
    paths = tree_paths()
    assert len(paths) > 40
    missing = [path for path in paths if not (ROOT / path).exists() or path.endswith("/") != (ROOT / path).is_dir()]
    assert not missing


def test_the_tree_names_every_room_and_model() -> None:
    named = set(tree_paths())
    rooms = {
        f"{path.parent.relative_to(ROOT).as_posix()}/"
        for top in ("kernels", "models", "rimuru_cli")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert rooms <= named
    assert {f"rimuru_cli/{path.name}" for path in (ROOT / "rimuru_cli").glob("[a-z]*.py")} <= named
    from rimuru_models import ARCHITECTURES

    assert {f"models/{module.rpartition('.')[2]}.py" for module in ARCHITECTURES.values()} <= named


def test_the_two_setup_commands_are_there() -> None:
    lines = README.splitlines()
    assert "    ./install.sh && ~/.local/bin/rimuru chat" in lines
    assert "    ./install.sh --dev && make test" in lines


def test_commands_and_their_flags_exist() -> None:
    words = {" ".join(re.findall(r"^(?:bench )?[a-z-]+", command)) for command in commands()}
    assert {
        "chat",
        "run",
        "profile-hotset",
        "bench allocator",
        "bench decode",
        "bench pp",
        "bench kernels",
        "bench link",
        "doctor",
        "config",
    } <= words
    helps = {word: help_of(*word.split()) for word in sorted(words)}
    for command in commands():
        word = re.findall(r"^(?:bench )?[a-z-]+", command)[0]
        for flag in re.findall(r"(?<!\S)--[a-z-]+", command):
            assert flag in helps[word], f"rimuru {command}"


def test_every_command_is_in_the_readme() -> None:
    listed = set(re.findall(r"^[│|] ([a-z][a-z-]+) ", help_of(), flags=re.MULTILINE))
    assert "chat" in listed, "the help's form has changed"
    assert {name for name in listed if not any(command.startswith(name) for command in commands())} == set()


def test_settings_in_the_readme_exist() -> None:
    example = README.partition("it is TOML:")[2].partition("`RIMURU_HOME`")[0]
    assert set(tomllib.loads("\n".join(line.strip() for line in example.splitlines()))) <= set(BY_NAME)


def test_exit_codes_are_those_of_the_program() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", README, flags=re.MULTILINE)}
    ours = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RimuruError)}
    assert listed == ours | {0, 130}


def test_changelog_has_this_version() -> None:
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_named_in_documents_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    bases = [
        ROOT,
        ROOT / "rimuru_cli",
        ROOT / "rimuru_cli/engine",
        ROOT / "rimuru_cli/engine/memory",
        ROOT / "rimuru_cli/chat",
        ROOT / "models",
    ]
    made_up = {"kernels/softcap/", "softcap", "prompt.txt", "talk.json", "my-model"}
    for path in re.findall(r"`([\w./-]+(?:/|\.(?:py|md|toml|txt|sh)))`", text):
        if any(word in path for word in made_up) or path in ("reference.py", "kernel.py", "__init__.py"):
            continue
        assert any((base / path).exists() for base in bases), f"{name} names {path}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_lines_fit_a_screen(name: str) -> None:
    long = [line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if len(line) > 150]
    assert not long
