# make demo | test | lint | types | layers | wheel | docs | check | accuracy | clean
#
# Every target sets up its own environment in .venv on first use (Python 3.11 preferred, any >= 3.10 taken) with the exact
# versions of constraints.txt. Overrides:
#   PYTHON=python3.12             the interpreter to build .venv with
#   TORCH=torch==2.12.0           another torch release, or a wheel file: TORCH=./torch-2.13.0+cu130-....whl
#   TORCH=own                     keep the torch that PYTHON (a system or conda Python, not a venv) has: your CUDA build stays
#   PYTEST_ARGS='-m slow -n 2'    passed on to pytest
# After changing PYTHON or TORCH: make clean, then the target again.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv demo test lint format types layers wheel docs check accuracy clean

PYTHON ?= $(shell for each in python3.11 python3.12 python3.13 python3.10 python3; do \
	"$$each" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { echo "$$each"; break; }; done)
TORCH ?= torch
PYTEST_ARGS ?=
DEMO_ARGS ?=
DEMO_OUTPUT := demo_output

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip

# Nothing here needs an account or, once installed, the network.
# A thread that waits must not spin: on a busy machine spinning makes a CPU step many times slower.
OFFLINE := OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 WANDB_MODE=offline WANDB_ERROR_REPORTING=false

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

venv: $(STAMP)

# With another torch than the pinned one, its line is left out of the constraints.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python >= 3.10 found; give one: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "setting up $(VENV) with $(PYTHON); the first time takes some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(if $(filter own,$(TORCH)),--system-site-packages) $(VENV)
	$(PIP) install --quiet 'pip==26.3'
	if [ '$(TORCH)' = torch ]; then cp constraints.txt $(VENV)/constraints.txt; \
	else grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt; fi
	$(PIP) install --quiet --constraint $(VENV)/constraints.txt $(if $(filter own,$(TORCH)),torch,'$(TORCH)')
	$(PIP) install --quiet --constraint $(VENV)/constraints.txt --group dev --editable '.[callback,wandb,report]'
	touch $(STAMP)

demo: $(STAMP)
	rm -rf $(DEMO_OUTPUT)
	$(OFFLINE) $(BIN)/python examples/finetune_with_live_cost.py --output-dir $(DEMO_OUTPUT) $(DEMO_ARGS)

test: $(STAMP)
	$(OFFLINE) $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy --strict

layers: $(STAMP)
	$(BIN)/lint-imports

wheel: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist

# The pages made from code, then the site, into site/.
docs: $(STAMP)
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# Refits the constants, and rebuilds docs/accuracy.md, docs/paper.md and their pictures from the data in the repo.
accuracy: $(STAMP)
	$(BIN)/python accuracy/fit.py
	$(BIN)/python accuracy/evaluate.py --write
	$(BIN)/python accuracy/build_paper.py

check: lint types layers test wheel

clean:
	rm -rf $(VENV) $(DEMO_OUTPUT) dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
