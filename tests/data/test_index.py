"""Indices of GPT's windows and BERT's sentence pairs: equal to plain constructions, built once for all processes."""

import errno
import fcntl
import io
import os
import signal
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from corpora import write_dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmscale.data import bert_index
from lmscale.data.bert_index import TargetLengths, usable_documents, write_pairs
from lmscale.data.gpt_index import GPTOrder, write_windows
from lmscale.data.index_cache import cached_index
from lmscale.data.indexed_dataset import IndexedDataset
from lmscale.data.indexed_writer import IndexedWriter
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


VALUES = np.arange(12).reshape(6, 2)


def _build(file) -> None:
    np.save(file, VALUES)


def _ask(folder: Path, results) -> None:
    def build(file) -> None:
        (folder / f"built_{os.getpid()}").touch()
        time.sleep(0.5)  # long enough for the others to request it
        _build(file)

    results.put(cached_index(folder / "indices", "gpt", ("fact",), build).rows.tolist())


def _hang(folder: Path) -> None:
    def build(file) -> None:
        file.write(b"half of it")
        file.flush()
        (folder / "started").touch()
        time.sleep(600)

    cached_index(folder / "indices", "gpt", ("fact",), build)


def test_four_processes_build_an_index_once(tmp_path) -> None:
    context = get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_ask, args=(tmp_path, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert found == [VALUES.tolist()] * 4
    assert len(list(tmp_path.glob("built_*"))) == 1
    assert [path.suffix for path in (tmp_path / "indices").glob("gpt_*")] == [".npy"]


def test_a_killed_builder_neither_blocks_nor_leaves_files(tmp_path) -> None:
    process = get_context("fork").Process(target=_hang, args=(tmp_path,))
    process.start()
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    assert len(list((tmp_path / "indices").glob(".*unfinished*"))) == 1
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert np.array_equal(cached_index(tmp_path / "indices", "gpt", ("fact",), _build).rows, VALUES)
    assert not list((tmp_path / "indices").glob(".*unfinished*"))


def test_the_unfinished_file_of_another_users_process_stays(tmp_path, monkeypatch) -> None:
    path = cached_index(tmp_path, "gpt", ("fact",), _build).path
    path.unlink()
    unfinished = tmp_path / f".{path.name}.unfinished_{os.uname().nodename}@1"
    unfinished.touch()

    def refuse(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refuse)
    cached_index(tmp_path, "gpt", ("fact",), _build)
    assert unfinished.exists()


def test_an_index_is_cached_by_its_facts(tmp_path) -> None:
    first = cached_index(tmp_path, "gpt", ("a", 1), _build).rows
    assert isinstance(first, np.memmap) and not first.flags.writeable

    def refuse(file) -> None:
        raise AssertionError("built again")

    assert np.array_equal(cached_index(tmp_path, "gpt", ("a", 1), refuse).rows, VALUES)
    for kind, facts in (("gpt", ("a", 2)), ("bert", ("a", 1))):
        with pytest.raises(AssertionError, match="built again"):
            cached_index(tmp_path, kind, facts, refuse)
    assert len(list(tmp_path.glob("*.npy"))) == 1


def test_a_full_disk_and_an_unwritable_folder_raise_one_line(tmp_path) -> None:
    def fail(file) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match="`data.cache_dir` must be a writable folder .*: No space left") as caught:
        cached_index(tmp_path / "a", "gpt", (), fail)
    assert "\n" not in str(caught.value)
    assert [path.suffix for path in (tmp_path / "a").iterdir()] == [".lock"]
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written or read"):
        cached_index(tmp_path / "file", "gpt", (), _build)


@pytest.mark.parametrize("size", [0, 90, 200])
def test_a_truncated_index_is_named(tmp_path, size: int) -> None:
    def build(file) -> None:
        np.save(file, np.arange(64))

    path = cached_index(tmp_path, "gpt", ("fact",), build).path
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=f"{path.name} is damaged; remove it"):
        cached_index(tmp_path, "gpt", ("fact",), build)


@pytest.mark.parametrize("is_removed", [False, True])
def test_builders_without_a_common_lock_do_not_disturb_each_other(tmp_path, monkeypatch, is_removed) -> None:
    def refuse(file, kind) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    path = cached_index(tmp_path, "gpt", (), _build).path
    path.unlink()
    elsewhere = path.with_name(f".{path.name}.unfinished_{os.uname().nodename}_b@1")  # of another host
    elsewhere.touch()

    def build(file) -> None:
        _build(file)
        if is_removed:
            Path(file.name).unlink()
        other = get_context("fork").Process(target=cached_index, args=(tmp_path, "gpt", (), _build))
        other.start()
        other.join()
        assert other.exitcode == 0

    assert np.array_equal(cached_index(tmp_path, "gpt", (), build).rows, VALUES)
    assert list(tmp_path.glob(".*unfinished*")) == [elsewhere]
