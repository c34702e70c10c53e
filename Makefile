# `make` lists the goals. Every goal that needs the environment makes it first; the second time that is instant.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
# Without constraints.txt: what users get who install today.
NEWEST := build/newest

# Parallel test processes; WORKERS=0 runs the tests in one process (for a debugger).
WORKERS ?= 2
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile
# Paths and options of the first pytest run of make test: make test TESTS=tests/unit/engine
TESTS ?=
SOURCES := src tests benchmarks docs/site_hooks.py

# Five steps or more warm up, the last measures activation memory, and those between are timed; the modes run in lockstep.
DEMO_FLAGS := --model builtin:smollm2 --dataset builtin:pydoc\#400 --train_type lora --max_length 768 --max_steps 16 --packing true
DEMO_MODES := plain,checkpointing,ebbtide,ebbtide-minimal,plain-again
# Modules of benchmarks/suites, each run with its defaults.
CPU_SUITES := disk overhead equal bound faults sft sft_types families every_type scaling examples loading
# The Python of a machine that has torch already and no network: make gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
# Minutes in total and per part, folder, names of parts: make gpu GPU_FLAGS='--minutes 8 --part-minutes 3 test_store'
GPU_FLAGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all newest simdev check bench gpu docs format cli-surface clean

help:  ## List the goals
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | awk -F '\t' '{ printf "  %-12s %s\n", $$1, $$2 }'

setup: $(STAMP)  ## Make .venv with the pinned development environment

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "found Python %d.%d; expected 3.11 or newer\nhint: make setup PYTHON=/path/to/python3.11" % sys.version_info[:2])'
	@echo "Making $(VENV) (about a minute the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[recipes,dev]' -c constraints.txt
	@touch $@

demo: setup  ## Fine-tune a small model plainly, with checkpointing and with ebbtide, and compare: about 8 minutes
	@echo "Trains LoRA adapters of SmolLM2-135M in four modes, plainly twice, and compares them: about 8 minutes on two slow cores, 3 on eight."
	@echo "The first time the model is fetched (89 MiB) and converted, once, before the first run."
	@if [ -e runs/demo ]; then mv runs/demo runs/demo-until-$$(date +%Y%m%d-%H%M%S); fi
	$(BIN)/ebbtide compare sft $(DEMO_FLAGS) --modes $(DEMO_MODES) --rounds 1 --out runs/demo

test: setup simdev  ## Run the tests except the slow ones, and tests/gpu on the simulated device
	$(PYTEST) $(TESTS)
	$(PYTEST) --simdev

test-all: setup simdev docs  ## Run every test, slow ones included, and build the site
	$(PYTEST) -m ''
	$(PYTEST) --simdev -m ''

newest: $(NEWEST)/bin/pytest  ## Test engine, wraps and models with the newest packages, in an environment of its own (7 GiB)
	$(NEWEST)/bin/pytest -n $(WORKERS) --dist loadfile $(or $(TESTS),tests/unit/engine tests/unit/wrap tests/zoo)

$(NEWEST)/bin/pytest: pyproject.toml
	@$(PYTHON) -m venv --clear $(NEWEST)
	PIP_CONSTRAINT=/dev/null $(NEWEST)/bin/python -m pip install -qq --disable-pip-version-check -e '.[recipes,dev]'
	@touch $@

simdev: setup  ## Build the simulated device once; print the reason if that fails
	@$(BIN)/python -m tests.simdev.build

check: setup  ## Format, lint, types, floors, contracts
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(PYTEST) -q tests/contract

bench: setup  ## Run the benchmark suites of a CPU-only machine
	@for suite in $(CPU_SUITES); do echo "== $$suite"; $(BIN)/python -m benchmarks.suites.$$suite || exit 1; done

gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),setup)  ## Run tests/gpu and the GPU suites in parts; repeat to resume
	PYTHONPATH=src $(GPU_PYTHON) -m benchmarks.gpu $(GPU_FLAGS)

docs: $(VENV)/.docs  ## Build the site into site/; a link that leads nowhere fails
	$(BIN)/mkdocs build

$(VENV)/.docs: $(STAMP)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[docs]' -c constraints.txt
	@touch $@

format: setup  ## Format, and apply automatic fixes
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

cli-surface: setup  ## Rewrite the frozen option names of the command line
	$(BIN)/python -m tests.contract.cli_surface > tests/contract/cli_surface.txt

clean:  ## Remove the environment, caches and runs
	rm -rf $(VENV) build dist site runs .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
