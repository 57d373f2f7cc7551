"""Division of layers into stages, of gradients into pieces for communication, of optimizer state over data ranks (ZeRO
stage 1), and of the rows of the loss into chunks.

Plain arithmetic shared by the code that trains and the planner.
"""

import functools
import heapq
import itertools
from collections.abc import Sequence

PIECE_ELEMENTS = 25 * 2**20 // 4  # elements per piece: a bucket of torch's DDP holds as many fp32 numbers
LOGITS_AT_ONCE = 50 * 2**20  # of one rank: 1,024 rows of 51,200 columns, or 8,192 rows of an eighth of them
# Each chunk reads and writes the weight's summed gradient, and 1,024 rows are too few tiles for the product that gives
# the gradient of the rows: 48 for the 132 units of an H200 at h 1,536.
LOGITS_AT_ONCE_ON_GPU = 4 * LOGITS_AT_ONCE
UPDATED_AT_ONCE_ON_GPU = 2**26  # elements with bf16 moments, if no compiled kernel updates them


@functools.cache
def stage_layers(num_layers: int, num_stages: int, head_layers: float = 0.0) -> tuple[range, ...]:
    """The layers of each stage of a pipeline, at least one each, such that the slowest stage is as fast as possible.

    The sizes of the stages before the last differ by at most one layer.

    Args:
        head_layers: the time of the last stage's output projection, in layers.
    """
    if num_stages == 1:
        return (range(num_layers),)
    others = num_stages - 1

    def slowest(last: int) -> float:
        return max(-(-(num_layers - last) // others), last + head_layers)

    last = min(range(1, num_layers - others + 1), key=lambda last: (slowest(last), -last))
    bounds = [(num_layers - last) * stage // others for stage in range(num_stages)]
    return tuple(range(a, b) for a, b in itertools.pairwise([*bounds, num_layers]))


def rows_at_once(num_columns: int, on_gpu: bool) -> int:
    """Rows that the loss projects at a time on `num_columns` columns of a rank: at least one, else LOGITS_AT_ONCE."""
    return max(1, (LOGITS_AT_ONCE_ON_GPU if on_gpu else LOGITS_AT_ONCE) // num_columns)


def buffer_pieces(num_elements: int) -> list[int]:
    """Return the number of elements of each piece in which `num_elements` contiguous ones are communicated."""
    whole, rest = divmod(num_elements, PIECE_ELEMENTS)
    return [PIECE_ELEMENTS] * whole + [rest] * (rest > 0)


def assign_owners(sizes: Sequence[int], num_owners: int) -> list[int]:
    """Assign each parameter to an owner, in order of decreasing size, always to the owner with the fewest elements.

    Parameters are not split, so that the pieces of a checkpoint equal the tensors of a rank. Up to a few dozen data
    ranks, a model's largest parameter is smaller than a rank's share.

    Args:
        sizes: elements of each parameter on one tensor rank, in model order.

    Returns:
        owner of each parameter.
    """
    owners = [0] * len(sizes)
    loads = [(0, owner) for owner in range(num_owners)]  # a heap
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, owners[index] = loads[0]
        heapq.heapreplace(loads, (load + sizes[index], owners[index]))
    return owners
