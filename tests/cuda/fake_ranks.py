"""One rank of many without the others: collectives return at once and communicate nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from lmscale.parallel import ParallelContext


@contextmanager
def grid(
    tp_size: int = 1,
    dp_size: int = 1,
    rank: int = 0,
    sequence_parallel: bool = False,
    zero1: bool = False,
    batch_halves: bool = False,
) -> Iterator[ParallelContext]:
    """The `ParallelContext` of a rank of a grid; call it outside FakeTensorMode."""
    dist.init_process_group("fake", rank=rank, world_size=tp_size * dp_size, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (dp_size, tp_size), mesh_dim_names=("data", "tensor"))
        yield ParallelContext(
            tp_rank=rank % tp_size,
            tp_size=tp_size,
            dp_rank=rank // tp_size,
            dp_size=dp_size,
            tp_group=mesh.get_group("tensor"),
            dp_group=mesh.get_group("data"),
            sequence_parallel=sequence_parallel,
            zero1=zero1,
            batch_halves=batch_halves,
        )
    finally:
        dist.destroy_process_group()


def grid_of(case: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `grid`.

    Args:
        case: `layout` (such as `tp8 sequence halves`), `data` (`dp2 zero1`) and `rank` (`first`, `middle` or `last`).
    """
    tp_size, *cuts = case["layout"].removeprefix("tp").split()
    dp_size, *zero1 = case["data"].removeprefix("dp").split()
    world = int(tp_size) * int(dp_size)
    return {
        "tp_size": int(tp_size),
        "dp_size": int(dp_size),
        "rank": {"first": 0, "middle": world // 2, "last": world - 1}[case["rank"]],
        "sequence_parallel": "sequence" in cuts,
        "batch_halves": "halves" in cuts,
        "zero1": bool(zero1),
    }
