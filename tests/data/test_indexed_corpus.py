"""Indexed datasets as a run's corpus: windows, blends, splits, and all errors."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from corpora import local_config, prepare_texts, whole, write_dataset

from lmscale.config import TransformerConfig
from lmscale.config.data import DataConfig, TokenizerConfig
from lmscale.data.datamodule import TextDataModule
from lmscale.data.gpt_dataset import ShuffledGPTDataset
from lmscale.data.indexed_corpus import split_documents
from lmscale.data.loading import References
from lmscale.data.prepare import check_corpus, corpus_unigram_cross_entropy, prepare_corpus
from lmscale.data.sampler import DATASET_SHIFT, RunSamples
from lmscale.parallel import ParallelContext

VOCAB = 290
TEXTS = [f"Number {i} is here. It has {i * 7} words or so. The end of {i}." for i in range(60)]
OWN = TokenizerConfig("trained")


def random_documents(count: int, seed: int, sequences: int = 1) -> list[list[list[int]]]:
    generator = np.random.default_rng(seed)
    sizes = generator.integers(0, 40, (count, sequences))
    return [[generator.integers(0, VOCAB, size).tolist() for size in row] for row in sizes]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Path]:
    """A folder with a tokenizer of up to 290 ids for each architecture."""
    found = {}
    for name in ("gpt", "bert"):
        folder = tmp_path_factory.mktemp(name)
        (folder / "a.txt").write_text("\n\n".join(TEXTS))
        tokenizer = TokenizerConfig("trained", vocab_size=VOCAB)
        found[name] = Path(prepare_corpus(local_config(folder / "a.txt", folder), tokenizer, name, None).folder)
    return found


@pytest.fixture
def folder(tmp_path, tokenizers) -> Path:
    """A folder with GPT's tokenizer and the datasets `a` (40 documents) and `b` (60)."""
    (tmp_path / "tokenizer.json").write_bytes((tokenizers["gpt"] / "tokenizer.json").read_bytes())
    write_dataset(tmp_path / "a_text_document", random_documents(40, 1))
    write_dataset(tmp_path / "b_text_document", random_documents(60, 2))
    return tmp_path


def opened(path, folder: Path, architecture: str = "gpt", tokenizer: TokenizerConfig = OWN, **changes):
    values = {"split": "8,2,0", "cache_dir": str(folder / "cache")} | changes
    config = DataConfig("indexed", 16, path if isinstance(path, dict) else str(path), **values)
    return prepare_corpus(config, tokenizer, architecture, None)


def samples_of(prepared, num_steps: int = 20, num_validation: int | None = None) -> RunSamples:
    return RunSamples(prepared, DataConfig("embedded", 16), 7, 6, num_steps, num_validation)


def test_parts_of_as_many_documents_and_tokens_have_their_own_windows(tmp_path) -> None:
    part = whole(write_dataset(tmp_path / "a", [[[1] * size] for size in (*range(9), *range(9)[::-1])]))
    halves = replace(part, last=9), replace(part, first=9)
    made = [ShuffledGPTDataset(half, VOCAB, 4, "train", 1, 12, tmp_path / "indices") for half in halves]
    assert made[0].num_tokens == made[1].num_tokens and made[0].windows.path != made[1].windows.path


def test_a_part_without_a_whole_window_is_refused(tmp_path) -> None:
    part = whole(write_dataset(tmp_path / "a", [[[1] * 5]]))
    assert len(ShuffledGPTDataset(part, VOCAB, 4, "train", 1, 1, tmp_path / "indices")) == 1
    with pytest.raises(ValueError, match=r"must have at least `data.seq_length` \+ 1 \(6\) tokens, but has 5"):
        ShuffledGPTDataset(part, VOCAB, 5, "train", 1, 1, tmp_path / "indices")


@pytest.mark.parametrize(("sequences", "num_samples", "first"), [(1, 30, 0), (1, 400, 7), (3, 400, 0), (3, 30, 11)])
def test_windows_cover_the_concatenated_shuffled_documents(tmp_path, sequences, num_samples, first) -> None:
    documents = [sum(sequences, []) for sequences in random_documents(50, 3, sequences)]
    part = replace(whole(write_dataset(tmp_path / "a", random_documents(50, 3, sequences))), first=first)
    dataset = ShuffledGPTDataset(part, VOCAB, 16, "train", 1, num_samples, tmp_path / "indices")
    order = dataset.shuffle.documents_at(np.arange((50 - first) * dataset.shuffle.num_epochs))
    stream = np.concatenate([np.array(documents[first + i], dtype=np.int64) for i in order])
    assert len(dataset) == (len(stream) - 1) // 16 >= num_samples
    indices = np.random.default_rng(0).permutation(len(dataset))
    batch = dataset.batch(np.zeros_like(indices), indices)
    starts = 16 * indices[:, None] + np.arange(16)
    assert np.array_equal(batch["tokens"], stream[starts]) and np.array_equal(batch["labels"], stream[starts + 1])


def test_runs_of_different_lengths_over_one_corpus_do_not_share_a_wrong_index(tmp_path) -> None:
    """Both need two epochs, but only the longer one shuffles them together."""
    part = whole(write_dataset(tmp_path / "a", random_documents(50, 3)))
    per_epoch = len(ShuffledGPTDataset(part, VOCAB, 16, "train", 1, 1, tmp_path / "indices"))
    for num_samples in (per_epoch + 2, 2 * per_epoch - 2):
        shared, own = (
            ShuffledGPTDataset(part, VOCAB, 16, "train", 1, num_samples, tmp_path / folder)
            for folder in ("indices", f"own_{num_samples}")
        )
        assert shared.shuffle.num_epochs == 2
        indices = np.arange(len(own))
        for key, values in own.batch(indices, indices).items():
            assert np.array_equal(shared.batch(indices, indices)[key], values)


def test_only_documents_of_the_training_part_are_trained_on(folder) -> None:
    prepared = opened(folder / "b_text_document", folder)
    assert [(part.first, part.last) for part in (*prepared.parts["train"], *prepared.parts["validation"])] == [
        (0, 48),
        (48, 60),
    ]
    dataset = samples_of(prepared).train[0]
    starts = dataset.dataset.document_starts(np.array([0, 48, 60]))
    assert dataset.num_tokens == starts[1] and prepared.manifest["train"]["tokens"] == starts[1]
    assert prepared.manifest["validation"]["tokens"] == starts[2] - starts[1]
    assert np.isfinite(corpus_unigram_cross_entropy(prepared))


def test_a_blend_takes_from_each_dataset_in_proportion_and_in_its_own_order(folder) -> None:
    paths = {str(folder / "a_text_document"): 1, str(folder / "b_text_document"): 3.0}
    run = samples_of(opened(paths, folder), num_steps=20)
    references = run.sampler().references(0, 120)
    which, indices = references[:, 2] >> DATASET_SHIFT, references[:, 2] & (2**DATASET_SHIFT - 1)
    assert np.bincount(which).tolist() == [30, 90]
    for number, samples in enumerate(run.train):
        assert np.array_equal(indices[which == number], samples.order(np.arange((which == number).sum()))[1])
    for step, batch in zip(run.sampler(), iter_steps(run), strict=True):
        for place, (_, epoch, index) in enumerate(step.tolist()):
            number, own = index >> DATASET_SHIFT, index & (2**DATASET_SHIFT - 1)
            single = run.train[number].batch(np.array([epoch]), np.array([own]))
            assert np.array_equal(batch["tokens"][place], single["tokens"][0])


def iter_steps(run: RunSamples):
    """The training steps, as arrays."""
    for step in run.sampler():
        yield References(run.train).__getitems__(step)


def test_validation_takes_all_of_every_dataset_or_the_first_of_each_by_weight(folder) -> None:
    paths = {str(folder / "a_text_document"): 1, str(folder / "b_text_document"): 1}
    prepared = opened(paths, folder)
    available = [len(samples) for samples in samples_of(prepared).validation]
    assert min(available) >= 3 and len(samples_of(prepared).scored) == sum(available)
    some = samples_of(prepared, num_validation=5)
    assert some.scored[:, 2].tolist() == [0, 2**DATASET_SHIFT, 1, 2**DATASET_SHIFT + 1, 2]
    with pytest.raises(ValueError, match=rf"at most the validation part's {available[0]} sequences of 16 .*, but is"):
        samples_of(prepared, num_validation=2 * min(available) + 9)


def test_a_blend_has_no_epochs_for_a_users_trainer(folder) -> None:
    paths = {str(folder / "a_text_document"): 1, str(folder / "b_text_document"): 1}
    config = DataConfig("indexed", 16, paths, split="8,2,0", cache_dir=str(folder / "cache"))
    data = TextDataModule("gpt", data=config, tokenizer=OWN)
    module = SimpleNamespace(config=TransformerConfig("gpt", 2, 32, 4, data.vocab_size, 16), micro_batch_size=2)
    strategy = SimpleNamespace(parallel=ParallelContext())
    data.trainer = SimpleNamespace(lightning_module=module, strategy=strategy, max_steps=-1, max_epochs=2)
    with pytest.raises(ValueError, match="^`max_steps` must be set for a blend of datasets, .* but is -1$"):
        data.setup("fit")
    data.trainer.max_steps = 4
    data.setup("fit")
    assert data.steps_per_epoch == data.samples.num_steps == 4


def test_the_corpus_hash_depends_on_datasets_weights_and_splits(folder) -> None:
    a, b = str(folder / "a_text_document"), str(folder / "b_text_document")
    variants = [(a, {}), (b, {}), ({a: 1, b: 1}, {}), ({a: 1, b: 2}, {}), (a, {"split": "7,3,0"})]
    hashes = {opened(path, folder, **changes).content_hash for path, changes in variants}
    assert len(hashes) == 5
    assert opened(a, folder).content_hash in hashes
    write_dataset(folder / "a_text_document", random_documents(40, 9))
    assert opened(a, folder).content_hash not in hashes


def prepared_folder(folder: Path, architecture: str = "gpt", **changes) -> Path:
    """A folder as written by prepare_data.py, of two sources; the second has no validation split."""
    from lmscale.data.tokenizer import read_tokenizer

    sources = {}
    for name, weight, splits in (("a", 3.0, ("train", "validation")), ("b", 1.0, ("train",))):
        sources[name] = {"weight": weight}
        for split in splits:
            prefix = f"{name}_{split}_text_document"
            write_dataset(folder / prefix, random_documents(30, len(prefix)))
            sources[name][split] = {"prefix": prefix, "documents": 30, "tokens": 1, "sha256": prefix}
    print_ = read_tokenizer(folder / "tokenizer.json").fingerprint
    manifest = {"format": 1, "architecture": architecture, "tokenizer": print_, "vocab_size": VOCAB, "sources": sources}
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))
    return folder


def test_a_folder_of_prepare_data_provides_parts_weights_and_tokenizer(folder) -> None:
    prepared = opened(prepared_folder(folder), folder)
    assert [(Path(p.prefix).name, p.weight) for p in prepared.parts["train"]] == [
        ("a_train_text_document", 3.0),
        ("b_train_text_document", 1.0),
    ]
    assert [Path(p.prefix).name for p in prepared.parts["validation"]] == ["a_validation_text_document"]
    assert prepared.folder == str(folder) and prepared.vocab_size <= VOCAB
    other = opened(folder, folder, validation_path=str(folder / "b_text_document"))
    assert [Path(p.prefix).name for p in other.parts["validation"]] == ["b_text_document"]
    held_out = opened(folder / "b_text_document", folder, validation_path=str(prepared_folder(folder)))
    names = ["a_validation_text_document", "b_train_text_document"]  # the whole of a source without a held-out part
    assert [Path(p.prefix).name for p in held_out.parts["validation"]] == names


def test_a_bad_folder_raises_one_line(folder, tokenizers) -> None:
    cases = [
        ({"architecture": "bert"}, "must be prepared for gpt .*, but .* is for bert"),
        ({"tokenizer": "0" * 64}, "`tokenizer` must be the one that `data.path` was prepared with"),
        ({"format": 2}, "`format` must be 1, but is 2"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            opened(prepared_folder(folder, **changes), folder)
        assert "\n" not in str(caught.value)
    prepared_folder(folder)
    write_dataset(folder / "a_train_text_document", random_documents(29, 1))
    with pytest.raises(ValueError, match="must have the 30 documents of manifest.json, but has 29"):
        opened(folder, folder)
    for text in ("{", "[" * 100_000):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match="manifest.json cannot be read"):
            opened(folder, folder)
    (folder / "manifest.json").write_text("[]")
    with pytest.raises(ValueError, match="`format` must be 1, but is "):
        opened(folder, folder)
    good = {"weight": 1.0, "train": {"prefix": "a_text_document", "documents": 40, "sha256": ""}}
    for wrong in (
        {"sources": None},
        {"sources": {"a": {}}},
        {"sources": {"a": good | {"weight": -1.0}}},
        {"sources": {"a": good | {"weight": float("nan")}}},
        {"sources": {"a": good | {"train": []}}},
        {"sources": {"a": good | {"train": good["train"] | {"prefix": "a\nb"}}}},
        {"sources": {"a": good | {"train": good["train"] | {"prefix": "\ud800"}}}},
        {"sources": {"a": good | {"train": good["train"] | {"documents": "40"}}}},
        {"architecture": 1},
        {"tokenizer": None},
    ):
        with pytest.raises(ValueError, match="must be a manifest of prepare_data.py, but fails with") as caught:
            opened(prepared_folder(folder, **wrong), folder)
        assert "\n" not in str(caught.value)
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match="is a folder without manifest.json"):
        opened(folder, folder)


def test_a_corpus_of_another_family_is_refused_in_one_line(folder) -> None:
    rule = r"`data.path` must be prepared for bert \(the model\), but "
    with pytest.raises(ValueError, match=rf"{rule}the tokenizer of .* has no \[PAD\]"):
        opened(folder / "a_text_document", folder, "bert")
    data = DataConfig("indexed", 16, str(prepared_folder(folder)), split="8,2,0")
    with pytest.raises(ValueError, match=rf"{rule}.* is for gpt; prepare the text again with architecture=bert"):
        check_corpus(data, "bert")  # before torch is imported
    check_corpus(data, "gpt")


def test_a_missing_or_different_tokenizer_raises(folder, tokenizers, shared_data) -> None:
    a = folder / "a_text_document"
    published = TokenizerConfig("gpt2", path=str(shared_data / "gpt2-bpe"))
    rule = "`tokenizer` must be the one of all datasets, but"
    with pytest.raises(
        ValueError, match=rf"{rule} {folder}/tokenizer.json and that of tokenizer=gpt2 differ; leave tokenizer= out$"
    ):
        opened(a, folder, tokenizer=published)
    (folder / "other").mkdir()
    write_dataset(folder / "other" / "b_text_document", random_documents(60, 2))
    other = shutil.copy(tokenizers["bert"] / "tokenizer.json", folder / "other")
    with pytest.raises(
        ValueError, match=rf"{rule} {folder}/tokenizer.json and {other} differ; prepare all texts with one"
    ):
        opened({str(a): 1, str(folder / "other" / "b_text_document"): 1}, folder)
    with pytest.raises(ValueError, match="`tokenizer.vocab_size` must be null when `data` is indexed"):
        opened(a, folder, tokenizer=TokenizerConfig("trained", vocab_size=300))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="`tokenizer` must be gpt2 or bert if there is no tokenizer.json beside"):
        opened(a, folder)
    prepared = opened(a, folder, tokenizer=published)
    assert prepared.vocab_size == 50_257 and prepared.load_tokenizer().id_of("<|endoftext|>") == 50_256


def test_two_nodes_with_the_same_process_id_store_the_published_tokenizer(folder, tokenizers, monkeypatch) -> None:
    (folder / "tokenizer.json").unlink()
    published = TokenizerConfig("gpt2", path=str(tokenizers["gpt"] / "tokenizer.json"))
    replace_file = os.replace

    def after_the_other_node(source, target) -> None:
        monkeypatch.setattr(os, "replace", replace_file)
        opened(folder / "a_text_document", folder, tokenizer=published)
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", after_the_other_node)
    prepared = opened(folder / "a_text_document", folder, tokenizer=published)
    assert [path.name for path in Path(prepared.folder).iterdir()] == ["tokenizer.json"]
    monkeypatch.delattr(os, "replace")  # it is not written again
    opened(folder / "a_text_document", folder, tokenizer=published)


def test_a_cache_that_cannot_hold_the_published_tokenizer_is_named(folder, tokenizers) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "cache").mkdir()
    (folder / "cache" / "tokenizers").write_text("in the way")
    published = TokenizerConfig("gpt2", path=str(tokenizers["gpt"] / "tokenizer.json"))
    with pytest.raises(ValueError, match="^`data.cache_dir` must be a folder .*cache/tokenizers"):
        opened(folder / "a_text_document", folder, tokenizer=published)


def test_a_full_disk_leaves_no_part_of_the_published_tokenizer(folder, tokenizers, monkeypatch) -> None:
    (folder / "tokenizer.json").unlink()

    def full(*args, **kwargs) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    published = TokenizerConfig("gpt2", path=str(tokenizers["gpt"] / "tokenizer.json"))
    with pytest.raises(ValueError, match="^`data.cache_dir` must be a folder .*No space left"):
        opened(folder / "a_text_document", folder, tokenizer=published)
    assert not [path for path in (folder / "cache" / "tokenizers").rglob("*") if path.is_file()]


def test_ids_outside_the_vocabulary_raise_before_the_run_or_in_their_batch(folder) -> None:
    part = whole(write_dataset(folder / "wrong", [[[1] * 50], [[2, 3, 299]], [[4] * 20]]))
    with pytest.raises(ValueError, match=r"wrong.bin: ids must be from 0 to \d+ \(the tokenizer's\), but there is 299"):
        opened(folder / "wrong", folder)
    dataset = ShuffledGPTDataset(part, VOCAB, 16, "train", 1, 12, folder / "indices")
    with pytest.raises(ValueError, match="but token 52 is 299"):
        dataset.batch(np.zeros(12, dtype=np.int64), np.arange(12))
    write_dataset(folder / "negative", [[[1] * 50], [[-2]], [[3]]], "int32")
    with pytest.raises(ValueError, match="but there is -2"):
        opened(folder / "negative", folder)
    write_dataset(folder / "floats", [[[1] * 50], [[2]], [[3]]], "float32")
    with pytest.raises(ValueError, match="tokens must be whole numbers, but are float32"):
        opened(folder / "floats", folder)


def test_a_path_without_dataset_and_a_split_without_documents_raise(folder) -> None:
    for path in (folder / "nowhere", folder / "a_text_document.bin", {str(folder / "no"): 1}):
        with pytest.raises(ValueError, match=r"but there is no .*\.idx"):
            opened(path, folder)
    with pytest.raises(ValueError, match="must have documents for validation, but .*a_text_document has none"):
        opened(folder / "a_text_document", folder, split="1,0,0")
    for split in ("train", "1,2", "0,1,1", "1,-1,1"):
        with pytest.raises(ValueError, match="`split` must be the shares"):
            DataConfig("indexed", 16, "x", split=split)
    for path in ({"x": 0}, {"x": -1.0}, {"x": "much"}, {"x": float("inf")}):
        with pytest.raises(ValueError, match="must give x a weight above 0"):
            DataConfig("indexed", 16, path, split="1,1,1")
    with pytest.raises(ValueError, match="`path` must be weights by path, such as ./2024, but is {2024: 1}"):
        DataConfig("indexed", 16, {2024: 1}, split="1,1,1")
    with pytest.raises(ValueError, match="`path` must be one path, .* unless `data` is indexed"):
        DataConfig("local", 16, {"x": 1})
    with pytest.raises(ValueError, match="`path` must be a file or folder when `data` is indexed"):
        DataConfig("indexed", 16, split="1,1,1")


def test_splits_are_contiguous_and_rounded_as_in_megatron() -> None:
    """Bounds by hand: running sums of rounded shares, with the excess subtracted from every bound."""
    assert split_documents(1000, (0.969, 0.03, 0.001)) == [(0, 969), (969, 999), (999, 1000)]
    assert split_documents(10, (0.55, 0.25, 0.2)) == [(0, 6), (6, 8), (8, 10)]
    assert split_documents(7, (0.5, 0.5, 0.0)) == [(0, 3), (3, 7), (7, 7)]
    assert split_documents(3, (1 / 3, 1 / 3, 1 / 3)) == [(0, 1), (1, 2), (2, 3)]


def test_bert_reads_sentences_and_reports_skipped_documents(tmp_path, tokenizers) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizers["bert"] / "tokenizer.json").read_bytes())
    documents = [[[7] * 9, [8] * 5, [9] * 11] for _ in range(20)] + [[[7] * 600, [8]], [[9]]]
    write_dataset(tmp_path / "a_text_sentence", documents[-2:] + documents[:-2])
    prepared = opened(tmp_path / "a_text_sentence", tmp_path, "bert")
    (note,) = prepared.manifest["notes"]
    assert note.startswith("a_text_sentence: 2 of 18 documents have fewer than two sentences or one of more than 512")
    run = samples_of(prepared)
    assert len(run.train[0]) == 16  # three sentences make one sample
    references = run.sampler().references(0, 40)
    assert [sorted(references[epoch * 16 : epoch * 16 + 16, 2].tolist()) for epoch in (0, 1)] == [list(range(16))] * 2
    assert references[:16, 2].tolist() != references[16:32, 2].tolist()
    assert references[:, 1].tolist() == [0] * 16 + [1] * 16 + [2] * 8
    batch = next(iter_steps(run))
    assert batch["tokens"].shape == (6, 16) and (batch["labels"] != -100).any(axis=1).all()


def test_a_corpus_prepared_from_text_can_be_opened_as_indexed_data(tmp_path) -> None:
    prepared = prepare_texts(tmp_path, TEXTS, "gpt", validation_every=6)
    named = opened(prepared.parts["train"][0].prefix, tmp_path)
    assert named.load_tokenizer().fingerprint == prepared.load_tokenizer().fingerprint
    assert (
        sum(named.manifest[split]["tokens"] for split in ("train", "validation"))
        == prepared.manifest["train"]["tokens"]
    )
