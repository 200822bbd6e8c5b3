# `make demo` and `make test` each work as the first and only command after a clone.
# PYTHON=/path/to/python chooses the interpreter that the environment is made from (3.11 or newer).

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed

# the first that runs and is new enough; a launcher of that name may exist and still not start
PYTHON ?= $(shell for candidate in python3.11 python3 python3.12 python3.13; do \
	if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; \
	then echo $$candidate; break; fi; done)

# arguments handed on: make demo ARGS="--help", make test ARGS="-k memory"
ARGS ?=
# tests of one group share what one of them made, so one process runs them
PYTEST = $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadgroup
DEFAULT := not slow and not full and not network

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-full test-all test-slow test-isa test-tools conformance matrix check style \
	style-report docs docs-linkcheck lock lock-check build clean

help:
	@echo 'make demo       train, evaluate and sample a small model on the text in this repository (minutes)'
	@echo 'make test       the default tests (minutes): of every kind some, without a network'
	@echo 'make test-all   those and the full set; make test-full  the full set alone'
	@echo 'make test-slow  the tests marked slow'
	@echo 'make test-isa   the tests of numbers as on processors with fewer instructions (minutes)'
	@echo 'make test-tools  lm-eval, minicons and surprisal on our models, in an environment of their own'
	@echo 'make conformance  the tests of the installed transformers on our classes; writes docs/conformance.md'
	@echo 'make matrix     the tests that depend on other packages, for each Python, transformers and torch at hand'
	@echo 'make check      ruff, formatting, mypy'
	@echo 'make style      let ruff repair and format'
	@echo 'make style-report  measures of classes, functions, prose and imports, with what breaks them'
	@echo 'make docs       the documentation site in build/docs; make docs-linkcheck  whether its addresses answer'
	@echo 'make lock       uv.lock, with the versions of constraints.txt; make lock-check  whether it is up to date'
	@echo 'make build      source distribution and wheel in dist/'
	@echo 'make venv       only create or update the environment $(VENV)'
	@echo 'make clean      remove environments, caches and build output'

venv: $(READY)

# torch alone and first: its version decides which build of it pip takes, before anything else asks for "a torch"
$(READY): pyproject.toml constraints.txt
	@test -n '$(PYTHON)' || { echo 'Python 3.11 or newer was not found; name one with PYTHON=...' >&2; exit 1; }
	@echo 'Installing into $(VENV): a few minutes the first time.'
	@rm -f $@
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/hf-txl demo $(ARGS)

# one thread per test process: the processes share the cores
test test-full test-all test-slow test-isa: export OMP_NUM_THREADS ?= 1

test: $(READY)
	$(PYTEST) -m '$(DEFAULT)' $(ARGS)

# what `make test` leaves out and is not slow
test-full: $(READY)
	$(PYTEST) -m 'full and not slow and not network' $(ARGS)

test-all: $(READY)
	$(PYTEST) -m 'not slow and not network' $(ARGS)

test-slow: $(READY)
	$(BIN)/python -m pytest -m 'slow and not network' $(ARGS)

# the tests that compare numbers; a compiled model has kernels of its own, and tokens are compared in `make test` alone
ISA_TESTS := $(addprefix tests/model/test_,against_the_slow_model.py backends.py classification.py losses.py \
	memory.py padding.py precision.py sharing.py training.py) \
	$(addprefix tests/unit/test_,adaptive.py attention.py cache.py half_loss.py recompute.py scoring.py) \
	tests/parity tests/property tests/training/test_trainer.py
PYTEST_ISA = $(PYTEST) -m '$(DEFAULT)' -k 'not compile' $(ISA_TESTS) $(ARGS)

# AVX2 without AVX-512 and bfloat16; SSE alone; and products that round otherwise for every shape. The first lines of
# each run name the kernels.
test-isa: $(READY)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(PYTEST_ISA)
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 $(PYTEST_ISA)
	$(PYTEST_ISA) -p tests.rounding

test-tools: $(READY)
	.ci/tools $(ARGS)

# TRANSFORMERS_SOURCE=FOLDER names a checkout of the release's tag, for the tests that its distribution lacks
conformance: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,conformance]'
	$(BIN)/python tests/conformance/run.py $(ARGS)

matrix: $(READY)
	.ci/matrix $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

style: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

style-report: $(READY)
	$(BIN)/python tests/packaging/style_report.py

# a warning is an error, and so is a reference that leads nowhere
SPHINX = $(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky

docs: $(READY)
	$(SPHINX) -b html docs build/docs

docs-linkcheck: $(READY)
	$(SPHINX) -b linkcheck -D nb_execution_mode=off docs build/linkcheck

lock: $(READY)
	$(BIN)/uv lock $$(sed -n 's/^[^#].*/--upgrade-package &/p' constraints.txt)

lock-check: $(READY)
	$(BIN)/uv lock --check

build: $(READY)
	rm -rf dist
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info .conformance .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
