# Every target sets up .venv by itself: only Python 3.10 or newer and make are needed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test rehearsal fuzz lint format bench load results docs examples clean

help: ## show the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1	/'

# Rebuilt when the dependencies change, so that a second run starts at once. Compiled, as a process that imports PyTorch
# from source takes three times as long, and where PYTHONDONTWRITEBYTECODE is set no process keeps what it compiled.
$(READY): pyproject.toml
	@echo "==> setting up .venv (PyTorch is large: the first time takes a few minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "didicm needs Python 3.10 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade uv
	$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode -e ".[dev]"
	@touch $@

demo: $(READY) ## DiDiCM against a standard classifier, at most five minutes, ends with a report
	$(BIN)/didicm demo

test: $(READY) ## run the tests
	$(BIN)/pytest -n auto --dist worksteal

rehearsal: $(READY) ## every study for ImageNet, tiny, with two processes per training and two trainings at a time
	$(BIN)/pytest tests/e2e/test_imagenet.py --devices 2 --jobs 2

fuzz: $(READY) ## attack all that reads files or arguments, and write docs/reliability.md
	$(BIN)/python -m tests.fuzz --write

lint: $(READY) ## check format, rules, types and the direction of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY) ## measure speed and memory, and write docs/speed.md
	$(BIN)/python -m benchmarks --write

load: $(READY) ## serve a model to 200 clients for 30 s, then to 5,000 hostile uploads
	$(BIN)/python -m benchmarks --write load

results: $(READY) ## make docs/results.md again from the stored results
	$(BIN)/python docs/make_results.py

docs: $(READY) ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

examples: $(READY) ## run the commands of the pages, and write what they print into them
	$(BIN)/python docs/make_examples.py

clean: ## remove everything the targets made
	rm -rf .venv site build dist
