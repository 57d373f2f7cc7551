"""Division of gradients into pieces for communication, and of optimizer state over data ranks (ZeRO stage 1).

Plain arithmetic shared by the optimizer and the planner.
"""

import heapq
from collections.abc import Sequence

PIECE_ELEMENTS = 25 * 2**20 // 4  # elements per piece: a bucket of torch's DDP holds as many fp32 numbers


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


def part_sizes(sizes: Sequence[int], num_owners: int) -> list[int]:
    """Return the number of elements per owner, which does not depend on the order of `sizes`."""
    parts = [0] * num_owners
    for size, owner in zip(sizes, assign_owners(sizes, num_owners), strict=True):
        parts[owner] += size
    return parts
