"""How much of the time of messages no computation hides on a GPU.

A message starts when its operand is computed; what needs it waits. Between the two the rank computes what is
independent of it: within a layer, in the code that torch.compile generates, the gradient of a weight behind f's
all-reduce and, with `batch_halves`, the other half of the micro-batch; of the data group, the rest of a pass.
Messages of a group travel one at a time, beside kernels that keep their full rate: `StepTime.slowest` has a bound.
"""

from collections import Counter
from itertools import groupby

from ..config import Layout
from ..config.cluster import Cluster
from .layer_operations import MAGNITUDE, LayerCounts
from .params import rank_buffer, rank_parameters, stage_placements
from .workload import Workload


def exposed_shares(
    job: Workload, layout: Layout, stage: int, cluster: Cluster, message_s: dict[str, float]
) -> dict[str, float]:
    """Share of the time of a layer's messages during which the rank waits, by `Collective.what`.

    Args:
        message_s: seconds of one message, by `Collective.what`.
    """
    waits, total = Counter(), Counter()
    for placement, number in Counter(stage_placements(job.config, layout, stage)).items():
        layer = LayerCounts(job, layout, placement)
        for operations in (layer.forward("forward"), layer.backward()):
            by_product = groupby(operations, key=lambda o: o.name.removesuffix(MAGNITUDE))
            timed = []
            for first, *rest in (list(group) for _, group in by_product):
                seconds = sum(o.seconds(cluster, job.dtype) + o.launch_s(cluster) for o in (first, *rest))
                timed.append((seconds, first.starts, first.needs))
            for what, seconds in _waits(timed, message_s, layout.batch_parts):
                waits[what] += number * seconds
            for _, what, _ in timed * layout.batch_parts:
                if what:
                    total[what] += number * message_s[what]
    return {what: waits[what] / seconds for what, seconds in total.items()}


def exposed_of_pieces(job: Workload, layout: Layout, stage: int, pass_s: float, message_s: float) -> float:
    """Share of the time of the gradient buffer's messages for which the rank waits.

    Gradients: a piece is sent when the last backward pass of a step has left the layer of its last gradient, which for
    an embedding is the end; the rank waits for what is left after the pass. Weights, with ZeRO stage 1: pieces come in
    the opposite order, and the first forward pass of the next step waits for each before the layer that reads it: as
    long, for a pass of the same length (`GradientBuffer`). Layers count as equally large and long.

    Args:
        pass_s: seconds of that pass over one micro-batch, without heads and loss, whose time hides nothing.
        message_s: seconds of one piece.
    """
    buffer = rank_buffer(job.config, layout, job.on_gpu, stage)
    num_layers = len(stage_placements(job.config, layout, stage))
    parameters = rank_parameters(job.config, layout, stage)
    layers = sum(each.size for each in parameters if "embedding" not in each.part)
    end = 0.0
    for piece in range(1, buffer.num_pieces + 1):
        num_done = min(num_layers, -(-piece * buffer.piece_size * num_layers // layers))
        end = max(end, pass_s * num_done / num_layers) + message_s
    return max(0.0, end - pass_s) / (buffer.num_pieces * message_s)


def _waits(
    operations: list[tuple[float, str, str]], message_s: dict[str, float], parts: int
) -> list[tuple[str, float]]:
    """Each wait of one pass over a layer: for which message, and its seconds.

    As with `WaitLast` (`models/compiler_options.py`), the first part that can go on does; if all wait, the one whose
    message started first.

    Args:
        operations: seconds, and the message that each starts and needs.
    """
    clock = free = 0.0  # of the rank and of its links
    done, arrivals, waits = [0] * parts, [{} for _ in range(parts)], []

    def start_message(part: int) -> None:
        nonlocal free
        what = operations[done[part]][1] if done[part] < len(operations) else ""
        if what:
            free = max(free, clock) + message_s[what]
            arrivals[part][what] = free

    for part in range(parts):
        start_message(part)
    while any(number < len(operations) for number in done):
        left = [part for part in range(parts) if done[part] < len(operations)]
        part = min(left, key=lambda part: arrivals[part].get(operations[done[part]][2], 0.0))
        seconds, _, needed = operations[done[part]]
        if needed:
            waits.append((needed, max(0.0, arrivals[part][needed] - clock)))
            clock += waits[-1][1]
        clock += seconds
        done[part] += 1
        start_message(part)
    return waits
