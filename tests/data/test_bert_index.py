"""Index of sentence pairs: equal to a plain loop over sentences; skipped documents."""

import io
from pathlib import Path

import numpy as np
from corpora import write_dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmscale.data import bert_index
from lmscale.data.bert_index import TargetLengths, usable_documents, write_pairs
from lmscale.data.indexed_dataset import IndexedDataset
from lmscale.data.indexed_writer import IndexedWriter

LENGTHS = TargetLengths(key=99, longest=29, short_probability=0.3)


def rows_of(dataset: IndexedDataset, first: int, last: int, lengths: TargetLengths = LENGTHS) -> np.ndarray:
    file = io.BytesIO()
    write_pairs(file, dataset, first, last, lengths)
    file.seek(0)
    return np.load(file)


def plain_rows(dataset: IndexedDataset, first: int, last: int, lengths: TargetLengths = LENGTHS) -> list[tuple]:
    """One sentence at a time, as in Megatron-LM's build_mapping."""
    rows, sizes, borders = [], dataset.sizes.tolist(), dataset.document_indices.tolist()
    for begin, end in zip(borders[first:last], borders[first + 1 : last + 1], strict=True):
        if end - begin < 2 or max(sizes[begin:end]) > 512:
            continue
        start, held, target = begin, 0, int(lengths.of(np.array([begin]))[0])
        for sentence in range(begin, end):
            held += sizes[sentence]
            remaining = end - sentence - 1
            if (held >= target and remaining > 1 and sentence > start) or remaining == 0:
                rows.append((start, sentence + 1, target))
                start, held = sentence + 1, 0
                target = int(lengths.of(np.array([start]))[0])
    return rows


def dataset_of(folder: Path, sizes: list[list[int]]) -> IndexedDataset:
    return IndexedDataset(write_dataset(folder / "a", [[[1] * size for size in document] for document in sizes]))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.lists(st.integers(0, 40), max_size=30), min_size=1, max_size=12), cut=st.integers(0, 11))
def test_rows_equal_those_of_a_loop_over_sentences(tmp_path, sizes, cut) -> None:
    dataset = dataset_of(tmp_path, sizes)
    first = min(cut, len(sizes))
    found = rows_of(dataset, first, len(sizes))
    assert found.dtype == np.uint32 and found.shape[1] == 3
    assert found.tolist() == [list(row) for row in plain_rows(dataset, first, len(sizes))]


def test_documents_of_all_chunks_are_included(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(bert_index, "_CHUNK", 7)
    generator = np.random.default_rng(3)
    counts = generator.integers(0, 60, 300)
    sizes = generator.integers(0, 45, counts.sum())
    sizes[generator.random(len(sizes)) < 0.002] = 513
    writer = IndexedWriter(tmp_path / "a", "uint16")
    writer.add_documents(np.ones(sizes.sum(), dtype=np.int64), sizes, counts)
    writer.finish()
    dataset = IndexedDataset(tmp_path / "a")
    assert (sizes == 513).any()
    assert rows_of(dataset, 0, 300).tolist() == [list(row) for row in plain_rows(dataset, 0, 300)]


def test_documents_with_one_sentence_or_one_of_more_than_512_tokens_are_skipped(tmp_path) -> None:
    dataset = dataset_of(tmp_path, [[3, 512], [3, 513, 4], [5], [], [6, 7]])
    assert {tuple(row[:2]) for row in rows_of(dataset, 0, 5).tolist()} == {(0, 2), (6, 8)}
    assert [(starts.tolist(), ends.tolist()) for starts, ends in usable_documents(dataset, 0, 5)] == [([0, 6], [2, 8])]
    assert rows_of(dataset, 1, 4).shape == (0, 3)


def test_short_target_lengths_are_uniform_and_have_the_given_probability() -> None:
    drawn = TargetLengths(5, 509, 0.1).of(np.arange(400_000))
    short = drawn[drawn < 509]
    assert abs(len(short) - 0.1 * 400_000 * 507 / 508) < 5 * np.sqrt(0.09 * 400_000)
    assert short.min() == 2 and drawn.max() == 509
    assert abs(short.mean() - 255) < 5 * 147 / np.sqrt(len(short))
    assert set(TargetLengths(5, 40, 0.0).of(np.arange(1000))) == {40}
    assert not np.array_equal(drawn, TargetLengths(6, 509, 0.1).of(np.arange(400_000)))
