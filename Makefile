# `./install.sh --dev` makes the environment that these targets use. VENV=/other/venv overrides it.
VENV ?= .venv
BIN := $(VENV)/bin
SHELL := /bin/bash
PACKAGES := rimuru_kernels rimuru_models rimuru_cli
CODE := kernels models rimuru_cli tests
# Two processes: torch takes seconds to import and most tests use one thread.
PYTEST_ARGS ?= -n 2

.PHONY: check lint format typing types imports shell test demo-recording picture elasticity wheel venv
.DEFAULT_GOAL := check

check: lint types imports shell test  ## everything that must pass before a commit

venv:
	@test -x "$(BIN)/python" || { echo "There is no $(VENV). Type: ./install.sh --dev" >&2; exit 1; }

lint: venv  ## formatting and style
	"$(BIN)/ruff" format --check $(CODE)
	"$(BIN)/ruff" check $(CODE)

format: venv  ## rewrite files in the house's format
	"$(BIN)/ruff" format $(CODE)
	"$(BIN)/ruff" check --fix $(CODE)

typing: .typing/rimuru_kernels .typing/rimuru_models .typing/rimuru_cli  ## links through which mypy finds the renamed folders

.typing/%:
	@mkdir -p .typing
	@ln -sfn ../$(patsubst rimuru_kernels,kernels,$(patsubst rimuru_models,models,$*)) $@

types: venv typing  ## mypy, strict
	"$(BIN)/mypy"

imports: venv  ## the staircase of imports
	"$(BIN)/lint-imports"

shell: venv  ## install.sh and the CI script
	"$(BIN)/shellcheck" install.sh .ci/run

test: venv  ## the tests; PYTEST_ARGS="-x tests/engine" narrows them
	@"$(BIN)/python" -m pytest $(PYTEST_ARGS)

demo-recording: venv  ## the dashboard's demonstration: records a real chat, about two minutes on an idle machine
	"$(BIN)/python" tests/support/record_demo.py rimuru_cli/engine/telemetry/demo.rimurec

picture: venv  ## docs/dashboard.svg, the README's picture, from the demonstration recording
	"$(BIN)/python" tests/support/dashboard_picture.py docs/dashboard.svg

elasticity: venv  ## the pictures of docs/results/elasticity.md, simulated; the tables go to the terminal
	"$(BIN)/rimuru" bench workload --case-study --simulate --limits --svg docs/results/elasticity-qwen1.5-32GiB.svg
	"$(BIN)/rimuru" bench workload --case-study --simulate --limits --model-shape qwen3-30b-a3b --vram 24GiB \
		--svg docs/results/elasticity-qwen3-30b-24GiB.svg
	"$(BIN)/rimuru" bench workload --case-study --simulate --model-shape qwen3-30b-a3b --vram 32GiB \
		--svg docs/results/elasticity-qwen3-30b-32GiB.svg
	"$(BIN)/rimuru" bench workload --case-study --simulate --model-shape granite-4.0-h-tiny --vram 16GiB \
		--svg docs/results/elasticity-granite-16GiB.svg
	"$(BIN)/rimuru" bench workload --case-study --simulate --limits --model-shape qwen3.5-35b-a3b --vram 24GiB \
		--svg docs/results/elasticity-qwen3.5-35b-24GiB.svg

wheel: venv  ## dist/*.whl, built from a clean copy of the sources
	rm -rf build dist
	"$(BIN)/python" -m build --wheel --no-isolation
