# Two commands do everything: `make demo` and `make test`. Both create .venv by themselves.
PYTHON ?= python3
BIN := .venv/bin
# Processes that run tests side by side; 0: all tests in one process, as is better on a machine with one GPU.
WORKERS ?= 2

.PHONY: demo test check clean

demo: .venv/installed
	rm -rf runs/demo
	$(BIN)/stretto train demo

test: check
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

check: .venv/tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/tested: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@

clean:
	rm -rf .venv runs build *.egg-info
