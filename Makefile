# Everything runs in a virtual environment in .venv, made on first use. PYTHON chooses the interpreter.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test test-all checked quick docs pictures gpu versions lint clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: .venv/ready  ## train on handwritten digits, SDPipe against all-reduce: a slower device, and workers that stall
	$(BIN)/sdpipe demo

test: checked  ## ruff, mypy, the documents and pytest
	$(BIN)/python -m pytest

test-all: checked  ## make test, and what takes minutes or needs root, services and other packages; says what was skipped
	$(BIN)/python -m pytest -m "" -rs

checked: .venv/ready
	$(MAKE) --jobs=2 --output-sync lint docs

quick: .venv/ready  ## the tests that start no other processes, in a minute
	$(BIN)/python -m pytest -m "not distributed and not slow" --hypothesis-profile=quick --dist=worksteal

docs: .venv/ready  ## the site in docs/_build, every warning an error
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build

pictures: .venv/ready  ## the pictures of the documents, in headless Chromium: look at them
	$(BIN)/python -m recipes.tools.pictures

gpu: .venv/ready  ## what works on a CUDA device, in 11 minutes; writes gpu-report.md (DRY=1: on the CPU, tiny)
	$(BIN)/python -m recipes.gpu $(if $(DRY),--dry)

versions:  ## the tests on other versions of Python and torch, each in an environment in .versions
	$(PYTHON) -m recipes.tools.versions

lint: .venv/ready  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## remove the environment and what runs have left
	rm -rf .venv .versions outputs multirun lightning_logs .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build

.venv/ready: pyproject.toml constraints.txt
	@echo "Installing torch, Lightning and the tools of the tests into .venv: some minutes, once, without further output"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[recipes,dev]'
	touch $@
