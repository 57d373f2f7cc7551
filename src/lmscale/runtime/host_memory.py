"""Free memory of this host, within the limits of its control groups (containers, Slurm)."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..control_groups import MOUNT, groups_above, own_groups

# By version: the files for limit and use, and the entries of `memory.stat` for the page cache. The kernel drops that
# cache when memory is needed, but counts it as used.
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
_V2 = "memory.max", "memory.current", ("inactive_file", "active_file")


def host_memory_available() -> int:
    """Free bytes of this host, no more than its control groups allow."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux: only the total memory is known
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([free, *room_in_groups(own_groups(), MOUNT)])


def room_in_groups(groups: Iterable[str], folder: Path) -> Iterator[int]:
    """Bytes that are left in each control group with a limit: a process's own and those above it.

    Args:
        groups: lines of the process's `/proc/<pid>/cgroup`.
        folder: where control groups are mounted.
    """
    for version, group in groups_above("memory", groups, folder):
        limit, used, cache = _V2 if version == 2 else _V1
        try:
            there, in_use = (int((group / file).read_text(encoding="ascii")) for file in (limit, used))
            entries = dict(row.split() for row in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            yield there - in_use + sum(int(entries[key]) for key in cache)
        except (OSError, ValueError, KeyError):  # no limit ("max"), or no group
            pass
