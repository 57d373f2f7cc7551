"""One training step of rank 0 in a world of any size, traced in one process: counts instead of numbers.

Nothing is computed or sent: tensors have shapes but no storage, and the process group is fake. The model, f, g and the
loss are the real ones, so the counts are those of a real rank.
"""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import fake_world
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from analysis.correctness.peak_memory import DTYPES, Case, soft_targets
from lmscale.config import Layout, TransformerConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext, sample_dropout_keys
from lmscale.planner.flops import scored_tokens

# The planner's kinds of collectives, as c10d names them.
KINDS = {"all_reduce": "allreduce_", "all_gather": "_allgather_base_", "reduce_scatter": "_reduce_scatter_base_"}
KINDS["broadcast"] = "broadcast_"
# Each collective's name as c10d has it. The group's name is the last argument of a functional collective and of a
# `SharedMemoryChannel`'s.
_NAMES = {
    "all_reduce": "allreduce_",
    "all_gather": "_allgather_base_",
    "all_gather_into_tensor": "_allgather_base_",
    "reduce_scatter": "_reduce_scatter_base_",
    "reduce_scatter_tensor": "_reduce_scatter_base_",
}
# Which argument of c10d's operations is the group.
_GROUP_PLACES = dict.fromkeys(("allreduce_", "broadcast_", "reduce_", "barrier", "send", "recv_"), 1)


@dataclass(frozen=True)
class Collective:
    """One collective issued by a rank.

    Args:
        kind: torch's name of the operation, `allreduce_` for an all-reduce of any backend.
        group: `tensor`, `pipeline`, `data`, `world` or `other`.
        phase: such as `forward` or `backward` (which includes recomputation).
        shape, num_bytes: of the rank's tensor, or of all tensors of a call with several.
    """

    kind: str
    group: str
    phase: str
    shape: tuple[int, ...]
    num_bytes: int


class CollectiveRecorder(TorchDispatchMode):
    """Context manager that records every collective of this rank, real or fake, in `collectives`.

    Args:
        context: names the groups; None before they exist, then `name_groups` names them. The caller sets `phase` when a
            new phase begins.
    """

    def __init__(self, context: ParallelContext | None = None) -> None:
        super().__init__()
        self.phase = "forward"
        self.collectives: list[Collective] = []
        self._names: dict[str, str] = {}
        if context is not None:
            self.name_groups(context)

    def name_groups(self, context: ParallelContext) -> None:
        """Name the groups of the collectives that follow."""
        groups = {"world": dist.group.WORLD, "tensor": context.tp_group, "data": context.dp_group}
        groups["pipeline"] = context.pp_group
        self._names = {group.group_name: name for name, group in groups.items() if group is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "lmscale") and func.overloadpacket.__name__ != "wait_tensor":
            # The larger of input and output of an all-gather or a reduce-scatter.
            given = [[leaf for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)] for arg in (*args, result)]
            tensors = max(given, key=lambda some: sum(t.numel() for t in some))
            name = func.overloadpacket.__name__
            self.collectives.append(
                Collective(
                    kind=_NAMES.get(name, name),
                    group=self._group_name(func, args),
                    phase=self.phase,
                    shape=tuple(tensors[0].shape) if len(tensors) == 1 else (sum(t.numel() for t in tensors),),
                    num_bytes=sum(t.numel() * t.element_size() for t in tensors),
                )
            )
        return result

    def _group_name(self, func: Any, args: tuple) -> str:
        if func.namespace != "c10d":
            return self._names.get(args[-1], "other")
        place = _GROUP_PLACES.get(func.overloadpacket.__name__, 2)
        return self._names.get(dist.ProcessGroup.unbox(args[place]).group_name, "other")


@dataclass(frozen=True)
class TraceReport:
    """Counts for rank 0 in the forward and backward pass of one micro-batch.

    Args:
        model_parameters: of the full model, counting replicated ones once; from the real modules.
        rank_parameters: held by one rank.
        collectives: every collective in order, without the gradient reduction over the data group, which happens once
            per step with the bytes of `rank_parameters`.
        flops: of one rank, forward, backward and recomputation; matrix products only, a multiply-add counts as two.
        seconds: duration of the trace.
    """

    model_parameters: int
    rank_parameters: int
    collectives: tuple[Collective, ...]
    flops: int
    seconds: float

    @property
    def num_collectives(self) -> int:
        """Number of collectives."""
        return len(self.collectives)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors passed to the collectives (payload, not the traffic of a ring algorithm)."""
        return sum(collective.num_bytes for collective in self.collectives)

    def count(self) -> Counter[Collective]:
        """Number of collectives by kind, group, phase and size."""
        return Counter(self.collectives)


def trace_step(
    config: TransformerConfig,
    layout: Layout,
    micro_batch_size: int,
    seq_length: int,
    dtype: torch.dtype = torch.bfloat16,
    teacher: TransformerConfig | None = None,
    top_k: int | None = None,
) -> TraceReport:
    """Count parameters, collectives and FLOPs of one micro-batch's forward and backward pass on rank 0 of `layout`.

    A world of 512 takes one process, seconds and a few hundred MB for any model size.

    Args:
        config: of a GPT or a BERT, including `recompute` and dropout.
        micro_batch_size: sequences.
        seq_length: tokens per sequence.
        dtype: of weights and activations.
        teacher: as it is built beside the model, whose forward pass precedes the model's.
        top_k: log-probabilities per scored token, given in place of a teacher.

    Raises:
        ValueError: `layout.tp_size` does not divide the model; a size below 1; a sequence longer than the positions.
        RuntimeError: this process already belongs to a process group.

    Source: section 5.1 for the configurations; the counting is ours.
    """
    config.check_tensor_parallel(layout.tp_size, layout.pad_heads)
    for name, size in (("micro_batch_size", micro_batch_size), ("seq_length", seq_length)):
        if size < 1:
            raise ValueError(f"`{name}` must be at least 1, but is {size}")
    if dist.is_initialized():
        raise RuntimeError("a trace needs a process without a process group, but one is initialised")
    start = time.perf_counter()
    with fake_world(0, layout.world_size):
        mesh = init_device_mesh("cpu", tuple(layout.axes.values()), mesh_dim_names=tuple(layout.axes))
        context = ParallelContext(
            tp_size=layout.tp_size,
            dp_size=layout.dp_size,
            tp_group=mesh.get_group("tensor"),
            dp_group=mesh.get_group("data"),
            sequence_parallel=layout.cuts_sequence,
            batch_halves=layout.cuts_batch,
            pad_heads=layout.pad_heads,
        )
        # The counter sees the matrix products of plain attention, not those inside torch's fused kernel for CPUs.
        with FakeTensorMode(), sdpa_kernel(SDPBackend.MATH):
            model = build_model(config, context, seed=None, dtype=dtype)
            teacher = teacher and build_model(teacher, context, seed=None, dtype=dtype).eval()
            with CollectiveRecorder(context) as recorder, FlopCounterMode(display=False) as counter:
                loss = _micro_batch_loss(model, teacher, top_k, micro_batch_size, seq_length, dtype)
                recorder.phase = "backward"
                loss.backward()
        return TraceReport(
            model_parameters=_count(param.shard.full_shape for param in model.parameters()),
            rank_parameters=_count(param.shape for param in model.parameters()),
            collectives=tuple(recorder.collectives),
            flops=counter.get_total_flops(),
            seconds=time.perf_counter() - start,
        )


def _count(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def _micro_batch_loss(
    model: nn.Module,
    teacher: nn.Module | None,
    top_k: int | None,
    micro_batch_size: int,
    seq_length: int,
    dtype: torch.dtype,
) -> Tensor:
    """Summed loss of a batch without data."""
    tokens = torch.zeros(micro_batch_size, seq_length, dtype=torch.int64)
    keys = sample_dropout_keys(0, torch.arange(micro_batch_size))
    scored = torch.zeros(micro_batch_size * scored_tokens(model.config, seq_length), dtype=torch.int64)
    name = next(name for name, each in DTYPES.items() if each == dtype)
    targets = soft_targets(Case(model.config, micro_batch_size, name, top_k=top_k), teacher, tokens, scored)
    if model.config.family == "gpt":
        return model(tokens, tokens, keys, targets=targets).sum()
    is_real = torch.ones_like(tokens, dtype=torch.bool)
    loss, order_logits = model(tokens, tokens, is_real, tokens, keys, scored, targets)
    return loss.sum() + F.cross_entropy(order_logits.float(), tokens[:, 0], reduction="sum")
