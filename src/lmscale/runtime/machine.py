"""Facts of this machine: processor, cores, memory, control groups (containers, Slurm) and GPUs; nothing is set here."""

import ctypes
import math
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MOUNT = Path("/sys/fs/cgroup")
DEVICES, DRIVER = Path("/dev"), Path("/proc/driver/nvidia/version")
# Of the environment; they limit which instructions torch, MKL and oneDNN use.
ROUNDING_VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
_INSTRUCTIONS = {"bf16": {"avx512_bf16", "amx_bf16"}, "fp16": {"avx512_fp16", "amx_fp16"}}
# By version: the files for limit and use, and the entries of `memory.stat` for the page cache. The kernel drops that
# cache when memory is needed, but counts it as used.
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
_V2 = "memory.max", "memory.current", ("inactive_file", "active_file")


def usable_cores() -> int:
    """Cores that this process may use, within the quota of its control groups, as of `docker run --cpus=4`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *cpu_quotas(own_groups())])


def host_memory_available() -> int:
    """Free bytes of this host, no more than its control groups allow."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux: only the total memory is known
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([free, *room_in_groups(own_groups())])


def own_groups() -> list[str]:
    """Lines of this process's `/proc/self/cgroup`; none where there are no control groups."""
    try:
        return Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def cpu_quotas(lines: Iterable[str], mount: Path = MOUNT) -> Iterator[int]:
    """CPUs, rounded up, that each control group with a limit allows: a process's own and those above it.

    Args:
        lines: of the process's `/proc/<pid>/cgroup`.
        mount: where control groups are mounted.
    """
    for version, group in _groups_above("cpu", lines, mount):
        files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        try:
            quota, period = map(int, " ".join((group / file).read_text(encoding="ascii") for file in files).split())
        except (OSError, ValueError):  # no group, or no limit ("max")
            continue
        if quota > 0:
            yield max(1, math.ceil(quota / period))


def room_in_groups(lines: Iterable[str], mount: Path = MOUNT) -> Iterator[int]:
    """Bytes that are left in each control group with a limit; see `cpu_quotas`."""
    for version, group in _groups_above("memory", lines, mount):
        limit, used, cache = _V2 if version == 2 else _V1
        try:
            there, in_use = (int((group / file).read_text(encoding="ascii")) for file in (limit, used))
            entries = dict(row.split() for row in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            yield there - in_use + sum(int(entries[key]) for key in cache)
        except (OSError, ValueError, KeyError):  # no limit ("max"), or no group
            pass


def _groups_above(controller: str, lines: Iterable[str], mount: Path) -> Iterator[tuple[int, Path]]:
    """Version and folder of each group of a controller that holds a process: its own and those above it.

    Args:
        controller: `memory` or `cpu`; version 2 has one tree for all.
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


def cpu_model() -> str:
    """Name of this host's processor."""
    return _cpu_facts().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> set[str]:
    """The instruction sets of this host's processor as Linux names them; empty on other systems than Linux on x86."""
    return set(_cpu_facts().get("flags", "").split())


def describe_slow_type(dtype: str) -> str:
    """A sentence if this processor, of x86, has no instructions for a half type; otherwise empty.

    bf16 trained 175 instead of 619 tokens/s on an Ice Lake, and 60 instead of 900 on an AMD EPYC with AVX2 (once each).
    """
    names, flags = _INSTRUCTIONS.get(dtype, set()), cpu_flags()
    if not names or not flags or names & flags:
        return ""
    return (
        f"this CPU has no instructions for {dtype} ({', '.join(sorted(names))}): "
        "precision=fp32 was 3 to 15 times as fast on such CPUs"
    )


def describe_cpu() -> dict[str, Any]:
    """What decides how this host and this process round: the CPU, and what torch runs on it if it is imported.

    Returns:
        family, model and stepping as Linux numbers them (None elsewhere, or on other CPUs than x86); amx_bf16, whether
        fp32 products may be rounded to bf16; capability, the instruction set that torch has chosen; libraries, the
        lines of `torch.__config__` with the versions of MKL and oneDNN; variables, those of the environment that limit
        instruction sets.
    """
    facts, torch = _cpu_facts(), sys.modules.get("torch")
    names = {"family": "cpu family", "model": "model", "stepping": "stepping"}
    found: dict[str, Any] = {key: int(facts[name]) if name in facts else None for key, name in names.items()}
    found["amx_bf16"] = "amx_bf16" in cpu_flags()
    found["capability"] = torch and torch.backends.cpu.get_cpu_capability()
    lines = torch.__config__.show().split("\n") if torch else []
    found["libraries"] = [line.strip(" -") for line in lines if "Math Kernel Library" in line or "MKL-DNN" in line]
    return found | {"variables": {name: os.environ[name] for name in ROUNDING_VARIABLES if name in os.environ}}


def _cpu_facts() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty if this is not Linux."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.split("\n"))}


def may_have_gpu() -> bool:
    """Whether torch might find a GPU: NVIDIA's driver is installed, or the kernel has AMD's device."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True


def has_nvidia_gpu() -> bool:
    """Whether this process may open a GPU of NVIDIA's, whatever torch can use."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles")
    return not hidden and any(DEVICES.glob("nvidia[0-9]*"))


def nvidia_driver() -> str:
    """Version of NVIDIA's driver, or `unknown`."""
    try:
        return re.search(r"\d+\.\d[\d.]*", DRIVER.read_text(encoding="utf-8"))[0]
    except (OSError, TypeError):  # no such file, or no number in it
        return "unknown"


def device_name(on_gpu: bool) -> str:
    """Name of the GPU or processor."""
    if not on_gpu:
        return platform.processor() or "cpu"
    import torch

    return torch.cuda.get_device_name()
