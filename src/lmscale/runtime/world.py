"""Who started this process: torchrun, srun, lmscale's own agent, or none of them; and which variables count.

Every variable that a launcher sets is read here. An empty one counts as unset.
"""

import os
import re
from dataclasses import dataclass

from .machine import usable_cores

asked_to_stop = False  # by a signal that a job of this process has recorded: a sweep starts no other job
COMPILE_WORKERS = "TORCHINDUCTOR_COMPILE_THREADS"
_MOST_COMPILE_WORKERS = 32  # of one process, by torch
_SHELLS = ("bash", "interactive")  # names of Slurm jobs, by which Lightning knows a shell, too
# Numbers of processes that a launcher has started, where it is neither torchrun nor srun.
_FOREIGN_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@dataclass(frozen=True)
class World:
    """The ranks that a launcher has started, and which one of them this process is; by default one rank alone.

    Args:
        launcher: `torchrun`, `srun`, or `lmscale`, whose agent starts the ranks of one host; empty: none.
        size: number of ranks.
        local_size: number of ranks on this host; every host has as many.
        rank: number of this process among all ranks.
        local_rank: its number among those of its host.
        restarts: how often an elastic agent has restarted the ranks.
        max_restarts: how often it may restart them.
        num_cores: number of cores that srun gave each task; None if srun set no variable for it.
        address: host and port at which the ranks meet.
    """

    launcher: str = ""
    size: int = 1
    local_size: int = 1
    rank: int = 0
    local_rank: int = 0
    restarts: int = 0
    max_restarts: int = 0
    num_cores: int | None = None
    address: tuple[str, int] = ("", 0)

    def __post_init__(self) -> None:
        torchrun = self.launcher != "srun"
        names = ("RANK", "WORLD_SIZE") if torchrun else ("SLURM_PROCID", "SLURM_NTASKS")
        _require_below(*names, self.rank, self.size)
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if torchrun else ("SLURM_LOCALID", "--ntasks-per-node")
        _require_below(*names, self.local_rank, self.local_size)
        expected = self.rank % self.local_size
        if not torchrun and self.local_rank != expected:  # a tensor-parallel group would span nodes
            raise ValueError(
                f"`SLURM_LOCALID` must be {expected}, because rank {self.rank} is on a node of {self.local_size} "
                f"consecutive ranks (srun --distribution=block), but is {self.local_rank}"
            )

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return self.size // self.local_size

    def check_gpus(self, num_visible: int) -> None:
        """Check how many GPUs this rank sees.

        Raises:
            ValueError: fewer than its host has ranks.
        """
        if num_visible < self.local_size:
            raise ValueError(
                f"every rank must see the GPUs of all {self.local_size} ranks of its node, but sees {num_visible} "
                "(Slurm: --gpus-per-node, not --gpus-per-task)"
            )


def world_from_outside() -> World | None:
    """The ranks that torchrun, an `srun` of several tasks or lmscale's agent has started; None if this one is alone.

    An interactive Slurm shell and an `srun` of one task count as none. Variables of torch or MPI that are left over are
    ignored, unless they say that other processes were started with this one.

    Raises:
        ValueError: a variable that counts is missing or wrong; another launcher started several processes; the batch
            script of a job of several tasks runs this process without `srun`.
    """
    settings = sorted(name for name, value in os.environ.items() if name.startswith("PL_TRAINER_") and value)
    if settings:
        raise ValueError(
            f"`{settings[0]}` must be unset, because Lightning would take it where the configuration is silent, but is "
            f"{os.environ[settings[0]]!r}"
        )
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        return _world_of_torchrun()
    world = _world_of_srun()
    size = 1 if world is None else world.size
    for name in _FOREIGN_SIZES:
        if os.environ.get(name, "").strip() not in ("", str(size)):
            raise ValueError(
                f"`{name}` must be unset, or the number of ranks that torchrun or srun has started ({size}), but is "
                f"{os.environ[name]!r}; ranks are started by torchrun, by srun or by this command itself"
            )
    return world


def join_ranks() -> World:
    """Set the variables by which torch and Lightning find the ranks, as torchrun does; returns what they say.

    srun sets others, and some may be left over, or empty, where one process is alone. Lightning and torchmetrics read
    some as they are imported.
    """
    world = world_from_outside() or World()
    values = {
        "RANK": world.rank,
        "LOCAL_RANK": world.local_rank,
        "GROUP_RANK": world.rank // world.local_size,
        "WORLD_SIZE": world.size,
        "LOCAL_WORLD_SIZE": world.local_size,
    }
    if world.size > 1:
        values["MASTER_ADDR"], values["MASTER_PORT"] = world.address
    os.environ |= {name: str(value) for name, value in values.items()}
    if world.local_size > 1:
        bound_compile_workers(world.local_size, world.num_cores)
    return world


def bound_compile_workers(local_size: int, num_cores: int | None = None) -> None:
    """Share the cores among the compile workers of this host's ranks, unless the user has set their number.

    Otherwise torch gives every rank up to 32. It reads the variable as it is imported.

    Args:
        num_cores: of each rank, by srun.
    """
    cores = usable_cores()
    own = min(num_cores or cores // local_size, cores, _MOST_COMPILE_WORKERS)
    os.environ.setdefault(COMPILE_WORKERS, str(max(1, own)))


def is_first_rank() -> bool:
    """Whether this process is rank 0, or alone."""
    world = world_from_outside()
    return world is None or world.rank == 0


def is_restart() -> bool:
    """Whether an elastic agent (ours or torchrun's) has restarted this process after a failure."""
    world = world_from_outside()
    return world is not None and world.restarts > 0


def was_requeued() -> bool:
    """Whether Slurm has started this job again."""
    return os.environ.get("SLURM_RESTART_COUNT", "").strip() not in ("", "0")


def own_run_id() -> str:
    """What lmscale's agent sets TORCHELASTIC_RUN_ID to."""
    return f"lmscale-{os.getpid()}"


def _world_of_torchrun() -> World:
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT")
    numbers = {name: _number(name) for name in names}
    for name in (*names, "MASTER_ADDR"):
        if not os.environ.get(name):
            raise ValueError(f"`{name}` must be set where TORCHELASTIC_RUN_ID is, but is not; torchrun sets both")
    size, local_size = numbers["WORLD_SIZE"], numbers["LOCAL_WORLD_SIZE"]
    if not size or not local_size or size % local_size:
        raise ValueError(
            f"`WORLD_SIZE` must be a multiple of `LOCAL_WORLD_SIZE` ({local_size}), because every node has as many "
            f"ranks, but is {size}"
        )
    num_nodes = _number("GROUP_WORLD_SIZE") or size // local_size
    if size != num_nodes * local_size:  # 2 + 1 + 1 ranks, where each number divides their sum
        raise ValueError(
            f"`WORLD_SIZE` must be `LOCAL_WORLD_SIZE` x `GROUP_WORLD_SIZE` ({local_size} x {num_nodes}), because every "
            f"node has as many ranks, but is {size}"
        )
    return World(
        "lmscale" if re.fullmatch(r"lmscale-\d+", os.environ["TORCHELASTIC_RUN_ID"]) else "torchrun",
        size,
        local_size,
        numbers["RANK"],
        numbers["LOCAL_RANK"],
        _number("TORCHELASTIC_RESTART_COUNT") or 0,
        _number("TORCHELASTIC_MAX_RESTARTS") or 0,
        address=(_address(), _port()),
    )


def _world_of_srun() -> World | None:
    """The tasks of this job step, if there are several."""
    rank = os.environ.get("SLURM_PROCID")
    if not rank or os.environ.get("SLURM_JOB_NAME") in _SHELLS:
        return None
    # `salloc` may open a shell that is a step of one task, with the number of tasks of the job.
    size = _number("SLURM_STEP_NUM_TASKS") or _number("SLURM_NTASKS") or 1
    if size == 1:
        return None
    if not os.environ.get("SLURM_STEP_ID"):
        raise ValueError(
            f"the {size} tasks of a Slurm job must be started by srun, but this process was not (SLURM_STEP_ID is "
            "unset): put srun before python, or unset SLURM_NTASKS to start the ranks of this host here"
        )
    # Within `sbatch`, a step on some of the job's nodes keeps the job's SLURM_NNODES and SLURM_NODELIST.
    num_nodes = _number("SLURM_STEP_NUM_NODES") or _number("SLURM_NNODES") or 1
    per_node = _number("SLURM_NTASKS_PER_NODE")
    if not per_node:
        raise ValueError(f"`srun` must have `--ntasks-per-node`, but has {size} tasks without it")
    if size != num_nodes * per_node:
        raise ValueError(
            f"the tasks of `srun` must be its nodes x `--ntasks-per-node` ({num_nodes} x {per_node}), but are {size}"
        )
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST", "")
    local_rank = _number("SLURM_LOCALID")
    given = _address()
    if local_rank is None or not (given or nodes):
        name = "SLURM_LOCALID" if local_rank is None else "SLURM_NODELIST"
        raise ValueError(f"`{name}` must be set where SLURM_PROCID is, but is not; srun sets both")
    port = _port() or 15000 + (_number("SLURM_JOB_ID") or 0) % 10000
    address = given or _first_node(nodes), port
    cores = _number("SLURM_CPUS_PER_TASK") or None
    return World("srun", size, per_node, _number("SLURM_PROCID"), local_rank, num_cores=cores, address=address)


def _first_node(nodes: str) -> str:
    """The first of Slurm's list of hosts: of rack[1-2]n[03-07,9],b it is rack1n03."""
    first = re.match(r"(?:[^,\[\s]|\[[^]]*\])*", nodes)[0]
    return re.sub(r"\[(\w*)[^]]*\]", r"\1", first)


def _number(name: str) -> int | None:
    """The value of a variable; None if it is unset or empty."""
    text = os.environ.get(name, "").strip()
    if text and not text.isdecimal():
        raise ValueError(f"`{name}` must be a whole number, but is {text!r}")
    return int(text) if text else None


def _address() -> str | None:
    address = os.environ.get("MASTER_ADDR")
    if address and address.startswith("["):  # torch would look up a host of that name until its timeout
        raise ValueError(f"`MASTER_ADDR` must be the name or the address of a host without brackets, but is {address}")
    return address


def _port() -> int | None:
    port = _number("MASTER_PORT")
    if port is not None and not 1 <= port <= 65535:
        raise ValueError(f"`MASTER_PORT` must be at least 1 and at most 65535, but is {port}")
    return port


def _require_below(name: str, bound_name: str, value: int, bound: int) -> None:
    if value >= bound:
        raise ValueError(f"`{name}` must be below `{bound_name}` ({bound}), but is {value}")
