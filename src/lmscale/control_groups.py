"""The control groups of this process (containers, Slurm) and the CPU time that they leave it."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")


def own_groups() -> list[str]:
    """Lines of this process's `/proc/self/cgroup`; none where there are no control groups."""
    try:
        return Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def groups_above(controller: str, lines: Iterable[str], mount: Path) -> Iterator[tuple[int, Path]]:
    """Version and folder of each group of a controller that holds a process: its own and those above it.

    Args:
        controller: `memory` or `cpu`; version 2 has one tree for all.
        lines: of the process's `/proc/<pid>/cgroup`.
        mount: where control groups are mounted.
    """
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers != "" and controller not in controllers.split(","):
            continue
        version = 2 if controllers == "" else 1
        top = mount if version == 2 else mount / controller
        own = top / path.lstrip("/")
        if not own.is_dir():  # in a container, which sees its own group at the top
            own = top
        for group in (own, *own.parents):
            yield version, group
            if group == top:
                break


def cpu_quotas(lines: Iterable[str], mount: Path = MOUNT) -> Iterator[int]:
    """CPUs, rounded up, that each group with a limit allows; see `groups_above`."""
    for version, group in groups_above("cpu", lines, mount):
        files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        try:
            quota, period = map(int, " ".join((group / file).read_text(encoding="ascii") for file in files).split())
        except (OSError, ValueError):  # no group, or no limit ("max")
            continue
        if quota > 0:
            yield max(1, math.ceil(quota / period))
