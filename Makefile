# Everything runs in a virtual environment of its own, made on first use.
VENV ?= .venv
TORCH ?= torch==2.13.0
PYTHON = $(VENV)/bin/python

.PHONY: check test bench

bench: $(VENV)/.installed ## the benchmark: Qwen3-0.6B on a GPU, a tiny model without one
	$(VENV)/bin/forge-bench --optimizers all

test: $(VENV)/.installed ## the whole test suite
	$(PYTHON) -m pytest -q -n auto --maxprocesses 8 --dist loadfile

check: $(VENV)/.installed ## lint, format, types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# torch first and pinned: a later torch would be several GB and is not what the results were made with.
$(VENV)/.installed: pyproject.toml
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install -q $(TORCH)
	$(PYTHON) -m pip install -q -e '.[bench,dev]'
	touch $@
