# make setup   a virtual environment in .venv with everything the tests, the demo and the benchmark need
# make test    lint and all tests (what CI runs)
# make nightly the tests that are too long for each run: the long forms of soaks and chaos, whole products of cases, benchmarks
# make quick   the tests of what users see and of the protocols, in a minute or so, without lint
# make test-nemo   the tests with real NeMo on a CPU, in a virtual environment of their own (4 minutes and 2 GB, once: make nemo-setup)
# make lint    ruff (rules and format), mypy --strict, import rules
# make conformance   Lightning's own tests with our classes in place, where they lie in ../shared/conformance
# make demo    a training job whose processes are killed ends as if nothing had happened; another one outlives its hosts
# make bench   the checkpoint benchmark
# make gpu     what the engine does on one GPU, in one table; GPU_PY=python3 where torch is installed for all, GPU="--device cpu" without a GPU
# make clean   remove what the above made

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMP := $(VENV)/.setup-done
TORCH ?= torch==2.13.0
# The first that can is taken. A distribution's is built with profile-guided optimization, one that a version manager built
# from source often without: an agent's imports take it 1.4 times as long, those of Lightning 1.1 times.
PYTHONS ?= /usr/bin/python3 python3.11 python3
# Twice as many as CI has cores: tests wait for processes and disks for a good part of their time.
WORKERS ?= 4
# Of Lightning's own tests, some of which measure time.
CONFORMANCE_WORKERS ?= 2
# A worker that has finished takes over tests of the others; until then each keeps to its own files and their fixtures.
# With all cores busy, threads of tensor operations would only wait for each other (a tenth of all processor time).
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) --dist worksteal
# The tests start hundreds of interpreters: with this variable set each of them would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup test nightly quick nemo-setup test-nemo lint collected conformance demo bench gpu clean

help:
	@grep -E '^# make' Makefile | cut -c3-

setup: $(STAMP)

# torch goes first, from the index this machine is configured with (on many machines the CPU build); the editable
# install then finds its requirement met and leaves it alone.
$(STAMP): setup.py pyproject.toml
	@missing=(); \
	command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null || missing+=(chromium); \
	command -v mkfs.btrfs > /dev/null || missing+=(btrfs-progs); \
	command -v mkfs.xfs > /dev/null || missing+=(xfsprogs); \
	if [ "$${#missing[@]}" != 0 ]; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$${missing[@]}" \
	      || echo "make setup: $${missing[*]} could not be installed; tests that need them will be counted, not run" >&2; \
	  else \
	    echo "make setup: no $${missing[*]} here; tests that need them will be counted, not run" >&2; \
	  fi; \
	fi
	@if ! [ -x $(PY) ]; then \
	  for python in $(PYTHONS); do \
	    if "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' 2> /dev/null; then found="$$python"; break; fi; \
	  done; \
	  [ -n "$${found:-}" ] || { echo "make setup: none of $(PYTHONS) is a Python of 3.10 or newer with the venv module; name one: make setup PYTHONS=..." >&2; exit 1; }; \
	  "$$found" -m venv $(VENV); \
	fi
	$(PIP) install --quiet '$(TORCH)'
	$(PIP) install --quiet -e '.[dev]'
	@touch $(STAMP)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

test: $(STAMP)
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint collected
	$(PYTEST)

# Every one that `make test` leaves out.
nightly: $(STAMP)
	$(PYTEST) -m nightly

# What a change breaks first: what users call and read, what is on disk, what processes tell each other.
QUICK := tests/docs tests/compat/test_names.py tests/packaging/test_imports.py tests/preemption tests/cli/test_ckpt.py tests/cli/test_paths.py \
  tests/callbacks/test_drop_in.py tests/callbacks/test_against_stock.py tests/callbacks/test_auto_resume.py tests/callbacks/test_arguments.py \
  tests/checkpoint/test_checkpointer.py tests/plugins/test_checkpoint_io.py \
  tests/storage/test_format.py tests/storage/test_manifest.py tests/storage/test_restore_plan.py tests/storage/tiers/test_local.py \
  tests/agent/test_protocol.py tests/agent/test_core.py tests/launch/test_run.py tests/launch/test_restarts.py \
  tests/runtime/test_messages.py tests/runtime/test_launcher_messages.py \
  tests/supervisor/test_controller.py tests/supervisor/test_supervisor_settings.py tests/goodput/test_cli.py tests/goodput/test_json_schema.py
quick: $(STAMP)
	$(PYTEST) -m "not kill and not long" $(QUICK)

# NeMo is pinned to versions that fit each other on a CPU; with its own requirements it would bring CUDA.
NEMO := .venv-nemo
NEMO_STAMP := $(NEMO)/bin/.setup-done
NEMO_PYTHON ?= python3.11
NEMO_PIP = $(NEMO)/bin/python -m pip --disable-pip-version-check install --quiet
nemo-setup: $(NEMO_STAMP)
$(NEMO_STAMP): tests/nemo/requirements.txt
	@[ -x $(NEMO)/bin/python ] || $(NEMO_PYTHON) -m venv $(NEMO)
	$(NEMO_PIP) '$(TORCH)'
	$(NEMO_PIP) --no-deps nemo_toolkit==2.7.3 megatron-core==0.15.3 nvidia-resiliency-ext==0.4.1 wget==3.2
	$(NEMO_PIP) '$(TORCH)' -r tests/nemo/requirements.txt
	$(NEMO)/bin/python -m pip --disable-pip-version-check freeze > $(NEMO)/before
	$(NEMO_PIP) .
	@# This library must not change anything in such an environment.
	$(NEMO)/bin/python -m pip --disable-pip-version-check freeze | grep -vi '^resiliency' | diff $(NEMO)/before -
	$(NEMO)/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes resiliency
	@touch $@

test-nemo: $(STAMP) $(NEMO_STAMP)
	OMP_NUM_THREADS=1 RESILIENCY_TESTS_REQUIRE=nemo $(PY) -m pytest -q -n 2 -o faulthandler_timeout=800 tests/nemo

# Compiles the tests and all that they import once, beside mypy; otherwise each worker of a new clone would do it.
collected: $(STAMP)
	@said=$$($(PY) -m pytest --collect-only -qq 2>&1) || { tail -n 60 <<< "$$said"; exit 1; }

# All of it: CONFORMANCE="callback:lightning.pytorch callback:pytorch_lightning io:lightning.pytorch io:pytorch_lightning".
CONFORMANCE ?= callback:lightning.pytorch io:pytorch_lightning
conformance: $(STAMP)
	@for one in $(CONFORMANCE); do \
	  $(PY) -m tests.conformance ../shared/conformance --substitute "$${one%%:*}" --namespace "$${one#*:}" -n $(CONFORMANCE_WORKERS); \
	done

demo: $(STAMP)
	$(PY) -m recipes.quickstart.demo

bench: $(STAMP)
	$(PY) -m benchmarks.checkpoint

# Without setup: a machine with a GPU may have no network, and has its own torch.
GPU ?=
GPU_PY ?= $(PY)
gpu:
	$(GPU_PY) -m benchmarks.gpu $(GPU)

clean:
	rm -rf $(VENV) $(NEMO) build dist demo-run *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis lightning_logs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
