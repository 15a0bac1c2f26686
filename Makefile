# `make demo` and `make test` do all set-up themselves: `make help` lists the rest.
# make PYTHON=python3.12   the Python that .venv is made with (3.11 or newer)
# make ENGINE=gpu          vLLM for CUDA instead of vLLM for CPU
# make demo ARGS="--json demo.json"
PYTHON ?= python3
ENGINE ?= cpu
ARGS ?=
BIN := .venv/bin

# Where it is set, each process of an engine would compile all of vLLM and torch anew at every start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv model demo test test-all check bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: ## .venv with the package, the engine and the developer tools
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) on PATH: install Python 3.11 or newer with venv (Debian, Ubuntu: apt install python3 python3-venv)" >&2; exit 1; }
	@$(PYTHON) .ci/setup.py --engine $(ENGINE)

model: venv ## the default model in the cache folder
	@$(BIN)/agentcache fetch >/dev/null

demo: model ## a real episode whose prompt is edited, resumed and compared
	@$(BIN)/agentcache demo $(ARGS)

test: model ## the test suite
	$(BIN)/pytest $(ARGS)

test-all: model ## the test suite with its slow tier
	$(BIN)/pytest --run-slow $(ARGS)

check: venv ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: model ## the differ, a resume under three policies, and under load
	$(BIN)/agentcache bench diff
	$(BIN)/agentcache bench resume
	$(BIN)/agentcache bench load

clean: ## remove .venv and everything built (the model cache stays)
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
