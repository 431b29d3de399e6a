# `make` alone lists the targets. Every target sets up its own environment first.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

# Data sets too large to ship: used when they lie beside the repository and no other place is named.
ifndef NUMPYRO_FED_DATA
ifneq ($(wildcard ../shared/data/.),)
export NUMPYRO_FED_DATA := $(abspath ../shared/data)
endif
endif

.DEFAULT_GOAL := help
.PHONY: help env test test-merge test-slow test-flare test-lowest lint types tests doctests random-models soak demo demo-federation bench notebooks docs dist format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

env: $(STAMP)  ## create .venv with the locked versions and this package in it

$(STAMP): requirements.lock pyproject.toml
	@test -x $(RUN) || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make env PYTHON=python3.11")'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

test: lint types tests doctests  ## what must pass before a merge

lint: $(STAMP)  ## style and common mistakes
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(STAMP)  ## static types
	$(RUN) -m mypy

# ArviZ notes once a day that it has warned; two workers doing so at once could collide, so one goes first.
FIRST_IMPORT := $(RUN) -W ignore -c 'import arviz'

# A method's tests share its runs, and a file's tests their programs: they stay in one process.
PYTEST := $(RUN) -m pytest -n 2 --dist loadgroup

tests: $(STAMP)  ## the test suite without slow tests
	@$(FIRST_IMPORT)
	$(PYTEST) -m "not slow" tests

test-merge: $(STAMP)  ## some slow tests: notebooks, code of the documentation, demos, accuracy
	@$(FIRST_IMPORT)
	$(PYTEST) -m merge tests

test-slow: $(STAMP)  ## all slow tests: experiments of papers, accuracy, examples, every kind of model
	@$(FIRST_IMPORT)
	$(PYTEST) -m slow tests

# NVIDIA FLARE brings thirty packages: they lie in a folder of their own, and .venv stays as it is.
FLARE := $(VENV)/flare

$(FLARE)/.installed: requirements-flare.lock $(STAMP)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(FLARE) --requirement $<
	@touch $@

test-flare: $(FLARE)/.installed  ## NVIDIA FLARE as a transport: its simulator, and a deployment with certificates
	PYTHONPATH=$(abspath $(FLARE)) $(RUN) -m pytest tests/remote/test_flare.py tests/remote/test_flare_deployment.py

# The oldest versions that pyproject.toml admits, in a folder of their own.
LOWEST := $(VENV)/lowest

$(LOWEST)/.installed: requirements-lowest.txt pyproject.toml
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $< "pytest>=8.3" "pytest-xdist>=3.6" "hypothesis>=6.100" "funsor>=0.4.8" "setuptools>=77"
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

test-lowest: $(LOWEST)/.installed  ## the test suite with the lowest versions of dependencies
	$(LOWEST)/bin/python -m pytest -n 2 --dist loadgroup -W default::DeprecationWarning -m "not slow" tests

# On their own: the doctests run in the plain settings of a user, the tests in strict ones.
doctests: $(STAMP)  ## the examples in the docstrings
	@$(FIRST_IMPORT)
	$(PYTEST) --doctest-modules numpyro_fed

# Each program is compiled for two or three calls: not optimised.
random-models: $(STAMP)  ## N models at random: counts of right, asked, refused and wrong (VERDICTS=1: runs of EP and SFVI)
	PYTHONPATH=tests XLA_FLAGS="$(XLA_FLAGS) --xla_backend_optimization_level=0" \
		$(RUN) -m random_models $(or $(N),1000) $(if $(VERDICTS),--verdicts)

soak: $(STAMP)  ## 100,000 rounds, 1,000 runs and 1,000 silos in one process: does anything grow?
	$(RUN) -m benchmarks.soak --log docs/soak.md $(SOAK)

demo: $(STAMP)  ## the six cities example, from data to comparison
	$(RUN) examples/six_cities.py

demo-federation: $(STAMP)  ## six cities over three silos and a server, each a process of its own; one is killed on the way
	$(RUN) examples/federation/demo.py

bench: $(STAMP)  ## one table of speed: against NumPyro, NUTS and FedJAX, and as rows, silos and dimensions grow
	$(RUN) -m benchmarks.bench $(BENCH)

notebooks: $(STAMP)  ## run the notebooks of examples/ without Jupyter, their plots into out/
	$(RUN) examples/run_notebooks.py --figures out

docs: $(STAMP)  ## build the documentation into docs/_build/html (NOTEBOOKS=off: without running them)
	$(RUN) -m sphinx -W --keep-going -b html $(if $(NOTEBOOKS),-D nb_execution_mode=$(NOTEBOOKS)) docs docs/_build/html

dist: $(STAMP)  ## wheel and sdist into dist/; the wheel is tried in an environment with nothing but what it asks for
	rm -rf dist build
	$(RUN) -c 'from setuptools import build_meta as build; build.build_sdist("dist"); build.build_wheel("dist")'
	$(PYTHON) -m venv build/empty
	build/empty/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	cd build && empty/bin/python ../examples/run_notebooks.py quickstart && empty/bin/numpyro-fed --help

format: $(STAMP)  ## rewrite the code in the common style
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:  ## remove what was built; .venv stays
	rm -rf build dist out docs/_build .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
