# make run    set up .venv and run the main job     make lint     ruff and mypy
# make test   the same set-up, then the CPU suite   make format   ruff, in place
# make quantize-env   .venv-quantize, with what method=awq and method=gptq of the quantize command need
# TEST_JOBS=2   test files run side by side
PYTHON ?= python3
VENV ?= .venv
TEST_JOBS ?= 2
BIN := $(VENV)/bin

.PHONY: run test lint format quantize-env
.DELETE_ON_ERROR:

run: $(VENV)/.installed
	$(BIN)/python -m qerl_lab +experiment=nvfp4_aqn

test: $(VENV)/.installed-test
	OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile

lint: $(VENV)/.installed-test
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, and $(PYTHON) is `$(PYTHON) --version`. Type make run PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@ $(VENV)/.installed

# Apart from .venv and without constraints.txt: llmcompressor pins another compressed-tensors than vLLM does.
quantize-env:
	$(MAKE) --no-print-directory .venv-quantize/.installed-quantize VENV=.venv-quantize
	@echo "Ready. Type: .venv-quantize/bin/python -m qerl_lab.quantize model=... format=nvfp4 method=awq out=DIR"

$(VENV)/.installed-quantize: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[quantize]'
	touch $@
