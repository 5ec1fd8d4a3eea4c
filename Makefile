# Every target sets itself up: a machine with Python 3.11 and make is enough.
# pip's own settings (index, mirrors, wheels) are respected.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := $(VENV)-bench

.PHONY: demo test test-all mutants check bench bench-micro clean

demo: $(STAMP)
	$(BIN)/fedveil run

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: $(STAMP)
	$(BIN)/python -m pytest -n 2

mutants: $(STAMP)
	$(BIN)/python mutants/run.py

bench: $(PEERS)/.installed
	$(PEERS)/bin/python benchmarks/run.py

bench-micro: $(STAMP)
	$(BIN)/python -m pytest benchmarks/test_*.py --benchmark-only

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[data,dev]"
	@touch $(STAMP)

# The peers want other versions than fedveil's own, so that they have an environment of their own.
$(PEERS)/.installed: pyproject.toml benchmarks/constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --constraint benchmarks/constraints.txt --editable ".[bench]"
	@touch $(PEERS)/.installed

clean:
	rm -rf $(VENV) $(PEERS)
