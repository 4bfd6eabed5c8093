# Every target sets up .venv by itself when it is missing or its requirements changed.
PYTHON ?= python3
BIN := .venv/bin
# A CPU build of torch; set TORCH=torch for a CUDA machine. Installed first: nothing else may choose it.
TORCH ?= torch==2.13.0
WORKERS ?= 2

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test lint bench docs setup clean

demo: .venv/demo.stamp
	$(BIN)/prism demo

test: .venv/dev.stamp
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/dev.stamp
	$(BIN)/python bench/run.py

docs: .venv/dev.stamp
	$(BIN)/python docs/generate.py --check
	$(BIN)/mkdocs build --strict

setup: .venv/dev.stamp

.venv/bin/python:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"

.venv/demo.stamp: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[embedded]"
	touch $@

.venv/dev.stamp: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@ .venv/demo.stamp

clean:
	rm -rf .venv site dist .pytest_cache .mypy_cache .ruff_cache
