import numpy as np
import pytest

from lmscale.corpus import minhash
from lmscale.corpus.minhash import band_hashes
from lmscale.corpus.shingles import mix


def random_values(number: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, number, dtype=np.uint64)


def candidate_probability(jaccard: float, bands: int, rows: int) -> float:
    """Probability that two documents agree in a band (Leskovec et al., "Mining of massive datasets", section 3.4)."""
    return 1 - (1 - jaccard**rows) ** bands


def planted_pairs(num_pairs: int, common: int, own: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents 2k and 2k + 1 share `common` shingles and have `own` others each."""
    values = random_values(num_pairs * (common + 2 * own), seed).reshape(num_pairs, -1)
    one, other = values[:, : common + own], np.delete(values, np.s_[common : common + own], axis=1)
    documents = np.stack([one, other], axis=1).reshape(2 * num_pairs, common + own)
    documents.sort(axis=1)
    return documents.ravel(), np.arange(2 * num_pairs + 1) * (common + own)


@pytest.mark.parametrize(("common", "own"), [(7, 1), (70, 15), (700, 150), (20, 40)])
def test_bands_agree_with_the_expected_probability(common, own) -> None:
    num_pairs, bands, rows = 2000, 25, 5
    values, offsets = planted_pairs(num_pairs, common, own, seed=3)
    hashes = band_hashes(values, offsets, bands, rows)
    agree = hashes[0::2] == hashes[1::2]
    jaccard = common / (common + 2 * own)
    for found, expected in (
        (agree.mean(axis=1), jaccard**rows),
        (agree.any(axis=1), candidate_probability(jaccard, bands, rows)),
    ):
        error = max(found.std(), 0.01) / num_pairs**0.5  # of the mean, from the pairs, which are independent
        assert abs(found.mean() - expected) < 5 * error


def test_rows_agree_with_a_probability_equal_to_the_similarity() -> None:
    values, offsets = planted_pairs(2000, 80, 17, seed=4)
    agree = (lambda h: h[0::2] == h[1::2])(band_hashes(values, offsets, bands=125, rows=1))
    # Per row over 2,000 pairs: standard deviation 0.0102; 125 of them stay within 4.5.
    assert abs(agree.mean(axis=0) - 80 / 114).max() < 0.046
    # Rows are independent of one another: the number that agree has the binomial variance, to four standard errors.
    variance = 125 * 80 / 114 * 34 / 114
    assert abs(agree.sum(axis=1).var() / variance - 1) < 4 * (2 / 2000) ** 0.5


def test_signatures_are_minimal_products() -> None:
    values = np.sort(random_values(40, 5))
    offsets = np.array([0, 13, 40])
    hashes = band_hashes(values, offsets, bands=3, rows=1)
    step = 0x9E3779B97F4A7C15
    states = np.array([(1234 + (k + 1) * step) % 2**64 for k in range(3)], dtype=np.uint64)
    multipliers = [(int(value) >> 32) | 1 for value in mix(states)]
    for document in range(2):
        x = [int(value) >> 32 for value in values[offsets[document] : offsets[document + 1]]]
        smallest = np.array([min(a * v % 2**32 for v in x) for a in multipliers], dtype=np.uint64)
        assert hashes[document].tolist() == mix(smallest).tolist()


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_block_boundaries_do_not_change_the_result(monkeypatch, size) -> None:
    counts = np.array([0, 3, 0, 0, 200, 1, 64, 0, 5, 0])
    offsets = np.concatenate([[0], np.cumsum(counts)])
    values = random_values(offsets[-1], 6)
    expected = band_hashes(values, offsets, 4, 3)
    monkeypatch.setattr(minhash, "BLOCK_VALUES", size)
    assert np.array_equal(band_hashes(values, offsets, 4, 3), expected)
    # A document's hashes do not depend on its batch.
    for document, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        alone = band_hashes(values[start:end], np.array([0, end - start]), 4, 3)
        assert np.array_equal(alone[0], expected[document])


def test_documents_without_shingles_are_equal_and_no_documents_have_no_hashes() -> None:
    hashes = band_hashes(random_values(5, 1), np.array([0, 0, 5, 5]), 4, 2)
    assert np.array_equal(hashes[0], hashes[2]) and not (hashes[0] == hashes[1]).any()
    assert band_hashes(np.empty(0, dtype=np.uint64), np.array([0]), 4, 2).shape == (0, 4)


def test_hashes_are_the_same_in_every_version() -> None:
    hashes = band_hashes(random_values(50, 2), np.array([0, 20, 50]))
    assert hashes.shape == (2, 25) and hashes.dtype == np.uint64
    assert hashes[0, [0, -1]].tolist() == [13897662509719198670, 13792882620500617169]
    assert hashes[1, [0, -1]].tolist() == [9461208925580662217, 3671567683581690220]
