"""Time of an optimizer step: every operation at the roofline of the device, and every message as far as it is waited
for."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from ..config import Layout
from ..config.cluster import Cluster
from .communication import Collective, step_collectives
from .host import host_s
from .memory import keeps_scores
from .operation import Operation
from .overlap import exposed_of_pieces, exposed_shares
from .params import distinct_stages
from .step_operations import OF_HEAD, step_operations
from .workload import Workload

# Seconds that a hidden second of messages may cost the kernels beside it: GEMMs were seen to take up to twice as long
# (github.com/pytorch/pytorch/issues/143988, github.com/NVIDIA/nccl/issues/1428).
KERNELS_BESIDE_MESSAGES = 0.5
_PARTS = {"product": "matmul", "attention": "matmul", "elementwise": "elementwise", "optimizer": "optimizer"}


@dataclass(frozen=True)
class StepRow:
    """Equal operations or messages of one rank in one step, counted and timed together.

    Args:
        part: the field of `StepTime` to which it adds.
        flops, read, written: of matrix products; bytes.
        seconds: launches included; of messages only what nothing hides.
        launch_s: seconds between the kernels.
        hidden: seconds of messages behind computation, also while other stages compute, or of the host behind the
            device.
        latency: seconds of messages that do not depend on their size, hidden or not.
    """

    name: str
    phase: str
    part: str
    count: int
    launches: int
    flops: int
    read: int
    written: int
    seconds: float
    launch_s: float = 0.0
    hidden: float = 0.0
    latency: float = 0.0

    @property
    def bound(self) -> str:
        """What its time is: `messages`, `launches`, `products`, `bytes`, `other stages` or `host`."""
        if self.part in ("tensor", "pipeline", "data"):
            return "messages"
        if self.part == "idle":
            return "other stages"
        if self.part == "host":
            return "host"
        if 2 * self.launch_s > self.seconds:
            return "launches"
        return "products" if self.flops else "bytes"


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on the slowest rank, by kind of work.

    Args:
        matmul: matrix products and attention cores.
        elementwise: everything else that reads and writes activations, and the gradient buffer.
        overhead: between kernels.
        tensor: messages of the tensor group, as far as nothing hides them.
        pipeline: messages between stages.
        idle: waiting for other stages, p - 1 of m + p - 1 micro-batches.
        data: messages of the data group, as far as nothing hides them: the sum of the gradients, with ZeRO stage 1 also
            the weights.
        optimizer: AdamW.
        host: waiting for the host, which launches the kernels; on a GPU.
        host_hidden: the rest of the host's time, behind the device's; no part of `total`.
        tensor_hidden, data_hidden: the rest of these messages, behind computation; no part of `total`.
        idle_hidden: the tensor group's messages behind computation in the micro-batches of other stages that the rank
            waits for; no part of `total`.
        latency: the part of all messages that does not depend on their size.
    """

    matmul: float
    elementwise: float
    overhead: float
    tensor: float
    pipeline: float
    idle: float
    data: float
    optimizer: float
    host: float
    host_hidden: float
    tensor_hidden: float
    data_hidden: float
    idle_hidden: float
    latency: float

    @classmethod
    def of(cls, rows: Iterable[StepRow]) -> "StepTime":
        """Add up rows."""
        seconds = dict.fromkeys((spec.name for spec in dataclasses.fields(cls)), 0.0)
        for row in rows:
            seconds[row.part] += row.seconds - row.launch_s
            seconds["overhead"] += row.launch_s
            if row.hidden:
                seconds[f"{row.part}_hidden"] += row.hidden
            seconds["latency"] += row.latency
        return cls(**seconds)

    @property
    def compute(self) -> float:
        """matmul + elementwise + overhead."""
        return self.matmul + self.elementwise + self.overhead

    @property
    def total(self) -> float:
        """Everything that the rank does or waits for."""
        return self.compute + self.tensor + self.pipeline + self.idle + self.data + self.optimizer + self.host

    @property
    def slowest(self) -> float:
        """`total` if messages slow the kernels beside them as much as was seen, see `KERNELS_BESIDE_MESSAGES`."""
        beside = self.tensor_hidden + self.idle_hidden + self.data_hidden
        device = self.total - self.host + KERNELS_BESIDE_MESSAGES * beside
        return max(self.total, device)  # which is below the host's time where that binds

    @property
    def host_share(self) -> float:
        """Time of the host over that of the device; above 1 the step is host-bound."""
        return (self.host + self.host_hidden) / (self.total - self.host)

    @property
    def messages(self) -> float:
        """All messages, hidden or not."""
        return self.tensor + self.tensor_hidden + self.pipeline + self.data + self.data_hidden

    @property
    def ratio(self) -> float | None:
        """R = compute / messages; None for one rank, which sends nothing.

        Below 1 a layout is communication-bound: even perfect overlap could not hide all messages.
        """
        return self.compute / self.messages if self.messages else None

    def describe_ratio(self) -> str:
        """R in words."""
        if self.ratio is None:
            return "no messages: one rank"
        if self.ratio >= 1:
            return "compute-bound: perfect overlap could hide the messages"
        longer = "latency" if 2 * self.latency > self.messages else "bytes"
        return (
            f"communication-bound: messages take {1 / self.ratio:.2f} times as long as computing, most of it {longer}"
        )


def step_rows(job: Workload, layout: Layout, cluster: Cluster) -> list[StepRow]:
    """Every operation and message of one rank in one optimizer step of this project's code, of the slowest stage.

    It is idle while the other stages compute their first and last micro-batches, each as long as its own. A GPU and its
    host work at the same time, so a step takes as long as the slower of both.

    The messages of a teacher count as not hidden.

    Raises:
        ValueError: `layout.tp_size` does not divide the model; the devices do not have the type.
    """
    if keeps_scores(job):
        job = dataclasses.replace(job, config=dataclasses.replace(job.config, attention="exact"))
    stages = {stage: _stage_rows(job, layout, stage, cluster) for stage in distinct_stages(job.config, layout)}
    slowest = max(stages, key=lambda stage: StepTime.of(stages[stage]).total)
    rows = stages[slowest]
    if layout.pp_size > 1:
        in_micro_batches = [row for row in rows if row.phase in ("forward", "backward", "recomputation")]
        waited_for = (layout.pp_size - 1) / job.num_micro_batches(layout)
        idle = waited_for * sum(row.seconds for row in in_micro_batches)
        hidden = waited_for * sum(row.hidden for row in in_micro_batches if row.part == "tensor")
        rows = [*rows, StepRow("idle", "forward", "idle", 1, 0, 0, 0, 0, idle, hidden=hidden)]
    if not job.on_gpu:
        return rows
    host, device = host_s(job, layout, slowest), sum(row.seconds for row in rows)
    waits = max(0.0, host - device)
    return [*rows, StepRow("waiting for the host", "step", "host", 1, 0, 0, 0, 0, waits, hidden=host - waits)]


def _stage_rows(job: Workload, layout: Layout, stage: int, cluster: Cluster) -> list[StepRow]:
    operations = operation_rows(step_operations(job, layout, stage), cluster, job.dtype)
    messages, shares = step_collectives(job, layout, stage=stage), {}
    each = {message.what: message_s(message, layout, cluster) / message.count for message in messages}
    if job.on_gpu and layout.tp_size > 1:  # elsewhere layers are not compiled
        shares = exposed_shares(job, layout, stage, cluster, each)
    rows = [*operations, *message_rows((m for m in messages if m.group != "data"), layout, cluster, shares)]
    if job.on_gpu and layout.dp_size > 1:  # elsewhere messages take the cores of what should hide them
        for what, phases in (("gradients", ("backward", "recomputation")), ("weights", ("forward",))):
            if what in each:
                of_pass = [row for row in rows if row.phase in phases and not row.name.startswith(OF_HEAD)]
                seconds = sum(row.seconds for row in of_pass) / job.num_micro_batches(layout)
                shares[what] = exposed_of_pieces(job, layout, stage, seconds, each[what])
    return [*rows, *message_rows((m for m in messages if m.group == "data"), layout, cluster, shares)]


def operation_rows(operations: Iterable[Operation], cluster: Cluster, dtype: str) -> list[StepRow]:
    """Time operations, one after the other."""
    found = []
    for o in operations:
        totals = (o.count, o.count * o.launches, o.count * o.flops, o.count * o.read, o.count * o.written)
        gaps = o.launch_s(cluster)
        found.append(StepRow(o.name, o.phase, _PARTS[o.kind], *totals, o.seconds(cluster, dtype) + gaps, gaps))
    return found


def message_rows(
    messages: Iterable[Collective], layout: Layout, cluster: Cluster, shares: dict[str, float] | None = None
) -> list[StepRow]:
    """Time messages.

    Args:
        shares: by `Collective.what` the share that nothing hides, of recomputed ones that of the forward pass; messages
            that are not named are not hidden.
    """
    found = []
    for m in messages:
        whole, share = message_s(m, layout, cluster), (shares or {}).get(m.what.removesuffix(", recomputed"), 1.0)
        totals = (m.count, m.count, 0, m.total_bytes, m.total_bytes)
        latency = m.count * cluster.latency_us * 1e-6
        found.append(
            StepRow(m.what, m.phase, m.group, *totals, whole * share, hidden=whole * (1 - share), latency=latency)
        )
    return found


def crosses_nodes(layout: Layout, cluster: Cluster, with_stages: bool = False) -> bool:
    """Whether some group of consecutive tensor ranks is on two nodes: of several, if the group does not divide one.

    Args:
        with_stages: ask this of the ranks of a whole model, its stages included.
    """
    size = layout.tp_size * (layout.pp_size if with_stages else 1)
    return layout.world_size > cluster.devices_per_node and cluster.devices_per_node % size != 0


def message_s(message: Collective, layout: Layout, cluster: Cluster) -> float:
    """Seconds of all of a collective in full: 2 (p - 1) / p of an all-reduce's bytes over the bandwidth, half of that
    for the others, all bytes of a message to another stage, and a latency each.

    Source: Hockney 1994; Patarasuk and Yuan 2009 for the ring's 2 (p - 1) / p.
    """
    num_ranks = layout.axes[message.group]
    in_node = message.group != "data" and not crosses_nodes(layout, cluster, message.group == "pipeline")
    bandwidth = cluster.bandwidth(1 if in_node else layout.world_size)
    rounds = 2 if message.kind == "all_reduce" else 1  # it is a reduce-scatter and an all-gather
    share = 1 if message.kind == "send" else rounds * (num_ranks - 1) / num_ranks
    return message.count * (share * message.num_bytes / bandwidth + cluster.latency_us * 1e-6)
