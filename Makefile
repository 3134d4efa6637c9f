# Two commands on a fresh machine with Python 3.11+: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: demo test test-slow lint types lock clean

demo: .venv/base.installed  ## the whole job on a real model and real conversations
	$(BIN)/ullim demo $(ARGS)

test: .venv/dev.installed  ## the default tests, under 15 minutes on 2 cores
	$(BIN)/pytest -m "not slow" $(ARGS)

test-slow: .venv/dev.installed  ## those that take longer; .ci/run runs them too
	$(BIN)/pytest -m slow $(ARGS)

lint: .venv/dev.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev.installed
	$(BIN)/mypy

.venv/base.installed: requirements/base.txt pyproject.toml scripts/install.sh
	@PYTHON=$(PYTHON) scripts/install.sh $(if $(wildcard .venv/dev.installed),dev,base) && touch $@

.venv/dev.installed: requirements/dev.txt pyproject.toml scripts/install.sh
	@PYTHON=$(PYTHON) scripts/install.sh dev

lock:  ## resolve the requirements again
	scripts/lock.sh

clean:  ## remove the environment; runs and the model cache stay
	rm -rf .venv
