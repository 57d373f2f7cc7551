"""Near-duplicates: MinHash against probabilities, pairs and clusters against plain Python, recall on real texts."""

import itertools
import json
import random
from collections import defaultdict, deque

import numpy as np
import pytest
from ground_truth import (
    newsgroup_bodies,
    race_articles,
    removals,
    searched_pairs,
    similar_pairs,
)

from lmscale.corpus import duplicates, minhash
from lmscale.corpus.duplicates import candidate_pairs, causes, choose_survivors, clusters, exact_jaccard
from lmscale.corpus.minhash import band_hashes
from lmscale.hashing import mix


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


def as_pairs(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def as_dict(pairs: np.ndarray, jaccard: np.ndarray) -> dict[tuple[int, int], float]:
    return dict(zip(map(tuple, pairs.tolist()), jaccard.tolist(), strict=True))


def as_sets(sets: list[set[int]]) -> tuple[np.ndarray, np.ndarray]:
    values = [np.array(sorted(held), dtype=np.uint64) for held in sets]
    return np.concatenate(values), np.cumsum([0, *map(len, values)])


def random_graph(num_documents: int, num_edges: int, seed: int) -> np.ndarray:
    generator = random.Random(seed)
    edges = {tuple(sorted(generator.sample(range(num_documents), 2))) for _ in range(num_edges)}
    return as_pairs(*generator.sample(sorted(edges), len(edges)))


def plain_distances(num_documents: int, pairs: np.ndarray, starts: list[int]) -> dict[int, int]:
    """Fewest pairs from any of `starts` to each document that can be reached."""
    neighbours = defaultdict(list)
    for i, j in pairs.tolist():
        neighbours[i].append(j)
        neighbours[j].append(i)
    distance, queue = dict.fromkeys(starts, 0), deque(starts)
    while queue:
        one = queue.popleft()
        for other in neighbours[one]:
            if other not in distance:
                distance[other] = distance[one] + 1
                queue.append(other)
    return distance


# ---- candidates


def test_all_pairs_of_equal_hashes_are_candidates() -> None:
    band = np.random.default_rng(1).integers(0, 40, 200).astype(np.uint64) << np.uint64(50)
    pairs, num_large = candidate_pairs(band, largest_bucket=1000)
    expected = [(i, j) for i, j in itertools.combinations(range(200), 2) if band[i] == band[j]]
    assert pairs.dtype == np.int64 and list(map(tuple, pairs.tolist())) == expected and num_large == 0


def test_a_bucket_above_the_limit_pairs_with_predecessor_and_first_and_is_counted() -> None:
    band = np.array([7, 5, 7, 7, 5, 7, 9, 7, 5], dtype=np.uint64)  # 7 at 0, 2, 3, 5, 7; 5 at 1, 4, 8
    small = [(1, 4), (1, 8), (4, 8)]
    large = [(0, 2), (0, 3), (2, 3), (0, 5), (3, 5), (0, 7), (5, 7)]
    pairs, num_large = candidate_pairs(band, largest_bucket=4)
    assert list(map(tuple, pairs.tolist())) == sorted(small + large) and num_large == 1
    pairs, num_large = candidate_pairs(band, largest_bucket=5)
    assert len(pairs) == 3 + 10 and num_large == 0


def test_bands_without_equal_hashes_have_no_candidates() -> None:
    for number in (0, 1, 5):
        pairs, num_large = candidate_pairs(np.arange(number, dtype=np.uint64))
        assert pairs.shape == (0, 2) and num_large == 0


# ---- exact similarity


@pytest.mark.parametrize("block", [1, 50, 2**17])
def test_jaccard_equals_that_of_python_sets(monkeypatch, block) -> None:
    monkeypatch.setattr(duplicates, "BLOCK_VALUES", block)
    generator = random.Random(2)
    sizes = [0, 0, 1, 1, 2, 5, 9, 30, 31, 200, 900]
    sets = [{generator.randrange(1000) * 2**54 for _ in range(size)} for size in sizes]
    sets += [{0, 2**64 - 1}, {2**64 - 1}, set(sets[-1])]
    pairs = as_pairs(*itertools.combinations(range(len(sets)), 2))
    pairs = pairs[np.random.default_rng(3).permutation(len(pairs))]
    expected = [len(sets[i] & sets[j]) / max(len(sets[i] | sets[j]), 1) for i, j in pairs.tolist()]
    found = exact_jaccard(*as_sets(sets), pairs)
    assert found.dtype == np.float64 and found.tolist() == expected


def test_jaccard_of_no_pairs_is_empty() -> None:
    assert exact_jaccard(*as_sets([{1}, {2}]), as_pairs()).shape == (0,)


# ---- clusters


@pytest.mark.parametrize("seed", range(5))
def test_clusters_are_connected_components_named_by_their_smallest(seed) -> None:
    pairs = random_graph(300, 40 * (seed + 1) ** 2 // 3, seed)
    labels = clusters(300, pairs)
    for document in range(300):
        reached = plain_distances(300, pairs, [document])
        assert labels[document] == min(reached)


def test_a_chain_of_100_000_in_any_order_is_one_cluster() -> None:
    order = np.random.default_rng(4).permutation(100_000)
    chain = np.stack([order[:-1], order[1:]], axis=1)
    for pairs in (chain, np.sort(chain, axis=1), chain[np.random.default_rng(5).permutation(len(chain))]):
        assert (clusters(100_000, pairs) == 0).all()


def test_without_pairs_every_document_is_a_cluster() -> None:
    assert clusters(4, as_pairs()).tolist() == [0, 1, 2, 3]
    assert clusters(0, as_pairs()).tolist() == []


# ---- survivors


def test_the_longest_is_kept_then_the_smallest_number() -> None:
    labels = np.array([0, 0, 0, 3, 3, 3, 6, 6, 8])
    lengths = np.array([5, 9, 7, 4, 4, 4, 2, 2, 1])
    keep = choose_survivors(labels, lengths)
    assert np.flatnonzero(keep).tolist() == [1, 3, 6, 8]


# ---- causes


@pytest.mark.parametrize("seed", range(5))
def test_causes_lead_to_the_survivor_over_the_fewest_pairs(seed) -> None:
    pairs = random_graph(200, 90 * (seed + 1), seed)
    jaccard = np.random.default_rng(seed).integers(70, 75, len(pairs)) / 100  # many ties
    labels = clusters(200, pairs)
    keep = choose_survivors(labels, np.random.default_rng(seed).integers(1, 9, 200))
    removed, because_of, similarity = causes(labels, keep, pairs, jaccard)
    assert removed.tolist() == np.flatnonzero(~keep).tolist()
    distance = plain_distances(200, pairs, np.flatnonzero(keep).tolist())
    held = {frozenset(pair): value for pair, value in zip(pairs.tolist(), jaccard.tolist(), strict=True)}
    for i, j, value in zip(removed.tolist(), because_of.tolist(), similarity.tolist(), strict=True):
        nearer = [k for k in range(200) if frozenset((i, k)) in held and distance[k] == distance[i] - 1]
        assert j == min(nearer, key=lambda k, i=i: (-held[frozenset((i, k))], k))
        assert value == held[frozenset((i, j))]


def test_no_removals_have_no_causes() -> None:
    for found in causes(np.arange(3), np.ones(3, dtype=bool), as_pairs(), np.empty(0)):
        assert len(found) == 0


# ---- the whole search on real texts


def assert_recall_and_precision(found: dict, truth: dict) -> None:
    assert all(abs(truth[pair] - found[pair]) < 1e-12 for pair in truth.keys() & found.keys())
    assert len(truth.keys() & found.keys()) >= 0.99 * len(truth)  # recall
    assert found.keys() <= truth.keys()  # precision 1


@pytest.fixture(scope="module")
def newsgroups(shared_data) -> tuple[dict[str, str], np.ndarray, np.ndarray]:
    """Bodies by post, the pairs that the search finds, and their similarities."""
    bodies = newsgroup_bodies(shared_data)
    return bodies, *searched_pairs(list(bodies.values()))


def test_recall_and_precision_on_the_newsgroups(newsgroups) -> None:
    bodies, *pairs = newsgroups
    texts = list(bodies.values())
    truth, found = similar_pairs(texts, 5, 0.7), as_dict(*pairs)
    assert len(texts) == 8997 and len(truth) > 900
    assert_recall_and_precision(found, truth)
    # Again without short bodies, since any two empty ones form a pair.
    is_long = [len(text.split()) >= 20 for text in texts]
    truth, found = ({p: s for p, s in pairs.items() if is_long[p[0]] and is_long[p[1]]} for pairs in (truth, found))
    assert len(truth) > 400
    assert_recall_and_precision(found, truth)


@pytest.fixture(scope="module")
def race(shared_data) -> tuple[int, dict, dict]:
    """Passages of dev, which come before those of train; all pairs there are, and those that the search finds."""
    dev, train = race_articles(shared_data, "dev"), race_articles(shared_data, "train")
    assert (len(dev), len(train)) == (1389, 25_137)
    return len(dev), similar_pairs(dev + train, 5, 0.7), as_dict(*searched_pairs(dev + train))


@pytest.mark.slow
def test_recall_and_precision_on_race(race) -> None:
    num_dev, truth, found = race
    truth, found = ({p: s for p, s in pairs.items() if p[0] >= num_dev} for pairs in (truth, found))
    assert len(truth) > 1200
    assert_recall_and_precision(found, truth)


@pytest.mark.slow
def test_races_leakage_from_dev_into_train_is_listed(race) -> None:
    num_dev, truth, found = race
    truth, found = ({p: s for p, s in pairs.items() if p[0] < num_dev <= p[1]} for pairs in (truth, found))
    assert len(truth) > 100
    assert_recall_and_precision(found, truth)


def test_every_set_of_cross_posts_is_in_one_cluster(shared_data, newsgroups) -> None:
    bodies, pairs, _ = newsgroups
    label = dict(zip(bodies, clusters(len(bodies), pairs).tolist(), strict=True))
    sets = json.loads((shared_data / "newsgroups" / "crossposts.shared.json").read_text(encoding="utf-8"))
    assert len(sets) == 230
    assert [posts for posts in sets if len({label[post] for post in posts}) > 1] == []


def test_removals_and_their_causes_do_not_depend_on_the_order_of_the_input(newsgroups) -> None:
    texts = list(set(newsgroups[0].values()))
    expected = removals(sorted(texts))
    assert len(expected) > 100
    random.Random(8).shuffle(texts)
    assert removals(texts) == expected
