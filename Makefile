# Every target sets up what it needs first: tools/setup_env.sh, a fraction of a second when there is nothing to do.
PYTHON := .venv/bin/python
.PHONY: demo test test-all lint types format build bench setup setup-tests setup-bench

demo: setup
	$(PYTHON) examples/demo.py

test: setup-tests
	$(PYTHON) -m pytest -m 'not slow and not gpu'

test-all: setup-tests
	$(PYTHON) -m pytest -m 'not gpu'

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: setup
	$(PYTHON) -m mypy

format: setup
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

build: setup
	rm -rf dist
	$(PYTHON) -m build --outdir dist
	$(PYTHON) tools/check_dist.py dist

bench: setup-bench
	$(PYTHON) -m tests.benchmarks

setup:
	@tools/setup_env.sh

setup-tests:
	@tools/setup_env.sh --vllm-api

setup-bench:
	@tools/setup_env.sh --bench
