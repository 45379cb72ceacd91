# `make demo` and `make test` do all the set-up on a machine that has Python 3.10+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types check clean

# The stamp is younger than what it was made from, so the environment is reused until that changes.
$(VENV)/stamp: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (a few minutes, once)" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/stamp
	@$(BIN)/rlu recover -v \
	  --global sample_data/trained_m10/global.safetensors \
	  --local sample_data/trained_m10/client_0.safetensors \
	  --aux sample_data/aux

test: $(VENV)/stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal

lint: $(VENV)/stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/stamp
	$(BIN)/mypy

check: lint types test

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
