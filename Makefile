# make demo       train a small language model with and without fp8pass
# make test       run a part of the tests, which a hash of the sources draws
# make test-all   run all tests, with all long tests and all pairs of features
# make test-long  run all tests, with 500 random examples each
# make lint       ruff, mypy, and the check of prose
# make docs       build the documentation site in site/, without network access
# make dist       build and check wheel and sdist in dist/
#
# All set-up happens in .venv. Choose with PYTHON=python3.12, TORCH="torch==2.11.*", and pass
# options with ARGS="--steps 50".

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
# Named after the requested PyTorch, so that a request for another version installs it.
TORCH_STAMP := $(VENV)/torch-$(firstword $(shell echo '$(TORCH)' | cksum)).stamp

# Threads that spin while they wait are ten times slower if other processes use the cores.
export OMP_WAIT_POLICY ?= passive
# Some virtual machines advertise AMX and kill the process that uses it.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

.PHONY: demo test test-all test-long lint docs dist

demo: $(VENV)/demo.stamp
	@$(BIN)/python -m fp8pass demo $(ARGS)

# Each worker has a core of its own.
test: export OMP_NUM_THREADS ?= 1
test: $(VENV)/test.stamp
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal $(ARGS)

test-all: export FP8PASS_ALL = 1
test-all: test

test-long: export HYPOTHESIS_PROFILE = thorough
test-long: test

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python tests/prose.py

# Suppress mkdocs-material's advertisement of another tool.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/docs.stamp
	$(BIN)/mkdocs build --strict $(ARGS)

dist: $(VENV)/dist.stamp
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

$(TORCH_STAMP):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/*.stamp
	$(BIN)/pip install -q '$(TORCH)'
	touch $@

# One stamp for each extra of the package.
$(VENV)/%.stamp: pyproject.toml $(TORCH_STAMP)
	$(BIN)/pip install -q -e '.[$*]'
	touch $@
