"""What is set for a device: the heap of a process on a CPU, and torch for a GPU, without one."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from lmscale.runtime import accelerator, machine
from lmscale.training import kernel_choice, resolve

MEASURE = """
import resource, sys
import torch
from lmscale.runtime.cpu_settings import keep_heap

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20

if sys.argv[1] == "keep":
    keep_heap()
for num_mib in (24, 64):
    before = resident_mib()
    tensors = [torch.ones(num_mib, 2**18) for _ in range(6)]
    del tensors
    print(resident_mib() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
@pytest.mark.parametrize(
    "mode, bounds", [("keep", (120, 160)), pytest.param("default", (-16, 40), marks=pytest.mark.slow)]
)
def test_the_heap_keeps_tensors_of_24_mib_and_returns_those_of_64(mode: str, bounds: tuple[int, int]) -> None:
    """MiB of 6 x 24 and of 6 x 64 that stay after they are freed."""
    done = subprocess.run([sys.executable, "-c", MEASURE, mode], capture_output=True, text=True, check=True)
    small, large = map(float, done.stdout.split())
    assert bounds[0] < small < bounds[1]
    assert large < 16


@pytest.fixture(autouse=True)
def environment(monkeypatch) -> None:
    """A copy without the allocator's variables, so that what a test sets ends with it."""
    kept = {name: value for name, value in os.environ.items() if name not in accelerator.ALLOCATOR_VARIABLES}
    monkeypatch.setattr(os, "environ", kept)
    monkeypatch.setattr(accelerator, "_cuda_graphs", set())


@pytest.mark.parametrize("name", accelerator.ALLOCATOR_VARIABLES)
def test_the_allocator_grows_its_segments_unless_the_user_has_set_it(monkeypatch, name) -> None:
    accelerator.set_allocator()
    assert accelerator.gpu_settings()["allocator"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv(name, "max_split_size_mb:512")
    accelerator.set_allocator()
    assert accelerator.gpu_settings()["allocator"] == "max_split_size_mb:512"


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_sweep_over_cuda_graphs_is_refused_because_its_jobs_share_the_allocator(cuda_graphs) -> None:
    accelerator.set_allocator(cuda_graphs)
    accelerator.set_allocator(cuda_graphs)
    with pytest.raises(ValueError, match="`cuda_graphs` must be the same for all jobs"):
        accelerator.set_allocator(not cuda_graphs)


def test_a_sweep_over_deterministic_is_refused_because_cublas_reads_its_setting_once(monkeypatch) -> None:
    monkeypatch.setattr(kernel_choice, "_determinism", set())
    kernel_choice.check_determinism(False)
    kernel_choice.check_determinism(False)
    with pytest.raises(ValueError, match="`deterministic` must be the same for all jobs of a sweep"):
        kernel_choice.check_determinism(True)


@pytest.mark.parametrize("requested", ["auto", "gpu"])
def test_a_gpu_that_torch_cannot_use_is_refused_with_both_versions(tmp_path, monkeypatch, requested) -> None:
    (tmp_path / "nvidia0").touch()
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\n")
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(
        ValueError, match=rf"^`trainer.accelerator` must be cpu where .*{requested}: .* 13.0, .* 550.54.15"
    ):
        accelerator.resolve_accelerator(requested)
    assert accelerator.resolve_accelerator("cpu") == "cpu"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    assert accelerator.resolve_accelerator("auto") == "cpu"


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_the_allocator_is_set_before_a_gpu_is_asked_anything(monkeypatch, cuda_graphs) -> None:
    found = {}

    def first_question(*_: object) -> None:
        found.update(accelerator.gpu_settings())
        raise LookupError

    monkeypatch.setattr(accelerator, "resolve_accelerator", lambda requested: "gpu")
    monkeypatch.setattr(resolve, "check_paths", lambda run, world: None)
    monkeypatch.setattr(accelerator, "check_products", first_question)
    run = SimpleNamespace(
        run_dir="absent",
        model=SimpleNamespace(family="gpt"),
        trainer=SimpleNamespace(accelerator="gpu"),
        cuda_graphs=cuda_graphs,
        precision=SimpleNamespace(dtype="fp32"),
        logger=SimpleNamespace(wandb=False),
    )
    with pytest.raises(LookupError):
        resolve.check(run)
    assert found["allocator"] == (None if cuda_graphs else accelerator.EXPANDABLE)


def test_half_products_add_their_parts_in_fp32_and_the_record_says_so(monkeypatch) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    try:
        matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True
        accelerator.keep_partial_sums_in_fp32()
        on_gpu = accelerator.gpu_settings()
    finally:
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before
    assert on_gpu == {
        "allocator": None,
        "bf16_reduced_precision_reduction": False,
        "fp16_reduced_precision_reduction": False,
    }
    assert accelerator.gpu_settings(on_gpu=False) is None
