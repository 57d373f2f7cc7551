"""Free memory, of a host within control groups and of a GPU, without which a run is refused; no GPU is needed."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import tiny_run

from lmscale.parallel import ParallelContext
from lmscale.planner.memory import GIB, estimate_memory
from lmscale.planner.workload import Workload
from lmscale.runtime.exit_codes import USER_ERROR
from lmscale.runtime.host_memory import host_memory_available, room_in_groups
from lmscale.runtime.ranks import AgreedError, Ranks
from lmscale.training import device_memory, pretrain, resolve
from lmscale.training.agreement import Agreement
from lmscale.training.session import new_trainer, run_on_this_rank


def make_group(folder: Path, limit: str, used: int, cached: int, version: int) -> None:
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"), 2: ("memory.max", "memory.current", "")}
    limit_file, used_file, prefix = names[version]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / used_file).write_text(f"{used}\n")
    stat = {"anon": used - cached, f"{prefix}inactive_file": cached // 4, f"{prefix}active_file": cached - cached // 4}
    (folder / "memory.stat").write_text("".join(f"{key} {value}\n" for key, value in stat.items()))


def test_the_page_cache_of_a_container_is_free(tmp_path) -> None:
    """As Docker shows it: the container's own group at the top, its path that of the host or `/`."""
    make_group(tmp_path, str(200 * GIB), 200 * GIB - 4096, 150 * GIB, version=2)
    for path in ("/", "/docker/0123"):
        assert list(room_in_groups([f"0::{path}"], tmp_path)) == [150 * GIB + 4096]


@pytest.mark.parametrize("version", [1, 2])
def test_every_group_above_counts(tmp_path, version: int) -> None:
    """As Slurm makes them: a job's limit above a task's group without one."""
    top = tmp_path / "memory" if version == 1 else tmp_path
    make_group(top / "slurm" / "job_7" / "task_0", str(2**63 - 4096) if version == 1 else "max", GIB, 0, version)
    make_group(top / "slurm" / "job_7", str(8 * GIB), 3 * GIB, 2 * GIB, version)
    make_group(top / "slurm", str(16 * GIB), 4 * GIB, 0, version)
    line = "4:memory:/slurm/job_7/task_0" if version == 1 else "0::/slurm/job_7/task_0"
    assert min(room_in_groups(["9:name=systemd:/", line], tmp_path)) == 7 * GIB


def test_without_groups_the_host_counts(tmp_path) -> None:
    assert list(room_in_groups([], tmp_path)) == list(room_in_groups(["0::/", "4:memory:/a"], tmp_path)) == []
    assert 2**20 < host_memory_available() < 2**60


TOTAL = 80 * GIB


@pytest.fixture
def gpu_with(monkeypatch) -> Callable[..., None]:
    """Simulates a GPU of 80 GiB."""

    def simulate(free: int, reserved: int = 0, **peaks: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, TOTAL))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved)
        for name in ("empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        for name, value in peaks.items():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)

    return simulate


def ranks(errors: list[str | None]) -> SimpleNamespace:
    """The strategy of rank 1, whose other ranks have these errors."""

    def gather(error: ValueError | None) -> list[ValueError | None]:
        first, *others = (text and ValueError(text) for text in errors)
        return [first, error, *others]

    ranks = SimpleNamespace(rank=1, is_first=False, gather=gather)
    ranks.agree = partial(Ranks.agree, ranks)
    return SimpleNamespace(parallel=ParallelContext(), ranks=ranks)


def test_a_run_is_refused_with_what_it_needs_what_is_free_and_what_there_is(gpu_with) -> None:
    gpu_with(free=70 * GIB)
    device_memory.check_free_memory(70 * GIB, ranks([None]))
    with pytest.raises(AgreedError, match=r"rank 1 needs 70.5 GiB, and 70.0 of 80.0 GiB are free"):
        device_memory.check_free_memory(70 * GIB + GIB // 2, ranks([None]))
    with pytest.raises(AgreedError, match="^rank 7"):  # all ranks end
        device_memory.check_free_memory(1, ranks([None, "rank 7"]))


def test_the_groups_have_taken_their_memory_before_it_is_read(gpu_with, monkeypatch) -> None:
    calls = []
    gpu_with(free=GIB)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda _, group: calls.append(group))
    monkeypatch.setattr(device_memory, "exchange", lambda stage, *_: calls.append(stage))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: calls.append("read") or (GIB, TOTAL))
    strategy, sizes = ranks([None]), {"tp_size": 2, "dp_size": 1, "pp_size": 2, "pp_rank": 1}
    strategy.root_device = torch.device("cpu")
    strategy.parallel = SimpleNamespace(**sizes, tp_group="tensor", dp_group="data", pp_group="pipeline")
    device_memory.check_free_memory(1, strategy)
    assert calls == ["tensor", "pipeline", 0, "read"]


def test_a_run_ends_with_one_line_before_its_model_is_built(tmp_path, gpu_with, monkeypatch, capfd) -> None:
    job = resolve.resolve(tiny_run("gpt", tmp_path))
    workload = Workload.of(job.run, on_gpu=True)
    needed = estimate_memory(dataclasses.replace(workload, config=job.model), job.layout).total
    agreed = Agreement(None, False, 0, 0.0, job.run.optimizer, job.run.schedule, job.model, job.kernels)
    monkeypatch.setattr(pretrain, "agree", lambda job, session: agreed)
    monkeypatch.setattr(pretrain, "train_as_agreed", lambda *_: 0)
    on_gpu = dataclasses.replace(job, accelerator="gpu")
    for free, exit_code in ((needed, 0), (needed - 1, USER_ERROR)):
        gpu_with(free)
        trainer = new_trainer(job, max_steps=1)
        assert run_on_this_rank(job, trainer, lambda session: pretrain.train(on_gpu, session)) == exit_code
    assert capfd.readouterr().err.startswith("error: the memory a rank needs must be at most what is free on its GPU")


def test_the_record_has_what_was_planned_taken_and_reserved(gpu_with) -> None:
    gpu_with(free=50 * GIB, reserved=28 * GIB, max_memory_allocated=26 * GIB, max_memory_reserved=29 * GIB)
    found = {name: entry["value"] / GIB for name, entry in device_memory.memory_metrics(25 * GIB).items()}
    assert found == {
        f"gpu_memory/{name}": value
        for name, value in zip(
            ("planned", "peak_allocated", "peak_reserved", "context", "total"), (25, 26, 29, 2, 80), strict=True
        )
    }
