PYTHON ?= $(or $(firstword $(foreach p,python3.11 python3.12 python3,$(shell $(p) -c 'print("$(p)")' 2>/dev/null))),python3)
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# On all cores, where pip would take one. Some packages carry files that do not compile: templates, other versions'.
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/tests/' .venv/lib || true

.PHONY: help .venv compiled quickstart test style lint e2e nightly mutants bench generated docs docs-serve dist clean

help:
	@echo "make quickstart  build, train, resume, merge and verify a small model on this machine"
	@echo "make test        lint, types and every short test that needs no model download"
	@echo "make e2e         a real model, trained, merged and served by vLLM; steps compiled for TPUs; pages in Chromium"
	@echo "make nightly     what takes longer: other tools' own code, every page in Chromium, every rehearsal"
	@echo "make mutants     plausible mistakes put into the code one at a time: what tests catch today, they must catch tomorrow"
	@echo "make bench       the measurements, written to docs/benchmarks.md"
	@echo "make generated   rebuild generated/ from recipes/"
	@echo "make docs        the site of docs/, in build/site; docs-serve shows it and follows changes"
	@echo "make dist        the wheel and the source archive, the same bytes wherever they are built"

# The development environment.
.venv: .venv/.dev

.venv/.train: pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) --editable '.[train]'
	$(COMPILE)
	touch $@

.venv/.dev: pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) --editable '.[train,plan,report,lsp,hub,serve,torchax,docs,dev]'
	$(COMPILE)
	touch .venv/.train $@

# Where Python may not write byte code, every script would compile what it imports of the repository anew.
compiled: .venv/.dev
	$(BIN)/python -m compileall -qq spec compiler port runtime templates

quickstart: .venv/.train
	$(BIN)/python -m recipec.compiler.rehearse.quickstart

style: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell -q 34 -D - -D words.txt

lint: style
	$(BIN)/mypy

# mypy runs in parallel with the tests, whose workers often wait for processes: three fill two cores. Its output is printed at the end.
test: compiled style
	@mkdir -p build
	@$(BIN)/mypy > build/mypy.txt 2>&1 & types=$$!; \
	trap 'kill $$types' INT TERM; \
	$(BIN)/recipe build recipes/*.yaml --check --prune && \
	$(BIN)/python -m pytest -n 3 -p tests.groups --ignore=tests/e2e --durations=10 $(PYTEST); tests=$$?; \
	wait $$types; types=$$?; \
	echo "$(BIN)/mypy"; cat build/mypy.txt; \
	exit $$((tests ? tests : types))

e2e: compiled
	$(BIN)/python -m pytest -m e2e -p tests.e2e.two_workers -n 2 -o timeout=1800 --durations=20 $(PYTEST)

nightly: compiled
	$(BIN)/python -m pytest -m nightly -p tests.e2e.two_workers -n 2 -o timeout=1800 --durations=20 $(PYTEST)

mutants: .venv/.dev
	$(BIN)/python -m tests.mutants --jobs 2 $(MUTANTS)

bench: compiled
	$(BIN)/python -m tests.bench
	$(BIN)/python -m scripts.step_times write

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
