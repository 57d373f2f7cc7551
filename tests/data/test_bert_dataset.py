"""BERT's samples: statistics of the masks, and that every choice is a pure function of (seed, epoch, index)."""

import dataclasses
import pickle

import numpy as np
import pytest
from corpora import SyntheticBERTCorpus, prepare_texts

from lmscale.config.data import DataConfig
from lmscale.data.bert_dataset import BERTDataset, choose_spans, truncate_pair

NUM_SAMPLES = 4000


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> SyntheticBERTCorpus:
    return SyntheticBERTCorpus(tmp_path_factory.mktemp("bert"), 4000, 23, 23)


def make(corpus, seed: int = 1234, **changes) -> BERTDataset:
    config = DataConfig("embedded", **({"seq_length": 512, "short_seq_probability": 0.0} | changes))
    return BERTDataset(corpus, "train", corpus.parts["train"][0], config, seed)


@pytest.fixture(scope="module")
def dataset(corpus) -> BERTDataset:
    return make(corpus)


def sample(dataset: BERTDataset, epoch: int, index: int) -> dict[str, np.ndarray]:
    batch = dataset.batch(np.array([epoch]), np.array([index]))
    return {key: values[0] for key, values in batch.items()}


@pytest.fixture(scope="module")
def samples(dataset) -> list[dict[str, np.ndarray]]:
    batch = dataset.batch(np.zeros(NUM_SAMPLES, dtype=np.int64), np.arange(NUM_SAMPLES))
    return [{key: values[i] for key, values in batch.items()} for i in range(NUM_SAMPLES)]


def within_three_standard_errors(successes: int, trials: int, expected: float) -> bool:
    return abs(successes / trials - expected) < 3 * np.sqrt(expected * (1 - expected) / trials)


def test_exactly_76_of_512_positions_are_predicted(samples) -> None:
    assert {int((s["labels"] != -100).sum()) for s in samples} == {76}
    assert {int(s["attention_mask"].sum()) for s in samples} == {512}


def test_masked_tokens_are_replaced_80_10_10(dataset, samples) -> None:
    mask_id, trials = dataset.special["[MASK]"], NUM_SAMPLES * 76
    masked = kept = 0
    for s in samples:
        scored = s["labels"] != -100
        masked += int((s["tokens"][scored] == mask_id).sum())
        kept += int((s["tokens"][scored] == s["labels"][scored]).sum())
    # A random replacement hits [MASK] or the original once in 5,000: far below a standard error.
    assert within_three_standard_errors(masked, trials, 0.8)
    assert within_three_standard_errors(kept, trials, 0.1)


def test_lengths_of_masked_spans_equal_the_reference(dataset, samples) -> None:
    """51.6 / 27.0 / 17.5 / 3.8 % of runs are 1 / 2 / 3 / more words long (a statistic of Megatron-LM's procedure)."""
    counts = np.zeros(4)
    per_sample = []
    for s in samples:
        original = np.where(s["labels"] != -100, s["labels"], s["tokens"])
        ordinary = original >= 5
        scored = (s["labels"] != -100)[ordinary]
        starts = ~dataset.is_continuation[original[ordinary]]
        starts[0] = True
        words = scored[starts].astype(int)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], words, [0]])))
        lengths = edges[1::2] - edges[::2]
        found = np.array([(lengths == 1).sum(), (lengths == 2).sum(), (lengths == 3).sum(), (lengths > 3).sum()])
        counts += found
        per_sample.append(found / found.sum())
    shares = counts / counts.sum()
    # The published shares are rounded to 0.1 %, which is larger than our standard error.
    errors = 3 * np.std(per_sample, axis=0) / np.sqrt(NUM_SAMPLES) + 0.0005
    assert np.all(np.abs(shares - [0.516, 0.270, 0.175, 0.038]) < errors), shares


def test_sentences_are_swapped_half_the_time(samples) -> None:
    assert within_three_standard_errors(sum(int(s["sop_labels"]) for s in samples), NUM_SAMPLES, 0.5)


def test_a_sample_is_a_pure_function_of_seed_epoch_and_index(corpus, dataset) -> None:
    again = make(corpus)
    np.random.seed(0)
    together = dataset.batch(np.full(4, 2), np.array([2999, 3, 5, 17]))
    for place, index in ((3, 17), (1, 3), (0, 2999)):  # in another order, with numpy's global state moved
        for key, value in sample(again, 2, index).items():
            assert np.array_equal(value, together[key][place]), key
    second = BERTDataset(corpus, "train", corpus.parts["train"][0], dataset.config, 1234, number=1)  # of a blend
    for other in (sample(dataset, 3, 17), sample(make(corpus, seed=1235), 2, 17), sample(second, 2, 17)):
        assert not np.array_equal(other["labels"], sample(dataset, 2, 17)["labels"])


def test_the_layout_is_cls_a_sep_b_sep_and_padding(tmp_path) -> None:
    texts = [f"One two three {i}. Four five six. Seven eight nine ten. Eleven." for i in range(40)]
    prepared = prepare_texts(tmp_path, texts, "bert")
    dataset = make(prepared, 1, seq_length=37, short_seq_probability=0.1)
    ids = prepared.special_ids
    for index in range(len(dataset)):
        s = sample(dataset, 0, index)
        original = np.where(s["labels"] != -100, s["labels"], s["tokens"])
        length = int(s["attention_mask"].sum())
        assert s["attention_mask"][:length].all()
        assert original[0] == ids["[CLS]"] and original[length - 1] == ids["[SEP]"]
        separators = np.flatnonzero(original[:length] == ids["[SEP]"])
        assert len(separators) == 2
        assert np.array_equal(s["token_types"][:length], (np.arange(length) > separators[0]).astype(int))
        assert (s["tokens"][length:] == ids["[PAD]"]).all() and (s["token_types"][length:] == 0).all()
        assert s["labels"][separators].tolist() == [-100, -100] and s["labels"][0] == -100
        assert (s["labels"] != -100).any()


def test_a_swapped_pair_has_the_later_sentence_first(tmp_path) -> None:
    dataset = make(SyntheticBERTCorpus(tmp_path, 50, 4, 5), 1, seq_length=40)
    seen = set()
    for index in range(len(dataset)):
        s = sample(dataset, 0, index)
        original = np.where(s["labels"] != -100, s["labels"], s["tokens"])
        first, end, _ = dataset.pairs.rows[index]
        text = dataset.dataset.tokens[5 * first : 5 * end]
        body = original[original >= 5]
        swapped = int(s["sop_labels"])
        assert np.array_equal(body, text) == (not swapped)
        assert sorted(body.tolist()) == sorted(text.tolist())
        seen.add(swapped)
    assert seen == {0, 1}


def test_no_sentence_is_in_two_samples_and_documents_do_not_mix(dataset) -> None:
    pairs, documents = dataset.pairs.rows.astype(np.int64), dataset.dataset.document_indices
    assert (pairs[1:, 0] >= pairs[:-1, 1]).all()
    assert (pairs[:, 1] - pairs[:, 0] >= 2).all()
    assert (
        np.searchsorted(documents, pairs[:, 0], "right") == np.searchsorted(documents, pairs[:, 1] - 1, "right")
    ).all()


@pytest.mark.parametrize(("a", "b", "target"), [(10, 4, 9), (4, 10, 9), (7, 7, 5), (3, 2, 9), (20, 1, 2), (5, 5, 9)])
def test_truncation_takes_from_the_longer_side_and_meets_the_target(a, b, target) -> None:
    generator = np.random.default_rng(0)
    expected_a, expected_b = a, b
    while expected_a + expected_b > target:
        if expected_a > expected_b:
            expected_a -= 1
        else:
            expected_b -= 1
    for _ in range(20):
        left, right = truncate_pair(np.arange(a), np.arange(100, 100 + b), target, generator)
        assert (len(left), len(right)) == (expected_a, expected_b)
        assert np.array_equal(left, np.arange(left[0], left[0] + len(left)))


def test_spans_never_overlap_and_never_cut_a_word() -> None:
    generator = np.random.default_rng(1)
    borders = np.array([0, 1, 4, 5, 9, 10, 11, 13, 20])
    for _ in range(200):
        covered = choose_spans(borders, 7.5, 3, generator)
        assert covered.sum() <= 7
        for start, end in zip(borders[:-1], borders[1:], strict=True):
            assert covered[start:end].all() or not covered[start:end].any()


def test_a_piece_whose_word_was_truncated_is_masked_like_a_word(dataset) -> None:
    labels = dataset._mask(np.array([2, 4500, 3, 3]), 1, 509, np.random.default_rng(0))
    assert labels.tolist() == [-100, 4500, -100, -100]


def test_parts_that_differ_in_one_end_share_no_index(corpus, dataset) -> None:
    (whole,) = corpus.parts["train"]
    for bounds in ({"last": 2000}, {"first": 2000}):
        part = BERTDataset(corpus, "train", dataclasses.replace(whole, **bounds), dataset.config, 1234)
        assert 0 < len(part) < len(dataset)


def test_a_dataset_is_pickled_as_paths(dataset) -> None:
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 100_000 < dataset.pairs.rows.nbytes + dataset.dataset.tokens.nbytes
    again = pickle.loads(pickled)
    for key, value in sample(dataset, 1, 7).items():
        assert np.array_equal(value, sample(again, 1, 7)[key])


def test_a_corpus_without_pairs_and_a_too_short_sequence_raise(tmp_path) -> None:
    prepared = prepare_texts(tmp_path, [f"Only one sentence {i}" for i in range(9)], "bert")
    with pytest.raises(ValueError, match="at least 2 sentences"):
        make(prepared, seq_length=16)
    with pytest.raises(ValueError, match="`data.seq_length` must be at least 5"):
        make(prepared, seq_length=4)
