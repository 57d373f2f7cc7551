"""Which data rank keeps the optimizer's state of which parameter with ZeRO stage 1."""

from collections.abc import Sequence


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
