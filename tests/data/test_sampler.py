"""The order of samples does not depend on the layout, and resumes at any step."""

import numpy as np

from lmscale.data.sampler import Blend, BlendedBatchSampler, GlobalBatchSampler

NUM_SAMPLES, BATCH, STEPS = 37, 12, 11  # 132 sequences: three epochs and a half, borders inside batches


def steps(dp_rank: int = 0, dp_size: int = 1, seed: int = 5, start: int = 0) -> list[list[list[int]]]:
    """For each step the references (sample number, epoch, index) of its samples."""
    return [step.tolist() for step in GlobalBatchSampler(NUM_SAMPLES, BATCH, dp_rank, dp_size, seed, STEPS, start)]


def test_every_epoch_has_every_sample_once_in_a_new_order() -> None:
    seen = [reference for step in steps() for reference in step]
    assert [number for number, _, _ in seen] == list(range(BATCH * STEPS))
    epochs = [[index for _, epoch, index in seen if epoch == e] for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(NUM_SAMPLES))
    assert epochs[0] != epochs[1] != epochs[2]


def test_an_epoch_smaller_than_a_batch_wraps_around() -> None:
    batch = next(iter(GlobalBatchSampler(5, 12, 0, 1, 1, 1)))
    assert [epoch for _, epoch, _ in batch] == [0] * 5 + [1] * 5 + [2] * 2


def test_references_of_a_range_are_those_of_its_steps() -> None:
    sampler = GlobalBatchSampler(NUM_SAMPLES, BATCH, 0, 1, 5, STEPS)
    assert sampler.references(30, 50).tolist() == [row for step in steps() for row in step][30:50]


def test_a_blend_refers_to_the_samples_of_each_dataset_in_its_own_order() -> None:
    class Ordered:
        def __init__(self, size: int) -> None:
            self.size = size

        def order(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return places // self.size, self.size - 1 - places % self.size

    datasets, blend = [Ordered(7), Ordered(3)], Blend([3, 1])
    ranks = [BlendedBatchSampler(24, 6, rank, 2, 5, 4, datasets=datasets, blend=blend) for rank in range(2)]
    found = [row for step in zip(*ranks, strict=True) for share in step for row in share.tolist()]
    which, places = (values.tolist() for values in blend.assign(0, 24))
    sizes = [datasets[number].size for number in which]
    assert found == [
        [n, place // size, (number << 40) + size - 1 - place % size]
        for n, (number, place, size) in enumerate(zip(which, places, sizes, strict=True))
    ]
