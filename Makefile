# `make demo` and `make test` do all the set-up themselves, in .venv and .venv-sglang; `make help` lists the rest.

VENV ?= .venv
# The Python to use: 3.11 or newer, found where it is not given.
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
# Arguments of pip for every install, and for torch alone (such as an index with CPU builds).
PIP_ARGS ?=
TORCH_ARGS ?=
# Where SGLang's wheels install, tests run against it too, in an environment of its own; `make test SGLANG=` does not.
SGLANG ?= $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m))
SGLANG_VENV ?= .venv-sglang
# Test processes, and arguments for pytest.
JOBS ?= 2
PYTEST_ARGS ?=
SGLANG_PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS)
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_PIP := $(SGLANG_BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS)
# Named by the lock's contents, so that only another lock makes another environment.
SGLANG_STAMP := $(SGLANG_VENV)/.lock-$(firstword $(shell cksum < requirements/sglang.lock))
# Releases of SGLang that the hook contract covers. Their wheels are read, never installed; any folder of them will do.
SGLANG_VERSIONS := 0.5.17 0.5.18 0.5.19 0.5.20 0.5.21 0.5.22 0.5.23
SGLANG_WHEELS ?= build/sglang-wheels
export PIP_ROOT_USER_ACTION := ignore

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-sglang contract lint wheel clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.runtime ## answer three prompts with and without draft trees, side by side
	$(BIN)/ddtree demo

test: $(VENV)/.dev ## run the tests that need neither a GPU nor the network
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) $(PYTEST_ARGS)
	@$(if $(SGLANG),$(MAKE) --no-print-directory test-sglang,echo "without the tests against SGLang: its wheels are for Linux on x86-64")

test-sglang: $(SGLANG_VENV)/.ddtree ## run the plugin's tests in the SGLang of requirements/sglang.lock, on the CPU
	OMP_NUM_THREADS=1 $(SGLANG_BIN)/python -m pytest -q -n $(JOBS) --dist loadfile tests/sglang_live $(SGLANG_PYTEST_ARGS)

contract: $(VENV)/.dev ## download SGLang's releases, write their signatures anew, check the hook contract
	@for version in $(SGLANG_VERSIONS); do \
		ls $(SGLANG_WHEELS)/sglang-$$version-*.whl > /dev/null 2>&1 && continue; echo "downloading sglang $$version"; \
		$(BIN)/python -m pip --disable-pip-version-check download --quiet $(PIP_ARGS) --no-deps --only-binary=:all: \
			--python-version 3.12 --platform any --platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 \
			--platform manylinux2014_x86_64 --dest $(SGLANG_WHEELS) sglang==$$version || exit 1; \
	done
	$(BIN)/python scripts/make_sglang_signatures.py $(SGLANG_WHEELS)
	$(BIN)/python -m pytest -q tests/sglang_plugin/test_contract.py tests/sglang_plugin/test_contract_usage.py

# Small settings of the programs in benchmarks/; their full ones are the defaults. GPU_PYTHON has SGLang with its CUDA
# torch, transformers, pytest, hypothesis and this package, or this folder's src on PYTHONPATH.
GPU_PYTHON ?= python3
GPU_RESULTS ?= build/gpu
GPU_CHECK = $(GPU_PYTHON) benchmarks
.PHONY: test-gpu
test-gpu: ## with GPU_PYTHON, a Python that has SGLang: tests and checks that need a GPU, a quarter of an hour
	$(GPU_PYTHON) -m pytest -q -m gpu $(PYTEST_ARGS)
	$(GPU_CHECK)/check_sglang_kv_move.py --output $(GPU_RESULTS)/kv_move.json
	$(GPU_CHECK)/check_sglang_replay.py --prompts 16 --faults kv mask positions --output $(GPU_RESULTS)/replay.json
	$(GPU_CHECK)/check_sglang_draws.py --draws 20000 --fault-draws 20000 --plain-draws 5000 --output $(GPU_RESULTS)/draws.json
	$(GPU_CHECK)/check_sglang_soak.py --minutes 2 --eps-from $(GPU_RESULTS)/replay.json --output $(GPU_RESULTS)/soak.json
	$(GPU_CHECK)/bench_sglang.py --prompts 8 --repeats 1 --output $(GPU_RESULTS)/bench.json
	$(GPU_CHECK)/profile_sglang_round.py --arms dflash ddtree:31 --concurrency 1 8 --output $(GPU_RESULTS)/profile.json

lint: $(VENV)/.dev ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel: $(VENV)/.dev ## build the wheel into dist/
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

clean: ## remove what make made here
	rm -rf $(VENV) $(SGLANG_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# SGLang's own requirements are for CUDA: the lock is all that is installed (requirements/sglang.in says why).
# torch alone comes with its requirements, which differ from build to build.
$(SGLANG_STAMP): | $(VENV)/.python
	@echo "installing requirements/sglang.lock into $(SGLANG_VENV), two minutes the first time"
	@rm -rf $(SGLANG_VENV)
	@$(BIN)/python -m venv $(SGLANG_VENV)
	$(SGLANG_PIP) --constraint requirements/sglang.lock $(TORCH_ARGS) $$(grep '^torch==' requirements/sglang.lock)
	$(SGLANG_PIP) --no-deps -r requirements/sglang.lock
	@touch $@

# Editable, so that tests see the sources; again when its entry points may have changed.
$(SGLANG_VENV)/.ddtree: $(SGLANG_STAMP) pyproject.toml
	$(SGLANG_PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found: install it, or give its path: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11, or no Python: give another: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV) || { echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian, Ubuntu: python3-venv)" >&2; exit 1; }
	@touch $@

# The larger lock holds the smaller one's versions, so that either may come first.
$(VENV)/.runtime $(VENV)/.dev: $(VENV)/.%: requirements/%.lock pyproject.toml $(VENV)/.python
	@echo "installing $< into $(VENV), a few minutes the first time"
ifneq ($(TORCH_ARGS),)
	$(PIP) $(TORCH_ARGS) $$(grep '^torch==' $<)
endif
	$(PIP) -r $<
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@
