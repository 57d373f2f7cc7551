"""Documents of each source, fingerprints of corpora, and errors."""

import gzip
import time
from functools import partial

import pytest
from corpora import local_config

from lmscale.config.data import DataConfig, TokenizerConfig
from lmscale.config.finetune import TaskConfig
from lmscale.data.prepare import prepare_corpus
from lmscale.data.sources import open_corpus
from lmscale.finetune.sources import load_hub

TRAINED = TokenizerConfig("trained", vocab_size=300)


def test_the_fingerprint_depends_on_the_suffix(tmp_path) -> None:
    body = b'{"text": "one two"}\n\n{"text": "three four"}\n'
    corpora = {}
    for name in ("a.txt", "a.jsonl", "a.txt.gz", "a.jsonl.gz", "a.jsonl.zst"):
        (tmp_path / name).write_bytes(body)
        corpora[name] = open_corpus(local_config(tmp_path / name, tmp_path))
    assert len({corpus.fingerprint for corpus in corpora.values()}) == len(corpora)
    assert corpora["a.jsonl"].read()[0] == ["one two", "three four"]


def test_a_folder_is_read_in_order_with_the_hash_of_each_file(tmp_path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "same.txt").write_text("second")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "third"}'))
    (tmp_path / "c.rst").write_text("not read")
    texts, notes = open_corpus(local_config(tmp_path, tmp_path)).read()
    assert texts == ["second", "third"]  # not the files of a folder before those of folders in it
    assert list(notes["files"]) == ["b/same.txt", "c.jsonl.gz"]
    assert notes["files"]["b/same.txt"].startswith("16367aacb67a4a01")  # sha256 of "second"


def test_a_column_of_numbers_raises(tmp_path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    parquet.write_table(pa.table({"text": [6, 7]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="column text must hold text, but holds int64"):
        prepare_corpus(local_config(tmp_path / "a.parquet", tmp_path), TRAINED, "gpt", None)
    config = DataConfig("huggingface", 16, name=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="row 1: must have a string `text` .text_field., but is {.text.: 6}"):
        prepare_corpus(config, TRAINED, "gpt", None)


def test_errors_name_the_wrong_key(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    config = local_config(tmp_path / "a.txt", tmp_path, validation_path=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="`data.validation_path` must be a file or a folder that can be read, but"):
        prepare_corpus(config, TRAINED, "gpt", None)
    with pytest.raises(ValueError, match="`validation_path` must be left out unless `data` is local"):
        DataConfig("embedded", 16, validation_path=str(tmp_path / "a.txt"))
    with pytest.raises(ValueError, match="`path` must be left out unless `data` is local or indexed"):
        DataConfig("embedded", 16, str(tmp_path / "a.txt"))
    for name in ("name", "subset", "split"):  # of a dataset on the hub
        with pytest.raises(ValueError, match=f"^`{name}` must be left out unless `data` is huggingface"):
            DataConfig("local", 16, "a.txt", **{name: "x"})
    for name, value in {"text_field": "x", "undecodable": "replace"}.items():
        with pytest.raises(ValueError, match=f"^`{name}` must be left out unless `data` is local or huggingface"):
            DataConfig("embedded", 16, **{name: value})
    config = DataConfig("embedded", 16, cache_dir=str(tmp_path / "a.txt"))
    with pytest.raises(ValueError, match="`data.cache_dir` must be a folder"):
        prepare_corpus(config, TRAINED, "gpt", None)


def test_a_validation_file_is_held_out_whole(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("only one document to train on")
    (tmp_path / "b.txt").write_text("held\n\nout")
    config = local_config(tmp_path / "a.txt", tmp_path, validation_path=str(tmp_path / "b.txt"))
    manifest = prepare_corpus(config, TRAINED, "gpt", None).manifest
    assert (manifest["train"]["documents"], manifest["validation"]["documents"]) == (1, 2)


ON_HUB = TaskConfig("race", "hub:train", {}, hub_name="no/such", max_qa_length=64)
LOADS = [partial(open_corpus, DataConfig("huggingface", 16, name="no/such")), partial(load_hub, ON_HUB, ON_HUB.train)]


@pytest.mark.parametrize("load", LOADS, ids=["data", "task"])
def test_an_unreachable_hub_is_contacted_once(load, monkeypatch) -> None:
    import datasets
    import huggingface_hub

    for module in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)  # restored afterwards
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(ValueError, match="name` must be .* no/such/train: .*127.0.0.1:9 could not be reached"):
        load()
    assert time.monotonic() - start < 10


def test_a_dataset_that_cannot_be_read_is_refused_with_the_cause(tmp_path, monkeypatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    for name, row in (("a", '{"text": "one"}'), ("b", '{"other": "two"}')):
        (tmp_path / "rows" / f"{name}.jsonl").write_text(row + "\n")
    with pytest.raises(ValueError, match="error occurred while generating the dataset: .*column names don't match"):
        open_corpus(DataConfig("huggingface", 16, name=str(tmp_path / "rows")))


def test_cut_sentences_and_documents_without_a_pair_are_counted(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("Only one sentence\n\nA pair. It is one.\n\n" + "word " * 300 + "\n\nHeld. Out.")
    prepared = prepare_corpus(local_config(tmp_path / "a.txt", tmp_path), TokenizerConfig("trained", 60), "bert", None)
    train = prepared.manifest["train"]
    assert (train["documents"], train["documents_without_pair"], train["sentences_cut"]) == (3, 1, 1)
