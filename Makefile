# `make train` runs the main job, `make test` everything that is checked. Both set up .venv first.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test lint docs clean

train: .venv/installed
	$(BIN)/axosparse-train $(ARGS)

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: .venv/checkable
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: .venv/checkable
	$(BIN)/mkdocs build

# Both are made anew when what they were made from has changed.
INSTALL = { test -x $(BIN)/pip || $(PYTHON) -m venv .venv; } && \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e

.venv/installed: pyproject.toml constraints.txt
	$(INSTALL) '.[mpich,cli]'
	touch $@

.venv/checkable: pyproject.toml constraints.txt
	$(INSTALL) '.[mpich,cli,images,notebook,docs,dev]'
	touch $@

clean:
	rm -rf .venv build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
