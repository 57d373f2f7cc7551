"""How gradients and the optimizer's state are divided: in pieces to send, and with ZeRO stage 1 over the data ranks.

Plain arithmetic, shared by the optimizer, which does it, and the planner, which counts it.
"""

from collections.abc import Sequence

PIECE_ELEMENTS = 25 * 2**20 // 4  # of the optimizer's buffer; torch's DDP has buckets of as many fp32 numbers


def buffer_pieces(num_elements: int) -> list[int]:
    """Elements of each piece in which the optimizer's buffer sends `num_elements` that lie together."""
    whole, rest = divmod(num_elements, PIECE_ELEMENTS)
    return [PIECE_ELEMENTS] * whole + [rest] * (rest > 0)


def assign_owners(sizes: Sequence[int], num_owners: int) -> list[int]:
    """Deal out parameters whole, the largest first, each to the owner with the least so far.

    Whole parameters, because a checkpoint's pieces then are what a rank has; the largest of a model is smaller than a
    data rank's part up to a few dozen data ranks.

    Args:
        sizes: elements of each parameter on one tensor rank, in the order of the model.

    Returns:
        the owner of each parameter.
    """
    load, owners = [0] * num_owners, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = load.index(min(load))
        load[owners[index]] += sizes[index]
    return owners


def part_sizes(sizes: Sequence[int], num_owners: int) -> list[int]:
    """Elements of each owner's parameters; they do not depend on the order of `sizes`."""
    parts = [0] * num_owners
    for size, owner in zip(sizes, assign_owners(sizes, num_owners), strict=True):
        parts[owner] += size
    return parts
