# make demo   the garbage, four repairs, byte-identical output      make lab        JupyterLab at notebooks/00_start_here
# make quick  lint, types and every test that is not slow           make notebooks  run the notebooks anew and keep the outputs
# make test   every test and every notebook                         make slides     HTML slides of the notebooks
# make clean  remove what the others made
#
# The long runs, whose figures are in tests/tools/figures and explained in tests/README.md: make mutants, make fuzz,
# make endure, make environments. make lock writes requirements.lock anew when constraints.txt has changed.
#
# Set-up happens once, in .venv, and again only when pyproject.toml or constraints.txt changes.
# PYTHON=/path/to/python3.12 chooses the interpreter; without it the first Python 3.11 or 3.12 found is taken.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := demo
.PHONY: demo quick lint test lab notebooks slides clean mutants fuzz endure environments lock

PYTHON ?=
VENV := .venv
PY := $(VENV)/bin/python
PIP_INSTALL = $(PY) -m pip install --disable-pip-version-check --constraint constraints.txt
NOTEBOOKS = $(filter-out %_student.ipynb,$(wildcard notebooks/*.ipynb))
RIGHT_VERSION := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))

demo: $(VENV)/.core
	$(VENV)/bin/dcp-fix reproduce

lint: $(VENV)/.all
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports
	$(PY) -m mypy

quick: lint
	$(PY) -m pytest -q -n 2 --dist worksteal -m "not slow"

test: lint
	$(PY) -m pytest -n 2 --dist worksteal
ifneq ($(NOTEBOOKS),)
	PYTHONWARNINGS=ignore $(PY) -m pytest -n 2 --dist loadfile --nbval --nbval-current-env --nbval-cell-timeout=180 \
	    --nbval-sanitize-with=notebooks/sanitize.cfg -p no:randomly $(NOTEBOOKS)
endif

lab: $(VENV)/.all
	$(PY) -m jupyterlab notebooks/00_start_here.ipynb

notebooks: $(VENV)/.all
	PYTHONWARNINGS=ignore $(PY) notebooks/regenerate.py

slides: $(VENV)/.all
	$(PY) notebooks/slides.py slides

mutants: $(VENV)/.all
	$(PY) -m tests.tools.mutants

fuzz: $(VENV)/.all
	$(PY) -m tests.tools.fuzz

endure: $(VENV)/.all
	MALLOC_ARENA_MAX=1 $(PY) -m tests.tools.endure

environments: $(VENV)/.all
	$(PY) -m tests.tools.environments

lock: $(VENV)/.all
	$(PIP_INSTALL) uv==0.13.9
	$(PY) -m tests.tools.lock

clean:
	rm -rf $(VENV) build dist slides *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip arrives last, so a venv that was cut short is made again.
$(VENV)/bin/pip:
	@python=$$(for name in $(if $(PYTHON),"$(PYTHON)",python3 python3.12 python3.11); do \
	    if "$$name" -c "$(RIGHT_VERSION)" 2>/dev/null; then echo "$$name"; break; fi; done); \
	if [ -z "$$python" ]; then \
	    echo "error: dcp_fix needs Python 3.11 or 3.12; '$(or $(PYTHON),python3)' is $$("$(or $(PYTHON),python3)" --version 2>&1 | tail -n 1)" >&2; \
	    echo "       install one and name it: make PYTHON=/path/to/python3.12" >&2; exit 1; \
	fi; \
	echo "$$python -m venv $(VENV)"; "$$python" -m venv $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(PIP_INSTALL) --editable .
	touch $@

$(VENV)/.all: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(PIP_INSTALL) --editable '.[lab,test]'
	touch $@ $(VENV)/.core
