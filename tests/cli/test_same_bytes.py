"""`train.py` and `plan.py` agree to the byte on the memory of a rank and on the smallest layout."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from composed import composed as values_of
from entry_points import REPOSITORY
from omegaconf import OmegaConf

from lmscale.config.cluster import load_cluster
from lmscale.config.plan import PlanConfig
from lmscale.config.pretrain import RunConfig
from lmscale.planner.flops import dense_peak_flops_per_s
from lmscale.planner.memory import CPU_RESERVED_GIB, GPU_RESERVED_GIB
from lmscale.planner.question import plan_layout
from lmscale.planner.workload import Workload
from lmscale.training import capacity
from lmscale.training.capacity import choose_layout, choose_mode

GIB = 2**30
GRID = [
    # model, sequences per step; combined with the options below
    ("gpt_tiny", 8),
    ("bert_336m", 64),
    ("gpt_2.5b", 64),
    ("gpt_8.3b", 512),
]
LAYOUTS = [  # tp_size, dp_size, micro-batch, sequence parallelism
    (1, 1, 2, False),
    (1, 4, 2, False),
    (2, 1, 8, True),
    (4, 2, 1, True),
    (4, 2, 4, False),
]


@pytest.fixture(scope="module")
def composed() -> dict:
    """Plain values of train.py and plan.py for every model of the grid."""
    return {
        (model, entry_point): values_of(
            entry_point, f"model={model}", f"global_batch_size={batch}", "precision=bf16", "parallel=default"
        )
        for (model, batch), entry_point in itertools.product(GRID, ("train", "plan"))
    }


def changed(values: dict, layout: tuple, dtype: str, recompute: str) -> dict:
    tp_size, dp_size, micro_batch_size, sequence_parallel = layout
    grid = values["parallel"] | {"tp_size": tp_size, "dp_size": dp_size, "sequence_parallel": sequence_parallel}
    return values | {
        "parallel": grid,
        "precision": values["precision"] | {"dtype": dtype},
        "model": values["model"] | {"recompute": recompute},
        "micro_batch_size": micro_batch_size,
    }


def as_run(values: dict, tmp_path: Path) -> RunConfig:
    return RunConfig.from_dict(values | {"run_dir": str(tmp_path), "overrides": []})


def as_plan(values: dict, is_gpu: bool, memory_bytes: float, num_devices: int = 8) -> PlanConfig:
    cluster = values["cluster"] | {
        "is_gpu": is_gpu,
        "memory_gib": memory_bytes / GIB,  # a power of two: exact
        "reserved_gib": GPU_RESERVED_GIB if is_gpu else CPU_RESERVED_GIB,
        "peaks": dict.fromkeys(("fp64", "fp32", "bf16", "fp16"), 1.0),
        "num_devices": num_devices,
    }
    return PlanConfig.from_dict(values | {"cluster": cluster, "find_recompute": False})


def check(run: RunConfig, accelerator: str, memory_bytes: int, monkeypatch) -> None:
    """The memory check of `train.py` on a machine with this much memory."""
    monkeypatch.setattr(capacity, "device_memory", lambda _: memory_bytes)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    workload = Workload.of(run, compiles=accelerator == "gpu", on_gpu=accelerator == "gpu")
    choose_mode(run.name, [workload], choose_layout(run.parallel, workload, None)[0], None)


@pytest.mark.parametrize("accelerator", ["gpu", "cpu"])
@pytest.mark.parametrize("model", [model for model, _ in GRID])
def test_train_and_plan_need_the_same_bytes_for_every_layout(
    composed, model, accelerator, tmp_path, monkeypatch
) -> None:
    seen, is_gpu = set(), accelerator == "gpu"
    for layout, dtype, recompute in itertools.product(LAYOUTS, ("fp32", "fp16", "bf16"), ("none", "selective", "full")):
        run = as_run(changed(composed[model, "train"], layout, dtype, recompute), tmp_path)
        with pytest.raises(ValueError, match="the memory a rank needs must be at most") as refused:
            check(run, accelerator, 0, monkeypatch)
        printed = int(re.search(r"needs ([\d,]+) bytes", str(refused.value))[1].replace(",", ""))
        values = changed(composed[model, "plan"], layout, dtype, recompute)
        plan, _ = plan_layout(as_plan(values, is_gpu, 2**60))
        assert plan.needed_bytes == printed, (layout, dtype, recompute)
        seen.add(printed)
    assert len(seen) > 20  # bf16 and fp16 need the same


@pytest.mark.parametrize("accelerator", ["gpu", "cpu"])
def test_train_and_plan_have_the_same_limit_to_the_byte(composed, accelerator, tmp_path, monkeypatch) -> None:
    is_gpu, layout = accelerator == "gpu", (2, 2, 4, True)
    values = changed(composed["gpt_2.5b", "plan"], layout, "fp32", "full")
    run = as_run(changed(composed["gpt_2.5b", "train"], layout, "fp32", "full"), tmp_path)
    needed = plan_layout(as_plan(values, is_gpu, 2**60))[0].needed_bytes
    needed += int((GPU_RESERVED_GIB if is_gpu else CPU_RESERVED_GIB) * GIB)
    sharing = 1 if is_gpu else 4
    check(run, accelerator, sharing * needed, monkeypatch)
    plan_layout(as_plan(values, is_gpu, needed))
    with pytest.raises(ValueError, match="must be at most what its"):
        check(run, accelerator, sharing * (needed - 1), monkeypatch)
    with pytest.raises(ValueError, match="must be at most what its device has"):
        plan_layout(as_plan(values, is_gpu, needed - 1))


@pytest.mark.parametrize("dp_size", ["auto", 1, 2])
@pytest.mark.parametrize("model", [model for model, _ in GRID])
def test_train_and_plan_find_the_same_smallest_layout(composed, model, dp_size, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    found = set()
    for gib, dtype, sequence_parallel in itertools.product((5, 12, 24, 60, 200), ("fp32", "fp16"), (False, True)):
        memory = gib * GIB
        monkeypatch.setattr(capacity, "device_memory", lambda _, memory=memory: memory)
        layout = ("auto", dp_size, 1, sequence_parallel)
        run = as_run(changed(composed[model, "train"], layout, dtype, "full"), tmp_path)
        wanted = as_plan(changed(composed[model, "plan"], layout, dtype, "full"), True, memory)
        try:
            trained, _ = choose_layout(run.parallel, Workload.of(run), None)
        except ValueError:  # no layout fits, or none on eight GPUs
            with pytest.raises(ValueError, match="no tp_size fits"):
                plan_layout(wanted)
            continue
        planned = plan_layout(wanted)[0].layout
        assert (planned.tp_size, planned.dp_size) == (trained.tp_size, trained.dp_size), (gib, dtype)
        found.add(trained.tp_size)
    assert found == {1} if model == "gpt_tiny" else len(found) > 1


SHEETS = {  # torch's name of each cluster's device
    "dgx2h_v100": "Tesla V100-SXM3-32GB-H",
    "dgx_a100": "NVIDIA A100-SXM4-80GB",
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
}


@pytest.mark.parametrize("cluster", SHEETS)
def test_plan_and_run_use_the_same_peak_for_mfu(composed, cluster) -> None:
    shipped = load_cluster(REPOSITORY / "conf" / "cluster" / f"{cluster}.yaml")
    assert shipped.reserved_gib == GPU_RESERVED_GIB
    raw = OmegaConf.to_container(OmegaConf.load(REPOSITORY / "conf" / "cluster" / f"{cluster}.yaml"))
    for precision in ("highest", "high", "medium"):
        values = composed["gpt_2.5b", "plan"] | {"cluster": raw}
        values["trainer"] = values["trainer"] | {"matmul_precision": precision}
        planned = PlanConfig.from_dict(values).cluster
        for dtype in ("fp64", "fp32", "fp16", "bf16", "fp8"):
            sheet = dense_peak_flops_per_s(SHEETS[cluster], dtype, precision)
            assert sheet == (planned.peak_flops_per_s(dtype) if dtype in planned.dtypes else None), (dtype, precision)


def test_the_cpu_cluster_reserves_the_same_memory_as_a_run() -> None:
    assert load_cluster(REPOSITORY / "conf" / "cluster" / "cpu.yaml").reserved_gib == CPU_RESERVED_GIB


def test_auto_recomputes_as_little_as_possible_and_the_error_names_what_fits(composed, tmp_path, monkeypatch) -> None:
    values = changed(composed["gpt_2.5b", "train"], (1, 1, 4, False), "bf16", "auto")
    run = as_run(values, tmp_path)
    on_gpu, on_cpu = (Workload.of(run, compiles=word, on_gpu=word) for word in (True, False))
    layout = capacity.Layout(tp_size=1, dp_size=1)
    needed = {}
    for mode in ("none", "selective", "full"):
        plan = changed(composed["gpt_2.5b", "plan"], (1, 1, 4, False), "bf16", mode)
        needed[mode] = plan_layout(as_plan(plan, True, 2**60))[0].needed_bytes + int(GPU_RESERVED_GIB * GIB)
    assert needed["none"] > needed["selective"] > needed["full"]
    for mode, memory in needed.items():
        monkeypatch.setattr(capacity, "device_memory", lambda _, memory=memory: memory)
        assert choose_mode(run.name, on_gpu.in_each_mode(), layout, None)[0].config.recompute == mode
        if mode != "none":
            with pytest.raises(ValueError, match=f"; here model.recompute={mode} fits"):
                choose_mode(run.name, [on_gpu], layout, None)
    monkeypatch.setattr(capacity, "device_memory", lambda _: needed["full"] - 1)
    with pytest.raises(ValueError, match="; model.recompute=full and a smaller micro_batch_size need less"):
        choose_mode(run.name, on_gpu.in_each_mode(), layout, None)
