# make test    what has to pass: lint, types and the default tests (.venv is made when it is missing)
# make demo    a tour of what this program does (.venv is made, without the tools for development, when it is missing)
# make slow    full-size shapes, long runs, and tests that need a package registry

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -n 2

RUN := $(VENV)/bin/python -m
STAMP := $(VENV)/.installed
# An old pip cannot do an editable install of this project; a recent one is left as it is.
INSTALL := $(RUN) pip install --quiet 'pip>=23.1' && $(RUN) pip install --quiet --editable

.PHONY: test demo demo-model lint types unit slow wheel clean

test: lint types unit

demo: $(VENV)/bin/openelm
	@$< demo

# Trains what is in openelm_mlx/assets again, in build/demo-model; see docs/demo-model.md.
demo-model: $(STAMP)
	PYTHON=$(abspath $(VENV))/bin/python docs/demo-model/retrain.sh

lint: $(STAMP)
	$(RUN) ruff check .
	$(RUN) ruff format --check .

types: $(STAMP)
	$(RUN) mypy .

unit: $(STAMP)
	$(RUN) pytest $(PYTEST_ARGS)

slow: $(STAMP)
	$(RUN) pytest -m "slow or network" $(PYTEST_ARGS)

wheel: $(STAMP)
	$(RUN) build

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(STAMP): pyproject.toml | $(VENV)/bin/python
	$(INSTALL) '.[dev]'
	touch $@

# Whatever is installed there already is used: a second backend of MLX beside it would break it.
$(VENV)/bin/openelm: | $(VENV)/bin/python
	@echo 'Installing into $(VENV), which takes a minute or two, once' >&2
	@$(INSTALL) '.[cpu]'

# Debian's python3 without python3-venv leaves a broken folder behind: it is removed so that the next try starts afresh.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'Python 3.10 or newer is needed: make $(MAKECMDGOALS) PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo 'No virtual environment could be made. On Debian: apt-get install python3-venv' >&2; exit 1; }
