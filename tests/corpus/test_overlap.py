import random
import re
import time

import numpy as np
import pytest

from lmscale.corpus import overlap
from lmscale.corpus.overlap import EvaluationIndex
from lmscale.corpus.shingles import word_ngrams


def plain_ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def plain_contaminates(
    documents: list[str], items: list[str], n: int, threshold: float
) -> list[tuple[int, int, float]]:
    found = []
    for d, document in enumerate(documents):
        held = set(plain_ngrams(document, n))
        for i, item in enumerate(items):
            wanted = set(plain_ngrams(item, n))
            if wanted and len(wanted & held) / len(wanted) >= threshold:
                found.append((d, i, len(wanted & held) / len(wanted)))
    return found


def found_by(index: EvaluationIndex, documents: list[str], threshold: float) -> list[tuple[int, int, float]]:
    columns = index.contaminates(*word_ngrams(documents, index.n), threshold)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def random_texts(number: int, longest: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices("abc", k=generator.randint(0, longest))) for _ in range(number)]


@pytest.mark.parametrize("threshold", [0.01, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("block", [1, 2**22])
def test_contaminated_documents_equal_those_of_python_sets(monkeypatch, threshold, block) -> None:
    monkeypatch.setattr(overlap, "BLOCK_ITEMS", block)
    items, documents = random_texts(40, 12, 1), random_texts(60, 30, 2)
    expected = plain_contaminates(documents, items, 3, threshold)
    assert len(expected) > 20
    assert found_by(EvaluationIndex({"set": items}, 3), documents, threshold) == expected


def test_a_bitmap_with_many_false_positives_does_not_change_the_result(monkeypatch) -> None:
    monkeypatch.setattr(overlap, "LARGEST_FILTER", 2)
    items, documents = random_texts(40, 12, 1), random_texts(60, 30, 2)
    expected = plain_contaminates(documents, items, 3, 0.5)
    assert found_by(EvaluationIndex({"set": items}, 3), documents, 0.5) == expected


def test_half_of_an_items_ngrams_is_enough_and_less_is_not() -> None:
    item = " ".join(f"w{k}" for k in range(17))  # 10 n-grams of 8
    index = EvaluationIndex({"set": [item]}, 8)
    assert index.num_ngrams.tolist() == [10]
    half = "before " + " ".join(f"w{k}" for k in range(12)) + " after"  # 5 of them
    less = "before " + " ".join(f"w{k}" for k in range(11)) + " after"
    assert found_by(index, [less, half], 0.5) == [(1, 0, 0.5)]


def test_a_repeated_ngram_counts_once_per_item_and_document() -> None:
    index = EvaluationIndex({"set": ["a b a b a b c d"]}, 2)  # ab, ba, bc, cd
    assert index.num_ngrams.tolist() == [4]
    assert found_by(index, ["a b x a b y a b"], 0.01) == [(0, 0, 0.25)]


def test_items_are_named_by_set_and_number() -> None:
    index = EvaluationIndex({"one": ["a b c", "d e f"], "two": ["a b c", "x"]}, 3)
    assert index.names == ["one/0", "one/1", "two/0", "two/1"]
    assert found_by(index, ["A, B: c!"], 1) == [(0, 0, 1.0), (0, 2, 1.0)]


def test_items_too_short_to_check_are_listed_and_never_found() -> None:
    index = EvaluationIndex({"set": ["yes", "", "a b c d e f g", "a b c d e f g h"]}, 8)
    assert np.flatnonzero(index.num_ngrams == 0).tolist() == [0, 1, 2]
    # Use the short items as documents: their only n-gram would match.
    assert found_by(index, ["yes", "", "a b c d e f g", "a b c d e f g h"], 0.01) == [(3, 3, 1.0)]
    report = index.overlap(index.new_seen())
    assert report["set"]["items"] == 4 and report["set"]["items_not_checkable"] == 3


def test_overlap_counts_positions_and_combines_shards() -> None:
    items = {"one": ["a b c a b c a b", "q r s"], "two": ["x y z"], "none": []}
    index = EvaluationIndex(items, 3)
    shards = []
    for documents in (["z a b c"], ["b c a", "r s q"], ["x y z x"]):
        seen = index.new_seen()
        index.mark_seen(word_ngrams(documents, 3)[0], seen)
        shards.append(seen)
    report = index.overlap(shards[0] | shards[1])
    # abc 2 times, bca 2 times, cab 2 times, qrs once; abc and bca are seen.
    assert report["one"] == {
        "percent": pytest.approx(400 / 7),
        "ngrams": 7,
        "ngrams_found": 4,
        "items": 2,
        "items_not_checkable": 0,
    }
    assert report["two"]["percent"] == 0
    assert index.overlap(np.logical_or.reduce(shards))["two"]["percent"] == 100
    assert report["none"] == {"percent": 0, "ngrams": 0, "ngrams_found": 0, "items": 0, "items_not_checkable": 0}


def test_an_empty_index_finds_nothing() -> None:
    for sets in ({}, {"set": []}, {"set": ["short"]}):
        index = EvaluationIndex(sets, 8)
        assert found_by(index, ["a b c d e f g h i", ""], 0.5) == []
        seen = index.new_seen()
        index.mark_seen(word_ngrams(["a b c d e f g h i"], 8)[0], seen)
        assert all(held["percent"] == 0 for held in index.overlap(seen).values())
    assert found_by(EvaluationIndex({"set": ["a b c"]}, 3), [], 0.5) == []


def test_a_phrase_shared_by_30_000_items_takes_bounded_time() -> None:
    phrase = "the following is a question with several choices"
    items = [f"{phrase} {k} x{k} y{k} z{k} u{k} v{k} w{k} q{k} r{k}" for k in range(30_000)]
    index = EvaluationIndex({"set": items}, 8)
    documents = [f"before {phrase} after {k}" for k in range(100)] + [items[777]]
    started = time.perf_counter()
    assert found_by(index, documents, 0.5) == [(100, 777, 1.0)]
    assert time.perf_counter() - started < 3
