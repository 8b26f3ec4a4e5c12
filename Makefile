# Two commands do everything: `make demo` and `make test`. Both create .venv by themselves. `make faults` tries more.
PYTHON ?= python3
BIN := .venv/bin
# Processes that run tests side by side; 0: all tests in one process, as is better on a machine with one GPU.
WORKERS ?= 2

.PHONY: demo test faults check site wheel clean

demo: .venv/installed
	rm -rf runs/demo
	$(BIN)/stretto train demo

test: check
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Everything that can happen to a run, tried in full: about 25 minutes. docs/faults.md says how it ended.
faults: .venv/tested
	STRETTO_FAULTS=1 $(BIN)/python -m pytest -p tests.faults.page --faults-page docs/faults.md -m "fault or control" \
		-n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 10

check: .venv/tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The documentation as pages, in build/site.
site: .venv/tested
	$(BIN)/mkdocs build --quiet
	@echo build/site/index.html

# What others install, in build/dist. tests/test_wheel.py does this too, and trains with it.
wheel: .venv/tested
	rm -rf build/lib build/dist
	$(BIN)/python -c "import setuptools.build_meta as b; b.build_sdist('build/dist'); b.build_wheel('build/dist')" >/dev/null
	@ls build/dist/*

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/tested: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@

clean:
	rm -rf .venv runs build *.egg-info
