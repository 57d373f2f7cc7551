"""Settings for all tests: fast fp32, no network, the location of real data."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests with and without CUDA graphs, and with and without deterministic products, share a process; torch asks once.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:False")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Those that are set before the tests start stay.
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
RANK_VARIABLES -= os.environ.keys()

REPOSITORY = Path(__file__).resolve().parent.parent
for folder in (".", "checkpoint", "corpus", "data", "cli", "finetune", "training"):  # support modules: ranks, runs
    sys.path.insert(0, str(Path(__file__).parent / folder))

import process_facts  # noqa: E402, F401

import lmscale.cli.conf_files  # noqa: E402, F401  the resolvers of conf/, for tests that compose it


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import and collect without garbage collection, and let no later one look at the libraries and collected tests.

    Importing takes a quarter less, and so does a tiny run in the test process, because each fit ends with a collection.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """One per core: each imports the large libraries and collects all tests, 30 s of processor time."""
    return os.cpu_count() or 1


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Reset the fp32 matmul precision, which a run sets for its process."""
    yield
    if "torch" in sys.modules:  # some tests also run where it is not installed
        sys.modules["torch"].set_float32_matmul_precision("highest")


@pytest.fixture(autouse=True)
def no_ranks_left_over() -> Iterator[None]:
    """Remove the variables by which a run in the test process has told torch and Lightning of its ranks."""
    yield
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)


@pytest.fixture
def built_elsewhere(monkeypatch) -> None:
    """Let `configure_model` run with another default device than the CPU, as Lightning does on a GPU.

    The device is `meta`, whose tensors hold nothing: what is made on it by mistake cannot be read.
    """
    import torch
    from lightning.pytorch.strategies import Strategy

    @contextmanager
    def on_meta(strategy: Strategy, empty_init: bool | None = None) -> Iterator[None]:
        with torch.device("meta"):
            yield

    monkeypatch.setattr(Strategy, "tensor_init_context", on_meta)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real data sets; skips the test if it is missing."""
    folder = Path(os.environ.get("LMSCALE_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}; set LMSCALE_DATA")
    return folder


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return REPOSITORY
