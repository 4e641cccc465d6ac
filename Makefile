# Each target builds what it needs first; stamps make that free when nothing has changed.
#
#   make test                                  in .venv, made here with the pinned packages
#   make test-gpu VENV= PYTHON=python3         with that Python as it is: no venv, no pip, no network
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2
GPUS ?= 2
RANKS ?= 2

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# No built-in rules: make would link csrc/bindings from csrc/bindings.cpp.
.SUFFIXES:
# The extension is compiled by ninja, which runs in parallel on its own.
.NOTPARALLEL:

PY := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
ENVIRONMENT := $(if $(VENV),$(VENV)/.complete)
# Apart, so that it needs neither torch nor the extension.
DOCS_PY := $(if $(VENV),$(VENV)-docs/bin/python,$(PYTHON))
DOCS_ENVIRONMENT := $(if $(VENV),$(VENV)-docs/.complete)
BUILT := build/.built-$(subst /,-,$(PY))
# Folders too: their times change when a file in them comes or goes.
SOURCES := setup.py pyproject.toml $(shell find csrc tests/interpreter)
CPP = $$(find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help build test test-gpu test-tsan lint format docs demo train check bench bench-all bench-async bench-fp8 bench-layers clean distclean

help: ## this list
	@echo "usage: make TARGET [ARGS='...'] [PYTHON=python3] [VENV=.venv]"
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16
	@echo "ARGS goes to the program that is run: make test ARGS='-k ring -x'"
	@echo "WORKERS=0 runs one test at a time: make test WORKERS=0 ARGS=-s"
	@echo "VENV= takes PYTHON as it is, with the packages it has: make test-gpu VENV= PYTHON=python3"

build: $(BUILT) ## the extension, in place, and .venv with all it needs

# Ranks mostly wait for each other, so two files at once take little longer than one; those for GPUs go one by one.
test: $(BUILT) ## the whole test suite; GPU tests are skipped where there are fewer GPUs than they need
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(ARGS)

test-gpu: $(BUILT) ## the tests that need GPUs
	$(PY) -m pytest -m gpu $(ARGS)

test-tsan: ## the host executor without torch: under ThreadSanitizer, a seeded race it must report, ranks that die
	$(MAKE) --no-print-directory -C tests/tsan BUILD=$(CURDIR)/build/tsan run seeded processes

lint: $(ENVIRONMENT) ## ruff and clang-format; changes nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	PATH=$(dir $(PY)):$$PATH clang-format --dry-run -Werror $(CPP)

format: $(ENVIRONMENT) ## formats all sources in place
	$(PY) -m ruff check --fix-only --quiet .
	$(PY) -m ruff format .
	PATH=$(dir $(PY)):$$PATH clang-format -i $(CPP)

docs: $(DOCS_ENVIRONMENT) ## the documentation as a site in build/docs; a wrong link is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS_PY) -m mkdocs build --strict

demo: $(BUILT) ## the main job: a tensor-parallel MLP over real text, compared with one process
	$(PY) -m streamoverlap demo $(ARGS)

train: $(BUILT) ## the example: trains a small GPT on RANKS ranks (default 2)
	PYTHONPATH=$(CURDIR) $(PY) -m torch.distributed.run --standalone --nproc-per-node $(RANKS) examples/train_gpt.py $(ARGS)

check: $(BUILT) ## checks every plan of every builder for 1 to 16 ranks
	$(PY) -m streamoverlap check --world 1-16 $(ARGS)

bench: $(BUILT) ## each shape on GPUS GPUs (default 2): table, picture, JSON in benchmarks/results; no GPU: a smoke test
	PYTHONPATH=$(CURDIR) $(PY) benchmarks/overlap.py --ranks $(GPUS) $(ARGS)

bench-fp8: $(BUILT) ## the same in float8, with scales row-wise, then tensor-wise
	for scaling in row tensor; do \
	    PYTHONPATH=$(CURDIR) $(PY) benchmarks/overlap.py --ranks $(GPUS) --scaling $$scaling $(ARGS) || exit; done

bench-all: $(BUILT) ## GPU tests, all benchmarks, ring and direct, simulated and measured; ships what was tuned; GPUS=4
	PY=$(PY) benchmarks/everything.sh $(GPUS) $(ARGS)

bench-async: $(BUILT) ## how well asynchronous collectives hide behind an independent GEMM, on GPUS GPUs (default 2)
	PYTHONPATH=$(CURDIR) $(PY) -m torch.distributed.run --nproc-per-node $(GPUS) benchmarks/async_overlap.py $(ARGS)

bench-layers: $(BUILT) ## linear layers of blocks, forward and backward, beside NCCL and async-TP, on GPUS GPUs (default 2)
	PYTHONPATH=$(CURDIR) $(PY) -m torch.distributed.run --nproc-per-node $(GPUS) benchmarks/layers.py $(ARGS)

clean: ## removes what was built, keeps .venv
	rm -rf build dist *.egg-info streamoverlap/*.so streamoverlap/_built.json

distclean: clean ## removes .venv as well
	rm -rf .venv .venv-docs .pytest_cache .ruff_cache .hypothesis

# The mark is set last: an environment that was left half-made has none and is made anew.
$(VENV)/.complete: requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "streamoverlap: found Python " \
	    + sys.version.split()[0] + "; needed is 3.10 or newer (set PYTHON to another one)")'
	@[ -e $@ ] || $(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); \
	    echo "streamoverlap: '$(PYTHON) -m venv' failed; it needs the venv module (Debian: apt-get install python3-venv)"; \
	    exit 1; } >&2
	@rm -f $@
	@echo "streamoverlap: installing requirements-dev.txt into $(VENV): some 5 GB, a few minutes"
	$(PY) -m pip install -qq --disable-pip-version-check -r requirements-dev.txt
	@touch $@

$(VENV)-docs/.complete: requirements-docs.txt
	@rm -f $@
	$(PYTHON) -m venv --clear $(VENV)-docs
	$(DOCS_PY) -m pip install -qq --disable-pip-version-check -r requirements-docs.txt
	@touch $@

# The stamp has the time when the build began: what is edited meanwhile is newer and built next time.
$(BUILT): $(SOURCES) $(ENVIRONMENT)
	@mkdir -p build && touch $@.begun
	$(PY) setup.py --quiet build_ext --inplace
	@mv $@.begun $@
