# Every target sets itself up: a machine with Python 3.11 and make is enough.
# pip's own settings (index, mirrors, wheels) are respected.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all check bench-micro clean

demo: $(STAMP)
	$(BIN)/fedveil run

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: $(STAMP)
	$(BIN)/python -m pytest -n 2

bench-micro: $(STAMP)
	$(BIN)/python -m pytest benchmarks --benchmark-only

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[data,dev]"
	@touch $(STAMP)

clean:
	rm -rf $(VENV)
