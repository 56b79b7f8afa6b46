# The environment is made on first use; `make demo` and `make test` are all a fresh clone needs.
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
SEED ?= $(shell date +%s)
LONG_RESULTS ?= profiles/results/test_long.json
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint format test-long faults lowering lowering-check lowering-record gpu-check plots train-tiny clean

demo: $(INSTALLED)  ## generate on the bundled model, cold and warm
	$(BIN)/python -m hybrid_runtime.demo

test: $(INSTALLED)  ## the whole test suite, quick profile
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

lint: $(INSTALLED)  ## what CI checks beside the tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test-long: $(INSTALLED)  ## the property tests with thousands of examples, about an hour; SEED=... repeats a run
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -m hypothesis --timeout 0 --hypothesis-seed=$(SEED) \
		-p tests.long_run --long-results $(LONG_RESULTS)

faults: $(INSTALLED)  ## plant each known kind of fault in a copy, and see that the tests notice: minutes
	$(BIN)/python -m tests.faults

lowering: $(INSTALLED)  ## what the steps of each architecture become on a GPU, seen without one: a table, and JSON
	$(BIN)/python -m hybrid_runtime.lowering_report --json profiles/results/lowering.json

lowering-check: $(INSTALLED)  ## decode steps alone, and fail on pool copies, spills, unsafe captures, more launches than recorded
	$(BIN)/python -m hybrid_runtime.lowering_report --steps decode --check

lowering-record: $(INSTALLED)  ## record the launches as the new limit
	$(BIN)/python -m hybrid_runtime.lowering_report --record

gpu-check: $(INSTALLED)  ## on a machine with a GPU: equivalences under real capture, kernels, benchmarks; one report
	$(BIN)/python -m tests.gpu

plots: $(INSTALLED)  ## profiles/results/README.md and its plots, from the JSON files beside it
	$(BIN)/python profiles/plots.py

train-tiny: $(INSTALLED)  ## train the bundled checkpoint from scratch: over an hour
	$(BIN)/python -m hybrid_runtime.training train --out build/tiny --minutes 74

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) --editable '.[test,lint]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
