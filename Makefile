# Each target installs what it needs, once. Nothing else needs to be known.
#
#   make demo     show it all on this machine, without a GPU
#   make serve    serve a small model on 127.0.0.1:8000, until Ctrl-C
#   make check    lint, format, types
#   make test     all tests
#   make bench    measure a hand-over
#   make soak     many requests for a long time, faults and pressure all the while
#   make clean    remove all that make made

VENV := .venv
EXTRAS ?= cpu,dev
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CONFIG ?= serve_configs/cpu-1p1d.yaml
MODEL := .cache/models/tiny

# Run, not only found: a pyenv shim of a version that isn't installed is found too.
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done)

# uv reads wheel folders from a variable of its own. Without one, CPU torch (which isn't on PyPI)
# comes from PyTorch's index.
ifdef PIP_FIND_LINKS
UV_SOURCE := UV_FIND_LINKS="$(PIP_FIND_LINKS)"
else
UV_SOURCE := UV_TORCH_BACKEND=cpu
endif

.PHONY: install demo serve check test bench soak clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv
	$(UV_SOURCE) $(BIN)/uv pip install --compile-bytecode --python $(BIN)/python -e ".[$(EXTRAS)]"
	touch $@

# The folder appears whole or not at all, so the file's presence says enough.
$(MODEL)/config.json: | $(INSTALLED)
	$(BIN)/disagg make-model $(MODEL)

demo: $(INSTALLED)
	@$(BIN)/disagg demo

serve: $(INSTALLED) $(MODEL)/config.json
	@exec $(BIN)/disagg serve $(CONFIG)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The first half waits more than it computes; engines want the machine, and its memory, for
# themselves.
test: $(INSTALLED)
	@failed=0; \
	$(BIN)/pytest -n 3 -m "not slow" tests/unit tests/transport || failed=1; \
	$(BIN)/pytest -m "not slow" tests/engine tests/cluster || failed=1; \
	exit $$failed

bench: $(INSTALLED)
	@$(BIN)/disagg bench handoff

soak: $(INSTALLED)
	@$(BIN)/disagg bench soak
	@$(BIN)/disagg bench router-faults
	@$(BIN)/disagg bench heal --nodes 3 --clients 1
	@$(BIN)/disagg bench scale
	@DISAGG_TEST_PRESSURE=500 $(BIN)/pytest -m "slow or soak" tests

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
