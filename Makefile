# `make train` runs the main job, `make test` lint, types and tests; both set up .venv first.
# `make test-slow` runs the other tests, up to an hour on two cores; .ci/run does not.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test test-slow lint docs clean

train: .venv/installed
	$(BIN)/axosparse-train $(ARGS)

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 20

test: lint
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: .venv/checkable
	$(PYTEST) -m slow $(ARGS)

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
