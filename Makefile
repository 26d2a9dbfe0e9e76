# Needs make and Python 3.11 or newer; everything else is installed into .venv, once.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
SGLANG := sglang==0.5.23
VENV := .venv
BIN := $(VENV)/bin
MACHINE := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo gpu || echo cpu)
INSTALLED := $(VENV)/.installed-$(MACHINE)
TOOLS := $(VENV)/.installed-tools
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
INSTALL := $(PIP) install --no-warn-conflicts --constraint requirements-$(MACHINE).txt
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help install search-agent test lint unit integration kill-test campaign bench
.NOTPARALLEL:

help:
	@echo 'make search-agent   set up, then train a search agent by RL; ARGS="seed=2 train.steps=60" passes settings'
	@echo 'make test           set up, then run all checks: lint, unit, integration'
	@echo 'make kill-test      set up, then kill parts of real runs at random moments, for some 20 minutes'
	@echo 'make campaign       set up, then simulate 10,000 runs under random faults, for some 20 minutes'
	@echo 'make bench          set up, then run all benchmarks; ARGS="--json FOLDER" passes options'
	@echo 'make install        set up only'

install: $(INSTALLED)

search-agent: $(INSTALLED)
	$(BIN)/python examples/agentic/search_agent.py $(ARGS)

test: lint unit integration

lint: $(TOOLS)
	@echo '== style (ruff) and types (mypy)'
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

unit: $(TOOLS)
	@echo '== unit tests, without SGLang and Megatron'
	@$(PYTEST) --numprocesses 2 --dist worksteal --ignore tests/integration --ignore tests/kill $(ARGS)

integration: $(TOOLS)
	@echo '== integration tests, with real SGLang servers and real Megatron ranks'
	@$(PYTEST) --numprocesses 3 --dist loadgroup --timeout 400 tests/integration $(ARGS)

kill-test: $(TOOLS)
	@echo '== kills at random moments, on real parts; KILLS=5 for fewer than 20 runs'
	@$(PYTEST) tests/kill $(ARGS)

campaign: $(INSTALLED)
	@$(BIN)/python -m areal.simulation.campaign --seeds 10000 $(ARGS)

bench: $(TOOLS)
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks $(ARGS)

$(INSTALLED): requirements-$(MACHINE).txt pyproject.toml
	@test -n '$(PYTHON)' || { echo 'No Python found: install 3.11 or newer, or say make PYTHON=/path/to/python'; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "areal needs Python 3.11 or newer," \
	"$(PYTHON) is $$($(PYTHON) -V 2>&1); say make PYTHON=/path/to/python"; exit 1; }
	@echo '== installing into $(VENV) for a $(MACHINE) machine: 3 to 5 minutes, once'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) --requirement requirements-$(MACHINE).txt
ifeq ($(MACHINE),cpu)
	@$(INSTALL) --no-deps $(SGLANG)
endif
	@$(INSTALL) --no-deps --editable .
	@touch $@

$(TOOLS): $(INSTALLED) requirements-dev.txt
	@echo '== installing the tools for tests: about a minute, once'
	@$(INSTALL) --requirement requirements-dev.txt
	@touch $@
