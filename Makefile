# Each target does its own set-up in .venv, once: `make serve` in an empty clone is enough.
#   PYTHON=python3.12      another interpreter (3.11 or later)
#   TORCH_INDEX=URL        another package index for torch alone: a CPU-only or another CUDA build

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(if $(shell command -v $(name)),$(name))))
TORCH_INDEX ?=
PEERS ?= $(HOME)/.cache/kagari/peers
CLIENTS ?= $(HOME)/.cache/kagari/clients

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/pip --disable-pip-version-check --no-input
BENCHMARKS := engine kv_pages text gateway store tiering tiers cluster_store transfer pd routing affinity fairness
QUIET := $(if $(CI),--quiet,)

# Tests start hundreds of processes; what a module compiles to is kept for the next of them.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install packages kernels serve test types collect style demo prove peers clients model clean
.DEFAULT_GOAL := install

install: $(STAMP)

$(VENV)/bin/python:
	@sh .ci/make-venv "$(PYTHON)" "$(VENV)"

# The kernels need a compiler and no package, so they are compiled while packages come; packages are
# compiled on all cores, where pip would on one.
$(STAMP): $(VENV)/bin/python pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory -j 2 packages kernels
	@$(BIN)/python -m engine.execute.kernels.cpu || true  # without a compiler torch serves alone
	@touch $@

packages: $(VENV)/bin/python
	$(PIP) install --no-compile $(QUIET) -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) install --no-compile $(QUIET) -c constraints.txt -e '.[node,mooncake,dev]'
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true  # templates are no Python

kernels: $(VENV)/bin/python
	@$(BIN)/python -c 'from engine.execute.kernels.cpu.build import library_file; library_file()' \
	  2>/dev/null || true

model: $(STAMP)
	@$(BIN)/kagari models pull smollm2-135m

serve: $(STAMP)
	@exec $(BIN)/kagari serve $(ARGS)

demo: $(STAMP) model
	@exec $(BIN)/kagari demo $(ARGS)

test: $(STAMP)
	@$(MAKE) --no-print-directory -j 2 --output-sync=target types collect style model
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu" $(ARGS)

types: $(STAMP)
	$(BIN)/mypy

# Beside the types, tests are compiled once, which each of pytest's processes would do again.
collect: $(STAMP)
	@$(BIN)/pytest --collect-only -qq >/dev/null || true  # the run itself says what is wrong

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Full counts and every headline number: long, on an otherwise idle machine.
prove: $(STAMP) model clients
	@$(BIN)/kagari models pull gemma3-270m
	KAGARI_CLIENTS="$(CLIENTS)" $(BIN)/pytest -m "slow and not gpu"
	$(BIN)/kagari demo --check
	@set -e; for name in $(BENCHMARKS); do \
	  echo "benchmarks.$$name"; $(BIN)/python -m benchmarks.$$name; done

# Peers that the benchmarks compare with, each in an environment of its own, made once: all of them,
# or PEER="NAME …". Their versions are in benchmarks/peers/catalogue.py.
PEER ?=
export PEERS TORCH_INDEX

peers: $(STAMP)
	@$(BIN)/python -m benchmarks.peers $(PEER)

# Programs of others that tests run against a whole Kagari, each in a folder of its own, made once.
OPENCODE := opencode-ai@1.18.33
PI := @mariozechner/pi-coding-agent@0.73.1
LM_EVAL := lm-eval[api]==0.4.13

clients: $(CLIENTS)/opencode/.installed-1.18.33 $(CLIENTS)/pi/.installed-0.73.1 \
  $(CLIENTS)/lm-eval/.installed-0.4.13
	@echo "$(OPENCODE) ($(CLIENTS)/opencode)"
	@echo "$(PI) ($(CLIENTS)/pi)"
	@echo "$(LM_EVAL) ($(CLIENTS)/lm-eval)"

$(CLIENTS)/opencode/.installed-1.18.33: PACKAGE := $(OPENCODE)
$(CLIENTS)/pi/.installed-0.73.1: PACKAGE := $(PI)
$(CLIENTS)/opencode/.installed-1.18.33 $(CLIENTS)/pi/.installed-0.73.1:
	@mkdir -p "$(@D)"
	@npm install --no-audit --no-fund --loglevel=error --prefix "$(@D)" $(PACKAGE) || { \
	  echo "error: clients" >&2; \
	  echo "  found:   $(PACKAGE) cannot be installed (above)" >&2; \
	  echo "  allowed: npm with Node 20.6 or later, and the package in its registry" >&2; \
	  echo "  remedy:  install Node, give npm a registry that has it, then make clients again" >&2; \
	  exit 1; }
	@touch $@

# torch and transformers are those of the development environment, so that only lm-eval differs.
$(CLIENTS)/lm-eval/.installed-0.4.13:
	@mkdir -p "$(CLIENTS)"
	@sh .ci/make-venv "$(PYTHON)" "$(@D)"
	@pip="$(@D)/bin/pip --disable-pip-version-check --no-input"; \
	$$pip install --quiet -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch && \
	$$pip install --quiet -c constraints.txt "$(LM_EVAL)" transformers accelerate || { \
	  echo "error: clients" >&2; \
	  echo "  found:   $(LM_EVAL) cannot be installed (above)" >&2; \
	  echo "  allowed: lm-eval, torch and transformers from a package index" >&2; \
	  echo "  remedy:  give pip an index that has them (PIP_INDEX_URL), then make clients again" >&2; \
	  exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
