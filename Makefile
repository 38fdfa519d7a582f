PYTHON ?= $(or $(firstword $(foreach p,python3.11 python3.12 python3,$(shell $(p) -c 'print("$(p)")' 2>/dev/null))),python3)
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help .venv quickstart test lint e2e bench generated docs docs-serve dist clean

help:
	@echo "make quickstart  build, train, resume, merge and verify a small model on this machine"
	@echo "make test        lint, types and every test that needs no model download"
	@echo "make e2e         a real model, trained, merged and served by vLLM; steps compiled for TPUs; pages in Chromium"
	@echo "make bench       the measurements, written to docs/benchmarks.md"
	@echo "make generated   rebuild generated/ from recipes/"
	@echo "make docs        the site of docs/, in build/site; docs-serve shows it and follows changes"
	@echo "make dist        the wheel and the source archive, the same bytes wherever they are built"

# The development environment.
.venv: .venv/.dev

.venv/.train: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) --editable '.[train]'
	touch $@

.venv/.dev: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) --editable '.[train,serve,report,lsp,docs,dev]'
	touch .venv/.train $@

quickstart: .venv/.train
	$(BIN)/python -m compiler.quickstart

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/recipe build recipes/*.yaml --check
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=10 $(PYTEST)

e2e: .venv/.dev
	$(BIN)/python -m pytest -m e2e -p tests.e2e.two_workers -n 2 -o timeout=1800 --durations=20 $(PYTEST)

bench: .venv/.dev
	$(BIN)/python -m tests.bench

generated: .venv/.train
	$(BIN)/recipe build recipes/*.yaml

docs docs-serve: export NO_MKDOCS_2_WARNING = 1
docs: .venv/.dev
	$(BIN)/mkdocs build --strict

docs-serve: .venv/.dev
	$(BIN)/mkdocs serve

dist: .venv/.dev
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .mypy_cache
