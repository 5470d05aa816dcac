# `make demo` trains a small GPT on 8 virtual devices; `make test` runs every check. Both need only Python >= 3.11.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
ARGS   ?=
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Tests start some fifty processes, each of which would compile all modules that it imports anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test docs lint types tests avx2 long browser slow bench clean

help:
	@echo "make demo   set up, train a byte-level GPT on 8 virtual devices, 1 to 3 minutes (options: ARGS='--steps 100')"
	@echo "make test   set up, lint, check types, run the tests"
	@echo "make avx2   set up, run the tests that compare numbers as a CPU without AVX-512 does"
	@echo "make long   set up, run the tests that take longest, which CI runs as well: some minutes"
	@echo "make browser  set up, run the tests of a plan's page, where Chromium is installed"
	@echo "make slow   set up, run the largest tests: some hours"
	@echo "make docs   set up, build the site of docs/ into site/"
	@echo "make bench  set up, print the times of steps, as in docs/figures.md"
	@echo "make clean  remove what the others made"

demo: $(STAMP)
	@echo "== train a GPT on the standard library's sources"
	$(BIN)/python -m shardlib.examples.train_gpt $(ARGS)

test: lint types tests

lint: $(STAMP)
	@echo "== lint, format, floors"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(STAMP)
	@echo "== types"
	$(BIN)/mypy

# The last line is pytest's own summary. README code, doctests and a notebook are among the tests; `make long` and `make slow` have the others.
tests: $(STAMP) lint types
	@echo "== tests"
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup --durations=10 $(ARGS)

# Kernels of torch and oneDNN differ in their last digits from one instruction set to the next.
NUMERIC := tests/frontend/torch_rewrites/test_flex_attention.py tests/frontend/torch_rewrites/test_composites.py \
    tests/ops/attention/test_attention_composition.py tests/ops/attention/test_attention_backends.py \
    tests/ops/test_matmul.py tests/nn/test_mixed_precision.py tests/rules/nn_ops/test_decomposed_nn.py \
    tests/compiler/simplify/test_simplify.py

avx2: $(STAMP)
	@echo "== tests of numbers without AVX-512"
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/python -m pytest -q -n 2 --dist loadgroup $(NUMERIC) $(ARGS)

long: $(STAMP)
	@echo "== long tests"
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup --durations=10 -m "long and not gpu and not peer and not slow" $(ARGS)

# Uses a Chromium that is installed, and skips the tests without one; playwright brings no browser of its own here.
browser: $(STAMP)
	@echo "== tests of a plan's page in a browser"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[browser]'
	$(BIN)/python -m pytest -q -rs -m browser $(ARGS)

slow: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m slow $(ARGS)
	EXAMPLES=4 $(BIN)/python -m pytest -q -n 2 -m hypothesis $(ARGS)

# mkdocs-material 9.8 announces its successor in every build, which is no warning of this site.
docs: $(VENV)/.docs
	@echo "== site"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@

bench: $(STAMP)
	$(BIN)/python -m tests.validation.benchmarks.w1 $(ARGS)

# torch goes first and by its version: a range would let a newer build with gigabytes of CUDA libraries in. Where pip's
# index has the CUDA build under this version, say: make TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'
# Other versions, from 2.11 on, are chosen in the same way, after `make clean`: make test TORCH=torch==2.11.0
$(STAMP): pyproject.toml
	@echo "== set up $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is not Python 3.11 or newer; name one that is: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,train,notebook]' transformers peft
	@touch $@

clean:
	rm -rf $(VENV) runs build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
