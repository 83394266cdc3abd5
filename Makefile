# Each target installs what it needs, once. Nothing else needs to be known.
#
#   make demo     talk to a small model on this machine, without a GPU; TINY=1: without a download
#   make serve    serve that model on 127.0.0.1:8000, until Ctrl-C
#   make check    lint, format, types
#   make test     the tests, the longest of them in a short form
#   make newcomer play README's commands in a fresh clone, a wheel, a Ray job, the examples
#   make coverage the unit tests, and which lines they run, by folder
#   make mutants  write small faults into the rules that keep answers right: do the tests notice?
#   make matrix   the suites that matter with each version of vLLM that disagg runs with; an hour
#   make vllm-next  what a version of vLLM lacks of all that we use: VLLM=0.34.0, or a wheel's path
#   make verify   check a model of the lease protocol: all interleavings, in about a minute
#   make bench    measure a handoff
#   make gpu      what only a GPU can show: tests of transports, and how fast they are
#   make soak     the long forms; many requests for a long time, faults and pressure all the while
#   make lock     write the installed versions to .ci/constraints.txt, which `make install` uses
#   make audit    look for known vulnerabilities in those versions (needs the internet)
#   make clean    remove all that make made

VENV := .venv
EXTRAS ?= cpu,dev
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CONFIG ?= serve_configs/cpu-1p1d.yaml
MODEL := .cache/models/smollm2-135m

# Run, not only found: a pyenv shim of a version that isn't installed is found too. Without a Python
# of these versions, uv gets one.
USABLE := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c '$(USABLE)' 2>/dev/null && echo $$p && break; done)

# uv reads wheel folders from a variable of its own. Without one, CPU torch (which isn't on PyPI)
# comes from PyTorch's index; that for GPUs is on PyPI.
ifdef PIP_FIND_LINKS
UV_SOURCE := UV_FIND_LINKS="$(PIP_FIND_LINKS)"
else ifeq (,$(findstring gpu,$(EXTRAS)))
UV_SOURCE := UV_TORCH_BACKEND=cpu
endif

# Those of torch and of what goes with a GPU depend on the machine.
LOCK := .ci/constraints.txt
# Our settings for uv leave out torchvision and its kin, whose builds on PyPI are for CUDA.
ifeq (,$(findstring gpu,$(EXTRAS)))
UV_CONFIG := --constraints $(LOCK)
else
UV_CONFIG := --no-config
endif

# Python keeps the modules that it compiled, also where the environment forbids it: tests start
# hundreds of processes, and each would compile all modules anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install demo serve check test coverage newcomer mutants matrix vllm-next verify bench gpu soak lock audit clean

install: $(INSTALLED)

# uv comes from PyPI by any Python, or is there already. What fails says so in one line.
$(INSTALLED): pyproject.toml $(LOCK) disagg/router/caches/native_keys.c
	@test -x $(BIN)/python || { test -n "$(PYTHON)" && $(PYTHON) -m venv $(VENV); } || \
		{ command -v uv >/dev/null && uv venv --quiet --seed --python 3.11 $(VENV); } || \
		{ echo "make: no Python 3.11 to 3.13 with venv here, and no uv that could get one:" \
			"install either (apt install python3.11-venv, or docs.astral.sh/uv)" >&2; \
			rm -rf $(VENV); exit 1; }
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv || \
		{ echo "make: uv could not be downloaded: check the network and pip's index" >&2; exit 1; }
	$(UV_SOURCE) $(BIN)/uv pip install --compile-bytecode --python $(BIN)/python $(UV_CONFIG) \
		-e ".[$(EXTRAS)]"
	touch $@

# The folder appears whole or not at all, so the file's presence says enough.
$(MODEL)/config.json: | $(INSTALLED)
	$(BIN)/disagg get-model smollm2-135m $(MODEL)

demo: $(INSTALLED)
	@$(BIN)/disagg demo $(if $(TINY),--tiny)

serve: $(INSTALLED) $(MODEL)/config.json
	@exec $(BIN)/disagg serve $(CONFIG)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Unit, transport and security tests wait more than they compute, so four processes share two cores.
# Engines start and stop one after the other, so two processes do. Each module is in one process,
# which starts once what its tests share. What takes longest comes first.
test: $(INSTALLED)
	@failed=0; \
	$(BIN)/pytest -n 4 --dist loadgroup --no-loadscope-reorder -m "not slow" \
		tests/transport tests/security tests/unit || failed=1; \
	$(BIN)/pytest -n 2 --dist loadgroup --no-loadscope-reorder --durations=20 -m "not slow" \
		tests/engine tests/cluster || failed=1; \
	$(BIN)/python tests/newcomer.py wheel || failed=1; \
	exit $$failed

# Counting lines takes two thirds more time, so `make test` does without.
coverage: $(INSTALLED)
	$(BIN)/pytest -n 4 --cov --cov-report= -m "not slow" tests/unit tests/transport tests/security
	$(BIN)/python tests/coverage_by_folder.py

# As somebody would who has just found this repository; an own clone, an own environment.
newcomer: $(INSTALLED)
	@$(BIN)/python tests/newcomer.py

# Half an hour or more; an interrupted run goes on. MUTANTS="--all store/host_index": all of one module.
mutants: $(INSTALLED)
	@$(BIN)/python tests/mutants.py $(MUTANTS)

# VLLM="0.31.0": one version; SUITES=exactness: one suite. Environments are in .cache/vllm-VERSION.
matrix: $(INSTALLED)
	@$(BIN)/python tests/vllm_matrix.py --vllm $(VLLM) --suites $(SUITES)

# Reads sources only, so a version for GPUs can be judged anywhere.
vllm-next: $(INSTALLED)
	@$(BIN)/python tests/vllm_next.py $(VLLM)

# Needs nothing but Python.
verify:
	@$(PYTHON) -m spec

bench: $(INSTALLED)
	@$(BIN)/disagg bench handoff --results benchmarks/results
	@$(BIN)/disagg bench pages

# Needs torch and cupy for the GPU, so any Python that has them will do. Engines are tried where
# vLLM is installed too. Warnings of other versions than ours are not errors here.
gpu:
	@for python in $(GPU_PYTHON) $(BIN)/python python3; do \
		$$python -c "import cupy, torch; assert torch.cuda.is_available()" 2>/dev/null || continue; \
		$$python -m pytest -W default -m "not slow" -k "cuda or nccl or device or models_stream" \
			tests/transport tests/unit/transport \
			tests/unit/connector/hidden_states/test_writing.py || exit; \
		! $$python -c "import vllm" 2>/dev/null || \
			$$python -m pytest -W default tests/engine/test_on_a_gpu*.py || exit; \
		exec $$python -m disagg.bench.transfer --device cuda; \
	done; \
	echo "no Python here has torch, cupy and a GPU: make install EXTRAS=gpu,dev, or name one" \
		"by GPU_PYTHON=..." >&2; exit 1

soak: $(INSTALLED)
	@$(BIN)/disagg bench soak
	@$(BIN)/disagg bench router-faults
	@$(BIN)/disagg bench router-faults --first-token prefill
	@$(BIN)/disagg bench heal --nodes 3 --clients 1
	@$(BIN)/disagg bench scale
	@$(BIN)/disagg bench faults --connectors disagg --fresh
	@$(BIN)/python tests/newcomer.py
	@DISAGG_TEST_PRESSURE=500 $(BIN)/pytest -m "slow or soak" tests

lock: $(INSTALLED)
	@{ head -1 $(LOCK); $(BIN)/uv pip freeze --python $(BIN)/python --exclude-editable \
		| grep == | grep -v "^torch=="; } > $(LOCK).new && mv $(LOCK).new $(LOCK)

audit: $(INSTALLED)
	$(BIN)/uv tool run pip-audit --disable-pip --no-deps --requirement $(LOCK)

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info
	find disagg -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
