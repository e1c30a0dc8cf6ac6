# make demo | setup | test | test-quick | lint | bench | clean. Needs Python >= 3.11, git and make; the rest is installed
# into .venv. Choose the interpreter with PYTHON=, the environment's folder with VENV=.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

ifndef PYTHON
PYTHON := $(shell for python in python3.11 python3.12 python3.13 python3; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$python; break; fi; done)
endif
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.oneflax-ready
READY_TEST := $(VENV)/.oneflax-ready-test
MAKING := $(VENV)/.oneflax-making

export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Tests run on 8 virtual CPU devices. NPROC sizes XLA's thread pool: with fewer threads than the devices' queued
# collectives need, jax 0.10 waits for ever.
test test-quick test-newest: export NPROC ?= 32
test test-quick test-newest bench: export JAX_PLATFORMS ?= cpu
test test-quick test-newest: export XLA_FLAGS ?= --xla_force_host_platform_device_count=8

.PHONY: help demo setup test test-quick test-newest lint bench clean venv-locked

help:
	@echo "make demo          train a small model on 8 virtual CPU devices, or on GPUs (ARGS=\"--devices 1\" passes flags on)"
	@echo "make setup         install everything, and nothing else (EXTRAS=cuda12 or cuda13 chooses jax's CUDA plugin)"
	@echo "make test          lint, type check and the whole test suite"
	@echo "make test-quick    the quick tests, under a minute"
	@echo "make lint          ruff check, ruff format --check, pyright"
	@echo "make bench         the benchmarks (ARGS passes flags on)"
	@echo "make clean         remove everything that make made"

demo: $(READY)
	@$(BIN)/python -m oneflax demo $(ARGS)

setup: $(READY_TEST)

lint: $(READY_TEST)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python

test: lint
	@$(BIN)/python -m pytest $(ARGS)

test-quick: $(READY_TEST)
	@$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-newest: $(READY_TEST)
	@$(BIN)/python -m pytest -m newest $(ARGS)

bench: $(READY_TEST)
	@$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf .venv .venv-newest build dist out *.egg-info .pytest_cache .ruff_cache .hypothesis .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Environments. The stamp is written last, so an interrupted install is never taken for a complete one: it leaves
# $(MAKING) behind, and the next run starts afresh. One make at a time installs, under a file lock that ends with the
# process; a second make waits, then finds the stamp up to date.
LOCKED := -c 'import fcntl, os, sys; fd = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR); os.set_inheritable(fd, True); \
	fcntl.flock(fd, fcntl.LOCK_EX); os.execvp(sys.argv[2], sys.argv[2:])'

ifdef VENV_LOCKED
$(READY): pyproject.toml
	$(call install,,$(READY))
$(READY_TEST): pyproject.toml
	$(call install,test,$(READY) $(READY_TEST))
else
$(READY) $(READY_TEST): pyproject.toml
	@if [ -z "$(PYTHON)" ]; then echo "oneflax needs Python 3.11 or newer: install it, or name one with PYTHON=/path/to/python" >&2; exit 1; fi
	@mkdir -p .cache && "$(PYTHON)" $(LOCKED) .cache/venv.lock $(MAKE) -s VENV_LOCKED=1 PYTHON="$(PYTHON)" VENV="$(VENV)" $@
endif

# $(call install,extra,stamps). Where there is an NVIDIA GPU, jax's CUDA plugin comes with it: the newest that the driver
# takes, by the CUDA version that nvidia-smi prints. EXTRAS=cuda12 takes that one, and EXTRAS= none.
define install
@if [ -e $(MAKING) ]; then rm -rf "$(VENV)"; fi
@if ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	echo "oneflax needs Python 3.11 or newer; $(PYTHON) is older, or does not run" >&2; exit 1; fi
@if ! "$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null; then \
	version=$$("$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	echo "$(PYTHON) cannot make virtual environments: its module ensurepip or venv is missing." >&2; \
	echo "On Debian and Ubuntu: sudo apt-get install python$$version-venv" >&2; exit 1; fi
@echo "installing oneflax into $(VENV) (the first time takes a few minutes)"
@mkdir -p "$(VENV)" && touch $(MAKING) && rm -f $(READY) $(READY_TEST)
@if [ ! -x $(BIN)/python ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then "$(PYTHON)" -m venv "$(VENV)"; fi
@extras="$(EXTRAS)"; if [ "$(origin EXTRAS)" = undefined ] && nvidia-smi -L >/dev/null 2>&1; then \
	cuda=$$(nvidia-smi | sed -n 's/.*CUDA [A-Za-z ]*Version: *\([0-9][0-9]*\).*/\1/p' | head -n 1); \
	case "$$cuda" in 12) extras=cuda12;; 1[3-9]) extras=cuda13;; esac; \
	echo "a GPU is here, and its driver takes CUDA $${cuda:-of an unknown version}: installing with" \
		"$${extras:-no CUDA plugin} (EXTRAS=cuda12 or EXTRAS=cuda13 chooses)"; fi; \
	all=$$(echo $(1) $$extras | tr ' ' ,); \
	$(BIN)/python -m pip install --quiet --editable ".$${all:+[$$all]}"
@touch $(2) && rm -f $(MAKING)
endef
