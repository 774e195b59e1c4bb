# Two commands matter: `make demo` shows a measured speed-up, `make test` proves the claims.
# Both need Python 3.10 or newer and a package registry, nothing else.

PYTHON ?= python3
VENV ?= .venv
DEMO_VENV ?= .venv-demo
DEMO_RUN ?= runs/demo
DEMO_PRUNED ?= $(DEMO_RUN)-pruned
# One single-threaded process per core is fastest, for training and for tests: matrices are small.
PROCESSES ?= 2

# Spinning OpenMP threads would fight the other core for nothing.
export OMP_WAIT_POLICY := passive
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Byte code is made for what gets imported, when it is; for all of torch it takes half a minute.
INSTALL := pip install --quiet --no-compile
TEST_BIN := $(VENV)/bin
# A file stays in one process: what its tests share is made once.
PYTEST := $(TEST_BIN)/python -m pytest -n $(PROCESSES) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help demo demo-drafter demo-pruned test test-slow test-kernels lossless oracles lint docs notebooks clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-13s %s\n", $$1, $$2}'

demo: demo-drafter demo-pruned  ## distil drafters for the shipped target, measure the speed-up

DISTILL = OMP_NUM_THREADS=1 $(DEMO_VENV)/bin/torchrun --standalone --nproc-per-node $(PROCESSES) \
	-m dspark distill
BENCH = $(DEMO_VENV)/bin/python -m dspark bench --batch 1 --draft-length 7 \
	--temperature 0 --temperature 1 --threads 1

demo-drafter: $(DEMO_VENV)/.installed  ## first stage: a drafter from scratch, in the layout engines serve
	$(DISTILL) --out $(DEMO_RUN) $(if $(wildcard $(DEMO_RUN)/run.yaml),--resume)
	$(BENCH) --draft $(DEMO_RUN) --peer --json $(DEMO_RUN)/bench.json --plot $(DEMO_RUN)/bench.png

# The same prompts and settings, so the answers of the first stage serve the second.
demo-pruned: demo-drafter  ## second stage: layers of the target, pruned, linearised and distilled
	test -d $(DEMO_PRUNED)/rows || { mkdir -p $(DEMO_PRUNED) && cp -R $(DEMO_RUN)/rows $(DEMO_PRUNED)/rows; }
	$(DISTILL) --preset kda-pruned --out $(DEMO_PRUNED) \
		$(if $(wildcard $(DEMO_PRUNED)/run.yaml),--resume)
	$(BENCH) --draft $(DEMO_PRUNED) --json $(DEMO_PRUNED)/bench.json --plot $(DEMO_PRUNED)/bench.png

test: $(VENV)/.oracles  ## the fast tier on CPU (under 15 minutes on 2 cores)
	$(PYTEST) -m "not slow and not gpu"

test-slow: $(VENV)/.oracles  ## the slow tier on CPU
	$(PYTEST) --no-loadscope-reorder -m "slow and not gpu"

# Triton in a folder of its own: beside fla it makes models of transformers look for a GPU.
TRITON := triton==3.6.0
KERNEL_TESTS := tests/test_kernel_*.py tests/test_static_kernels.py tests/test_ops.py

test-kernels: $(VENV)/.triton  ## every kernel in Triton's interpreter, against float64
	PYTHONPATH=$(abspath $(VENV))/triton $(PYTEST) -m "not gpu" $(KERNEL_TESTS)

$(VENV)/.triton: $(VENV)/.installed
	$(VENV)/bin/python -m $(INSTALL) --no-deps --target $(VENV)/triton $(TRITON)
	touch $@

lossless: $(VENV)/.installed  ## does what comes out have the target's law? the whole suite, minutes
	OMP_NUM_THREADS=1 $(TEST_BIN)/python -m dspark_eval.lossless --full

oracles: $(VENV)/.oracles  ## install the pinned peers that tests compare with

lint: $(VENV)/.installed  ## ruff check, ruff format, mypy
	$(TEST_BIN)/ruff check .
	$(TEST_BIN)/ruff format --check .
	$(TEST_BIN)/mypy

# From the repository's root, as the notebooks' own paths are; what they put out is not written back.
EXECUTE = OMP_NUM_THREADS=1 $(abspath $(TEST_BIN))/jupyter execute --timeout=900
NOTEBOOKS := notebooks/02_acceptance_analysis.ipynb notebooks/03_calibration_and_policies.ipynb \
	notebooks/04_pruning_and_linearisation.ipynb notebooks/05_speed_model.ipynb

notebooks: $(VENV)/.notebooks  ## execute every notebook; the first distils the drafter of the others
	$(EXECUTE) notebooks/01_quickstart.ipynb
	printf '%s\n' $(NOTEBOOKS) | xargs -P $(PROCESSES) -n 1 env $(EXECUTE)

$(VENV)/.notebooks: $(VENV)/.installed
	$(VENV)/bin/python -m $(INSTALL) -e ".[notebooks]" -c constraints.txt
	touch $@

docs: $(VENV)/.docs  ## the documentation, built into site/; stale reference pages are an error
	$(TEST_BIN)/python docs/make_reference.py --check
	NO_MKDOCS_2_WARNING=1 $(TEST_BIN)/mkdocs build --quiet

$(VENV)/.docs: $(VENV)/.installed
	$(VENV)/bin/python -m $(INSTALL) -e ".[docs]" -c constraints.txt
	touch $@

clean:  ## remove environments, caches and builds; runs/ stays
	rm -rf .venv .venv-demo build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch has its own line: the pinned version first, so that resolving the rest cannot pick a newer
# and much larger one.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m $(INSTALL) torch==2.13.0
	$(VENV)/bin/python -m $(INSTALL) -e ".[dev]" -c constraints.txt
	touch $@

$(VENV)/.oracles: $(VENV)/.installed requirements/oracles.txt
	$(VENV)/bin/python -m $(INSTALL) --no-deps -r requirements/oracles.txt
	touch $@

$(DEMO_VENV)/.installed: pyproject.toml constraints.txt
	test -x $(DEMO_VENV)/bin/python || $(PYTHON) -m venv $(DEMO_VENV)
	$(DEMO_VENV)/bin/python -m $(INSTALL) torch==2.13.0
	$(DEMO_VENV)/bin/python -m $(INSTALL) -e . -c constraints.txt
	touch $@
