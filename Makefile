# Every target installs what it needs into .venv, so `make quickstart` and `make test` work in a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: develop quickstart test test-all test-changed check site format bench clean

.venv/core: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable .
	touch $@

.venv/develop: .venv/core
	$(PIP) --editable ".[test,check,site,bench,tensorboard]"
	touch $@

develop: .venv/develop

# Clients whose dependencies are not those of jingu, for their tests in `make test-all`.
.venv-clients: tests/serve/clients/requirements.txt
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

quickstart: .venv/core
	$(BIN)/python examples/quickstart.py $(ARGUMENTS)

test: .venv/develop check
	$(BIN)/pytest -m "not slow" --numprocesses 2 --dist worksteal

test-all: .venv/develop .venv-clients check
	$(BIN)/pytest

# What the changes since BASE reach, by imports.
BASE ?= main
test-changed: .venv/develop check
	$(BIN)/pytest -m "not slow" --numprocesses 2 --dist worksteal $$($(BIN)/python -m tests.changed $(BASE))

check: .venv/develop
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/site.py

# The documentation, in build/site/html; links that lead nowhere are errors.
site: .venv/develop
	$(BIN)/python docs/site.py

format: .venv/develop
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/develop
	$(BIN)/python -m bench

clean:
	rm -rf .venv .venv-clients build runs
