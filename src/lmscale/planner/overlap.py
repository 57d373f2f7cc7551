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

_OUTPUTS, _INPUT_GRADIENTS = "attention and MLP outputs", "gradients of attention and MLP inputs"
_INPUTS, _AGAIN = "attention and MLP inputs", "attention and MLP inputs, again"
_OUTPUT_GRADIENTS = "gradients of attention and MLP outputs"
# By the operation that needs a message: what is sent, and the operation before which it starts.
_PLAIN = {
    "attention dropout, residual, LayerNorm": (_OUTPUTS, "attention dropout, residual, LayerNorm"),
    "MLP dropout, residual": (_OUTPUTS, "MLP dropout, residual"),  # pre
    "MLP dropout, residual, LayerNorm": (_OUTPUTS, "MLP dropout, residual, LayerNorm"),  # post
    "MLP LayerNorm, residual, dropout": (_INPUT_GRADIENTS, "MLP up, gradient of the weight"),
    "attention LayerNorm, residual": (_INPUT_GRADIENTS, "QKV, gradient of the weight"),  # pre
    "residual": (_INPUT_GRADIENTS, "QKV, gradient of the weight"),  # post
}
_SEQUENCE = _PLAIN | {
    "QKV": (_INPUTS, "QKV"),
    "MLP up": (_INPUTS, "MLP up"),
    "MLP down, gradient of the input": (_OUTPUT_GRADIENTS, "MLP down, gradient of the input"),
    "attention projection, gradient of the input": (_OUTPUT_GRADIENTS, "attention projection, gradient of the input"),
    "MLP up, gradient of the weight": (_AGAIN, "MLP up, gradient of the input"),
    "QKV, gradient of the weight": (_AGAIN, "QKV, gradient of the input"),
}


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
            by_product = groupby(operations, key=lambda o: o.name.removesuffix(MAGNITUDE))  # which needs the message
            timed = [
                (name, sum(o.seconds(cluster, dtype) + o.launch_s(cluster) for o in group))
                for name, group in by_product
            ]
            messages = _SEQUENCE if layout.cuts_sequence else _PLAIN
            _pass(timed, messages, message_s, layout.batch_parts, number, waits, total)
    return {what: waits[what] / seconds for what, seconds in total.items()}


def _pass(
    operations: list[tuple[str, float]],
    messages: dict[str, tuple[str, str]],
    message_s: dict[str, float],
    parts: int,
    num_layers: int,
    waits: Counter,
    total: Counter,
) -> None:
    """Go through one pass over a layer, and add, for all such layers, the seconds of its messages and of the waits.

    As with `WaitLast` (`models/compiler_options.py`), the first part that can go on does; if all wait, the one whose
    message started first.
    """
    names = {name for name, _ in operations}
    starts = {before: (needed_by, what) for needed_by, (what, before) in messages.items() if needed_by in names}
    clock = free = 0.0  # of the rank and of its links
    done, arrivals = [0] * parts, [{} for _ in range(parts)]

    def start_message(part: int) -> None:
        nonlocal free
        name = operations[done[part]][0] if done[part] < len(operations) else None
        if name in starts:
            needed_by, what = starts[name]
            free = max(free, clock) + message_s[what]
            arrivals[part][needed_by] = free
            total[what] += num_layers * message_s[what]

    for part in range(parts):
        start_message(part)
    while any(number < len(operations) for number in done):
        left = [part for part in range(parts) if done[part] < len(operations)]
        part = min(left, key=lambda part: arrivals[part].get(operations[done[part]][0], 0.0))
        name, seconds = operations[done[part]]
        if name in arrivals[part]:
            waited = max(0.0, arrivals[part][name] - clock)
            waits[messages[name][0]] += num_layers * waited
            clock += waited
        clock += seconds
        done[part] += 1
        start_message(part)
