# `make train` runs the main job, `make test` everything that is checked. Both set up .venv first.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test lint clean

train: .venv/ready
	$(BIN)/axosparse-train $(ARGS)

test: lint
	$(BIN)/python -m pytest $(ARGS)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Made anew when what it was made from has changed.
.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[mpich,notebook,dev]'
	touch $@

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
