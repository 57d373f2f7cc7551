"""How much of the time of a layer's messages no computation hides, in the code that torch.compile generates.

A message starts when its operand is computed; what needs it waits. Between the two the rank computes what is
independent of it: the gradient of a weight behind f's all-reduce and, with `batch_halves`, the other half of the
micro-batch. Messages travel one at a time, beside kernels that keep their full rate: a GPU may be slower.
"""

from collections import Counter
from itertools import groupby

from ..config import Layout, TransformerConfig
from ..config.cluster import Cluster
from .layer_operations import MAGNITUDE, LayerCounts


def exposed_shares(
    config: TransformerConfig,
    layout: Layout,
    micro_batch_size: int,
    seq_length: int,
    dtype: str,
    cluster: Cluster,
    message_s: dict[str, float],
) -> dict[str, float]:
    """Share of the time of a layer's messages during which the rank waits, by `Collective.what`.

    Args:
        message_s: seconds of one message, by `Collective.what`.
    """
    waits, total = Counter(), Counter()
    for placement, number in Counter(config.layer_placements).items():
        layer = LayerCounts(config, placement, layout, micro_batch_size // layout.batch_parts, seq_length, dtype)
        for operations in (layer.forward("forward"), layer.backward()):
            by_product = groupby(operations, key=lambda o: o.name.removesuffix(MAGNITUDE))
            timed = []
            for first, *rest in (list(group) for _, group in by_product):
                seconds = sum(o.seconds(cluster, dtype) + o.launch_s(cluster) for o in (first, *rest))
                timed.append((seconds, first.starts, first.needs))
            _pass(timed, message_s, layout.batch_parts, number, waits, total)
    return {what: waits[what] / seconds for what, seconds in total.items()}


def _pass(
    operations: list[tuple[float, str, str]],
    message_s: dict[str, float],
    parts: int,
    num_layers: int,
    waits: Counter,
    total: Counter,
) -> None:
    """Go through one pass over a layer, and add, for all such layers, the seconds of its messages and of the waits.

    As with `WaitLast` (`models/compiler_options.py`), the first part that can go on does; if all wait, the one whose
    message started first.

    Args:
        operations: seconds, and the message that each starts and needs.
    """
    clock = free = 0.0  # of the rank and of its links
    done, arrivals = [0] * parts, [{} for _ in range(parts)]

    def start_message(part: int) -> None:
        nonlocal free
        what = operations[done[part]][1] if done[part] < len(operations) else ""
        if what:
            free = max(free, clock) + message_s[what]
            arrivals[part][what] = free
            total[what] += num_layers * message_s[what]

    for part in range(parts):
        start_message(part)
    while any(number < len(operations) for number in done):
        left = [part for part in range(parts) if done[part] < len(operations)]
        part = min(left, key=lambda part: arrivals[part].get(operations[done[part]][2], 0.0))
        seconds, _, needed = operations[done[part]]
        if needed:
            waited = max(0.0, arrivals[part][needed] - clock)
            waits[needed] += num_layers * waited
            clock += waited
        clock += seconds
        done[part] += 1
        start_message(part)
