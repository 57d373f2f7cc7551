"""Division of layers into stages, of gradients into pieces for communication and these over data ranks (ZeRO stage 1),
and of the rows of the loss into chunks.

Plain arithmetic shared by the code that trains and the planner.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

PIECE_ELEMENTS = 25 * 2**20 // 4  # elements per piece, about: a bucket of torch's DDP holds as many fp32 numbers
# On GPUs, of any number of data ranks, and per data rank: the parts that a ring sends stay long enough to use its
# bandwidth. Source: the buckets of Megatron-LM (`distributed_data_parallel.py`).
PIECE_ELEMENTS_ON_GPU, PIECE_ELEMENTS_PER_RANK_ON_GPU = 40_000_000, 1_000_000
ROW_ELEMENTS = 1024  # per row of the gradient buffer, at most
ALIGNED = 8  # elements: kernels read 16 bytes at once, of a half type from addresses that are multiples of 16
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


class BufferPlan(NamedTuple):
    """Where the parameters are in a rank's gradient buffer, and the equal pieces in which it is communicated.

    Args:
        width: elements of a row, a power of two that divides the rows of all matrices.
        starts: first element of each parameter; padding follows to whole rows, and at the end to whole pieces.
        num_cuts: data ranks that update an equal part of every piece each.
    """

    width: int
    starts: tuple[int, ...]
    num_pieces: int
    piece_size: int
    num_cuts: int


def plan_buffer(
    sizes: Sequence[int], row_lengths: Iterable[int], dp_size: int = 1, zero1: bool = False, on_gpu: bool = False
) -> BufferPlan:
    """Lay out the gradient buffer: the last parameter first, the order in which the backward pass finishes them.

    Parameters and the cuts of every piece begin with a row.

    Args:
        sizes: elements of each parameter on one tensor rank, in model order.
        row_lengths: of the matrices among them.
        zero1: data ranks update an equal part of every piece each.
    """
    at_once, num_cuts = PIECE_ELEMENTS, dp_size if zero1 else 1
    if on_gpu:
        at_once = max(PIECE_ELEMENTS_ON_GPU, dp_size * PIECE_ELEMENTS_PER_RANK_ON_GPU)
    width = math.gcd(ROW_ELEMENTS, *row_lengths)
    unit = max(width, ALIGNED)
    *starts, total = itertools.accumulate((size + -size % unit for size in reversed(sizes)), initial=0)
    num_pieces, smallest = -(-total // at_once), num_cuts * unit
    piece_size = -(-total // (num_pieces * smallest)) * smallest
    return BufferPlan(width, tuple(reversed(starts)), -(-total // piece_size), piece_size, num_cuts)
