"""Facts of the machine, within control groups as Docker and Slurm make them."""

from pathlib import Path

import pytest

from lmscale.runtime import machine

GIB = 2**30


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
        assert list(machine.room_in_groups([f"0::{path}"], tmp_path)) == [150 * GIB + 4096]


@pytest.mark.parametrize("version", [1, 2])
def test_every_group_above_counts(tmp_path, version: int) -> None:
    """As Slurm makes them: a job's limit above a task's group without one."""
    top = tmp_path / "memory" if version == 1 else tmp_path
    make_group(top / "slurm" / "job_7" / "task_0", str(2**63 - 4096) if version == 1 else "max", GIB, 0, version)
    make_group(top / "slurm" / "job_7", str(8 * GIB), 3 * GIB, 2 * GIB, version)
    make_group(top / "slurm", str(16 * GIB), 4 * GIB, 0, version)
    line = "4:memory:/slurm/job_7/task_0" if version == 1 else "0::/slurm/job_7/task_0"
    assert min(machine.room_in_groups(["9:name=systemd:/", line], tmp_path)) == 7 * GIB


def test_without_groups_the_host_counts(tmp_path) -> None:
    assert (
        list(machine.room_in_groups([], tmp_path))
        == list(machine.room_in_groups(["0::/", "4:memory:/a"], tmp_path))
        == []
    )
    assert 2**20 < machine.host_memory_available() < 2**60


@pytest.mark.parametrize(("quota", "cpus"), [(400_000, [4]), (150_000, [2]), (50_000, [1]), (None, [])])
@pytest.mark.parametrize("version", [1, 2])
def test_the_cpu_quota_of_a_container_bounds_the_cores(tmp_path, version, quota, cpus) -> None:
    top = tmp_path / "cpu" if version == 1 else tmp_path
    group = top / "docker" / "0123"
    group.mkdir(parents=True)
    if version == 1:
        (group / "cpu.cfs_quota_us").write_text(f"{-1 if quota is None else quota}\n")
        (group / "cpu.cfs_period_us").write_text("100000\n")
    else:
        (group / "cpu.max").write_text(f"{'max' if quota is None else quota} 100000\n")
    line = "3:cpu,cpuacct:/docker/0123" if version == 1 else "0::/docker/0123"
    assert list(machine.cpu_quotas(["9:name=systemd:/", line], tmp_path)) == cpus


def test_usable_cores_are_within_the_quota(monkeypatch) -> None:
    monkeypatch.setattr(machine, "cpu_quotas", lambda _: [1])
    assert machine.usable_cores() == 1


@pytest.mark.parametrize(
    ("flags", "slow"),
    [
        ({"avx2"}, {"bf16", "fp16"}),
        ({"avx2", "amx_bf16"}, {"fp16"}),
        ({"avx512_bf16", "avx512_fp16"}, set()),
        (set(), set()),
    ],
)
def test_half_types_without_instructions_are_named(monkeypatch, flags, slow) -> None:
    monkeypatch.setattr(machine, "cpu_flags", lambda: flags)
    assert {dtype for dtype in ("fp64", "fp32", "bf16", "fp16") if machine.describe_slow_type(dtype)} == slow
