# Every target sets itself up: a machine with Python 3.11 and make is enough.
# pip's own settings (index, mirrors, wheels) are respected.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PROGRAM := $(VENV)/.program
STAMP := $(VENV)/.installed
PEERS := $(VENV)-bench

WHEEL := $(VENV)-wheel
BROWSER := .browser
AXE := 4.14.0

# Two workers on two cores, so one thread each; tests start many processes, so bytecode is kept. They sync
# thousands of small files, none of which has to outlive the machine, so that these lie in memory. Each
# worker begins with its own half, so that neighbours share what their module has made.
PYTEST := TMPDIR=$(wildcard /dev/shm) OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test test-all browser test-browser wheel mutants mutants-generated docs check bench bench-growth bench-versions bench-micro dist clean

demo: $(PROGRAM)
	$(BIN)/fedveil run

# At the end, the slowest tests, of which none should take long: see CONTRIBUTING.md.
test: $(STAMP)
	$(PYTEST) -m "not slow" --durations=15 --durations-min=1.5

test-all: $(STAMP)
	$(PYTEST)

# What tests of pages need: Debian's chromium with its driver, and axe-core beside them. A machine that
# lets nobody install packages keeps what it has; the tests then say what is missing.
browser: $(BROWSER)/node_modules/axe-core/axe.min.js
	@command -v chromium chromedriver > /dev/null || { apt-get update -qq && apt-get install -y -qq chromium chromium-driver; }

$(BROWSER)/node_modules/axe-core/axe.min.js:
	npm install --silent --no-save --prefix $(BROWSER) axe-core@$(AXE)

test-browser: $(STAMP) browser
	$(PYTEST) tests/browser

# The wheel in an environment of its own, away from the repository: the demo, and a CSV by hospital.
wheel: $(STAMP)
	rm -rf $(WHEEL)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(WHEEL)/dist .
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet --constraint constraints.txt $(WHEEL)/dist/*.whl
	cp examples/hospitals.py $(WHEEL)/hospitals.py
	cd $(WHEEL) && bin/fedveil run && bin/python hospitals.py

# Source distribution and wheel, in dist/, checked for what an index shows.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

mutants: $(STAMP)
	$(BIN)/python mutants/run.py

# A sample of mutants made from the syntax tree: `make mutants-generated N=100 SEED=3`. Prints what survives.
N ?= 100
SEED ?= 0
mutants-generated: $(STAMP)
	$(BIN)/python mutants/run.py --generate $(N) --seed $(SEED)

bench: $(PEERS)/.installed
	$(PEERS)/bin/python benchmarks/run.py

bench-growth: $(PEERS)/.installed
	$(PEERS)/bin/python benchmarks/run.py --growth

bench-versions: $(PEERS)/.installed
	$(PEERS)/bin/python benchmarks/versions.py $(BASE)

bench-micro: $(STAMP)
	$(BIN)/python -m pytest benchmarks/test_*.py --benchmark-only

# The site, in site/index.html; a link that leads nowhere is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: $(STAMP) docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The program alone, for the demo. Tests and checks add the extras and the development tools.
$(PROGRAM): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $(PROGRAM)

$(STAMP): $(PROGRAM)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[data,figures,dev]"
	@touch $(STAMP)

# The peers want other versions than fedveil's own, so that they have an environment of their own.
$(PEERS)/.installed: pyproject.toml benchmarks/constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --constraint benchmarks/constraints.txt --editable ".[bench]"
	@touch $(PEERS)/.installed

clean:
	rm -rf $(VENV) $(PEERS) $(WHEEL) $(BROWSER) site
