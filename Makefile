# Every target makes what it needs, from a fresh clone on: python3 (3.11 to 3.13) and make are all that must be there.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two installations into one environment at a time would break it.
.NOTPARALLEL:

WORKERS ?= 2
PYTEST_ARGS ?=
CASES ?= 200
SEED ?=
MUTANTS_ARGS ?=
# Each worker begins with files of its own, for tests of one file share programs.
PYTEST = -m pytest --numprocesses $(WORKERS) --dist worksteal $(PYTEST_ARGS)
# Tests of one device, which are compiled as for users, then those of eight. pytest ends with 5 where it selected none.
# tests PYTHON, MARKS, ARGUMENTS
define tests
failed=0; \
$(1) $(PYTEST) $(3) -m "$(2) and not devices" || test $$? -eq 5 || failed=1; \
JAX_NUM_CPU_DEVICES=8 $(1) $(PYTEST) $(3) -m "$(2) and devices" || test $$? -eq 5 || failed=1; \
exit $$failed
endef

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_REQUIRE_VIRTUALENV := 1
export NO_MKDOCS_2_WARNING := 1

.PHONY: help demo test test-slow test-exhaustive test-docs test-site test-matrix test-oldest test-newest bench docs serve check format clean fuzz fuzz-ci mutants

help: ## Lists the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

demo: .venv/.runtime ## Trains a recurrent classifier on spoken vowels and prints its accuracy (a minute at most).
	.venv/bin/python examples/vowels.py

# The pages have a target of their own.
BESIDE_PAGES = --ignore tests/docs

test: .venv/.group-test ## The everyday tests.
	$(call tests,.venv/bin/python,not slow,$(BESIDE_PAGES))

test-slow: .venv/.group-peers ## The tests that are too slow for every day.
	$(call tests,.venv/bin/python,slow and not exhaustive,$(BESIDE_PAGES))

test-exhaustive: .venv/.group-peers ## All tests that are slow, those that are too many for CI included.
	$(call tests,.venv/bin/python,slow)

test-docs: .venv/.group-peers ## Runs what the pages show: their code, recipes, pictures and figures.
	$(call tests,.venv/bin/python,not exhaustive,tests/docs)

test-site: docs .venv/.group-site ## Tries the built documentation in the Chromium of this machine, if there is one.
	.venv/bin/python $(PYTEST) --confcutdir tests/site tests/site

fuzz: .venv/.group-test ## Runs CASES fresh random programs of SEED against a plain loop; keeps those that fail.
	PYTHONPATH=.:tests/lib .venv/bin/python -m generated --cases $(CASES) $(if $(SEED),--seed $(SEED))
	PYTHONPATH=.:tests/lib .venv/bin/python -m generated.decisions --cases $(CASES) $(if $(SEED),--seed $(SEED))
	PYTHONPATH=.:tests/lib .venv/bin/python -m generated.words --cases $(CASES) $(if $(SEED),--seed $(SEED))

# A merge is not held up by a program that nobody has seen before: the tests have those of known seeds.
fuzz-ci: .venv/.group-test
	PYTHONPATH=.:tests/lib .venv/bin/python -m generated --minutes 1.5 --report --no-shrink $(if $(SEED),--seed $(SEED))
	PYTHONPATH=.:tests/lib .venv/bin/python -m generated.decisions --minutes 0.5 --report $(if $(SEED),--seed $(SEED))
	PYTHONPATH=.:tests/lib .venv/bin/python -m generated.words --minutes 1 --report --no-shrink $(if $(SEED),--seed $(SEED))

# What holds the library to JAX under flags, to random programs and to tables runs on one release alone, for time's sake;
# so do the pages.
ONE_RELEASE = $(BESIDE_PAGES) \
	$(foreach name,flags generated leaks primitives what_works words,--ignore tests/promises/test_$(name).py)

# Each test function runs on these releases, and an eighteenth of its cases: all cases run on the main one.
test-oldest test-newest: export TREESCAN_RELEASE_SHARE := 18

test-matrix: test-oldest test-newest ## The everyday tests, an eighteenth of their cases, on the oldest and the newest Python and JAX.

test-oldest: .venvs/oldest/.group-test
	$(call tests,.venvs/oldest/bin/python,not slow,$(ONE_RELEASE))

test-newest: .venvs/newest/.group-test
	$(call tests,.venvs/newest/bin/python,not slow,$(ONE_RELEASE))

bench: .venv/.group-bench ## Runs the benchmarks and writes benchmarks/results/*.json.
	.venv/bin/python -m benchmarks

mutants: .venv/.group-test ## Changes the package in 60 places, one at a time: do the tests notice?
	.venv/bin/python scripts/mutants.py $(MUTANTS_ARGS)

docs: .venv/.group-docs ## Builds the documentation into site/.
	.venv/bin/mkdocs build --strict --quiet

serve: .venv/.group-docs ## Serves the documentation while you write it.
	.venv/bin/mkdocs serve

check: .venv/.group-lint ## Lint, format and types.
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/pyright --pythonpath .venv/bin/python
	.venv/bin/mypy

format: .venv/.group-lint ## Formats the code and fixes what ruff can fix.
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

clean: ## Removes the environments and all that was built.
	rm -rf .venv .venvs site dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Environments. An empty file in each says what is installed there; a newer pyproject.toml installs it again.
# pip 25.1 is the first that knows --group.

.venv/.python: INTERPRETER :=
.venvs/oldest/.python: INTERPRETER := 3.11
.venvs/newest/.python: INTERPRETER := newest

%/.python: scripts/find_python.sh
	python=$$(scripts/find_python.sh $(INTERPRETER)) && "$$python" -m venv --clear $*
	$*/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	touch $@

.venv/.runtime: .venv/.python pyproject.toml
	.venv/bin/python -m pip install --quiet --editable .
	touch $@

.venv/.group-%: .venv/.python pyproject.toml
	.venv/bin/python -m pip install --quiet --editable . --group $*
	touch $@

.venvs/oldest/.group-test: .venvs/oldest/.python pyproject.toml requirements/oldest.txt
	.venvs/oldest/bin/python -m pip install --quiet --editable . --group test --constraint requirements/oldest.txt
	touch $@

.venvs/newest/.group-test: .venvs/newest/.python pyproject.toml
	.venvs/newest/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable . --group test
	touch $@
