# `make train` runs the main job, `make test` lint, types and tests; both set up .venv first.
# `make test-slow` runs the other tests, and more examples of properties; .ci/run does not.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test test-quick test-slow lint docs clean

train: .venv/installed
	$(BIN)/axosparse-train $(ARGS)

# Without the files of bytecode, every worker would compile all tests anew.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 20

# Types take a core for a minute, so they are checked beside the tests.
test: .venv/checkable
	$(MAKE) --no-print-directory -j 2 lint test-quick

test-quick: .venv/checkable
	$(PYTEST) -m "not slow" --hypothesis-profile quick $(ARGS)

test-slow: .venv/checkable
	$(PYTEST) -m "slow or hypothesis" $(ARGS)

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
