# `make demo` and `make test` need python3.11 (with venv) and nothing else.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/installed
KERNELS := .venv/kernels
export OMP_NUM_THREADS ?= 1
# Each of many processes would compile all that it imports again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all gate gate-beside-suite lint format install install-kernels clean
.DELETE_ON_ERROR:

install: $(INSTALLED)

# Once, and again when the dependencies change. Bytecode is made of a file when it is first
# imported: of all files that takes longer than to install them.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	touch $@

# The gate's part on kernels compiles them, which takes the extra of that name.
install-kernels: $(KERNELS)

$(KERNELS): $(INSTALLED)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[kernels]'
	touch $@

# Plan a real model for this machine, show the program, train it, prove it right.
demo: $(INSTALLED)
	$(BIN)/autopar plan examples/02_gpt.py --cluster examples/clusters/cpu_4.yaml -o out/demo
	cat out/demo/program/*.py
	$(BIN)/autopar run out/demo --steps 20
	$(BIN)/autopar verify out/demo

# Three workers, one more than the smallest machine has cores: they wait for ranks, too. Tests marked
# gloo all go to one of them (tests/conftest.py).
test: lint
	$(BIN)/python -m pytest -n 3 --dist loadgroup

# With every case of tests that `test` takes a few of (tests/sampling.py).
test-all: export AUTOPAR_EVERY_CASE = 1
test-all: test

# What must hold before anything is called done, in one table; out/gate.json has the commit.
gate: $(KERNELS)
	$(BIN)/python -m benchmarks.gate

# What of it `make test` does not run, in smaller samples.
gate-beside-suite: $(KERNELS)
	$(BIN)/python -m benchmarks.gate --beside-suite

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf out plan build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
