"""Shuffled documents and windows over them: equal to a plain construction; properties of the shuffles."""

import io

import numpy as np
import pytest

from lmscale.data.gpt_index import GPTOrder, write_windows
from lmscale.data.permutation import TABLE_SIZE, Permutation

SIZES = np.array([7, 1, 0, 30, 4, 11, 2, 19, 5, 3], dtype=np.int32)  # 82 tokens


def order(num_samples: int, s: int = 5, seed: int = 1, identity: str = "x") -> GPTOrder:
    return GPTOrder(identity, len(SIZES), int(SIZES.sum()), s, seed, num_samples)


def table(made: GPTOrder, sizes: np.ndarray = SIZES) -> np.ndarray:
    file = io.BytesIO()
    write_windows(file, made, sizes)
    file.seek(0)
    return np.load(file)


@pytest.mark.parametrize(("num_samples", "s"), [(1, 5), (16, 5), (17, 5), (60, 5), (9, 81), (200, 3), (500, 1)])
def test_the_index_holds_the_start_of_each_window(num_samples, s) -> None:
    made = order(num_samples, s)
    documents = made.documents_at(np.arange(made.num_epochs * len(SIZES)))
    stream = [(p, offset) for p, document in enumerate(documents) for offset in range(SIZES[document])]
    assert made.num_windows == (len(stream) - 1) // s >= num_samples
    assert np.array_equal(table(made), [stream[k * s] for k in range(made.num_windows + 1)])


def test_the_number_of_epochs_is_minimal() -> None:
    """82 tokens are 16 windows of 5 an epoch; two epochs 32, because one window spans the border; three 49."""
    assert [order(n).num_epochs for n in (1, 16, 17, 32, 33, 49, 50)] == [1, 1, 2, 2, 3, 3, 4]
    assert [order(n, s=41).num_epochs for n in (1, 2)] == [1, 2]  # two windows of 41 need the token behind them


def test_the_last_epoch_is_separate_below_80_percent_of_its_samples() -> None:
    together = {n: order(n).num_epochs_together for n in (16, 17, 27, 28, 32, 33, 43, 44)}
    assert together == {16: 1, 17: 1, 27: 1, 28: 2, 32: 2, 33: 2, 43: 2, 44: 3}


def test_every_epoch_has_every_document_once_if_the_last_is_separate() -> None:
    made = order(20)
    documents = made.documents_at(np.arange(2 * len(SIZES)))
    assert sorted(documents[:10]) == sorted(documents[10:]) == list(range(10))
    windows = made.windows_at(np.arange(made.num_windows))
    assert sorted(windows[:16]) == list(range(16)) and sorted(windows[16:]) == list(range(16, 32))
    assert len({tuple(documents[:10]), tuple(documents[10:]), tuple(range(10))}) == 3
    assert len({tuple(windows[:16]), tuple(windows[16:] - 16), tuple(range(16))}) == 3


def test_epochs_shuffled_together_hold_every_document_equally_often() -> None:
    made = order(49)
    documents = made.documents_at(np.arange(3 * len(SIZES)))
    assert np.bincount(documents).tolist() == [3] * 10
    assert sorted(documents[:10]) != list(range(10))
    assert sorted(made.windows_at(np.arange(made.num_windows))) == list(range(made.num_windows))


def test_the_order_is_a_function_of_dataset_seed_and_length_and_changes_with_each() -> None:
    def drawn(made: GPTOrder) -> tuple:
        return tuple(made.documents_at(np.arange(10))), tuple(made.windows_at(np.arange(10)))

    first = drawn(order(16))
    assert drawn(order(16)) == first == drawn(order(3))  # as many epochs
    others = [drawn(made) for made in (order(17), order(16, seed=2), order(16, identity="y"), order(16, s=4))]
    assert len({first, *others}) == 5
    assert len({first[0], *(other[0] for other in others)}) == 5


def test_tables_beyond_32_bits_use_int64() -> None:
    sizes = np.array([2**33, 5], dtype=np.int64)
    made = GPTOrder("x", 2, int(sizes.sum()), 2**31, 1, 3)
    rows = table(made, sizes)
    assert rows.dtype == np.int64 and rows[:, 1].max() >= 2**32
    assert table(order(3)).dtype == np.uint32


@pytest.mark.parametrize("size", [1, 2, 3, 1000, TABLE_SIZE, TABLE_SIZE + 1, 3 * 2**19, 2**21])
def test_a_permutation_has_every_number_once(size) -> None:
    places = np.arange(size)
    permutation = Permutation(size, "a")
    found = permutation(places)
    assert found.dtype == np.int64 and np.array_equal(np.sort(found), places)
    some = np.array([size - 1, 0, size // 2])
    assert np.array_equal(permutation(some), found[some])  # each position separately
    if size > 3:
        assert not np.array_equal(found, Permutation(size, "b")(places))


def test_a_computed_permutation_is_uniform() -> None:
    """Where a number goes, and where two neighbours go together: chi-squares of 31 and 255 degrees, over 40 draws."""
    size = 2 * TABLE_SIZE - 5
    single, pair = np.zeros(32), np.zeros(256)
    steps = np.zeros(32)
    for name in range(40):
        found = Permutation(size, str(name))(np.arange(20_000))
        single += np.bincount(found * 32 // size, minlength=32)
        cells = found * 16 // size
        pair += np.bincount(cells[:-1:2] * 16 + cells[1::2], minlength=256)
        steps += np.bincount((np.diff(found) % size) * 32 // size, minlength=32)
    for counts, degrees in ((single, 31), (pair, 255), (steps, 31)):
        expected = counts.sum() / len(counts)
        statistic = ((counts - expected) ** 2 / expected).sum()
        assert abs(statistic - degrees) < 5 * np.sqrt(2 * degrees), statistic
