# `make demo` and `make test` do all the set-up themselves, in .venv; `make help` lists the rest.

VENV ?= .venv
# The Python to use: 3.11 or newer, found where it is not given.
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
# Arguments of pip for every install, and for torch alone (such as an index with CPU builds).
PIP_ARGS ?=
TORCH_ARGS ?=
# Test processes, and arguments for pytest.
JOBS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS)
export PIP_ROOT_USER_ACTION := ignore

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint wheel clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.runtime ## answer three prompts with and without draft trees, side by side
	$(BIN)/ddtree demo

test: $(VENV)/.dev ## run the tests that need neither a GPU nor the network
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) $(PYTEST_ARGS)

lint: $(VENV)/.dev ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel: $(VENV)/.dev ## build the wheel into dist/
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

clean: ## remove what make made here
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

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
