# make demo    set up, fetch the default model, generate plainly and speculatively side by side
# make test    set up with the test tools, fetch the default model, run the default test suite
# make bench   run the benchmarks of docs/benchmarks.json and write their tables into README.md and docs/benchmarks.md
# make check   ruff, mypy and the scripts/check_* and scripts/mutate_* checks
# make test-lab | clean

PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin
PIP = $(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-lab check bench model clean

demo: model
	$(RUN)/python scripts/demo.py

test: $(VENV)/.dev model
	$(RUN)/python -m pytest -q -m "not lab" -n 2

test-lab: $(VENV)/.lab model
	$(RUN)/python -m pytest -q -m lab

check: $(VENV)/.dev
	$(RUN)/ruff check .
	$(RUN)/mypy
	@for script in $(wildcard scripts/check_*.py scripts/mutate_*.py); do echo "$$script" && $(RUN)/python $$script || exit 1; done

bench: model
	$(RUN)/python scripts/benchmarks.py

# stamps: a set-up step runs again only when what it installs has changed
$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "draftwise needs Python 3.10 or newer; make PYTHON=/path/to/python3.x")'
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) -e ".[dev]"
	@touch $@

# that library asks for an older transformers than draftwise is tested with, and for packages that its reader does without
$(VENV)/.lab: $(VENV)/.dev
	$(PIP) loguru pydantic-settings openai datasets
	$(PIP) --no-deps speculators hs-connectors
	@touch $@

model: $(VENV)/.base
	$(RUN)/draftwise pull smollm2

clean:
	rm -rf $(VENV)
