"""Preparing a corpus: counts, the cache, and all errors."""

import dataclasses
import errno
import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
from corpora import local_config, prepare_texts
from tokenizers import Tokenizer
from tokenizers.models import Unigram

from lmscale.config.data import DataConfig, TokenizerConfig
from lmscale.data.embedded import MODULES, embedded_documents
from lmscale.data.gpt_dataset import GPTDataset
from lmscale.data.indexed_dataset import IndexedDataset
from lmscale.data.prepare import (
    PreparedCorpus,
    corpus_unigram_cross_entropy,
    describe_repetition,
    prepare_corpus,
    unigram_cross_entropy,
)
from lmscale.data.sentences import split_sentences
from lmscale.data.tokenizer import END_OF_TEXT

TEXTS = [
    f"The {word} fox jumps over number {i}. It is quick." for i, word in enumerate("red old big sad wet".split() * 9)
]
TRAINED = TokenizerConfig("trained", vocab_size=300)


def first_dataset(prepared: PreparedCorpus) -> IndexedDataset:
    """The training split of a corpus prepared from text."""
    return IndexedDataset(prepared.parts["train"][0].prefix)


def test_gpt_tokens_are_documents_followed_by_end_of_text(tmp_path) -> None:
    prepared = prepare_texts(tmp_path, TEXTS, "gpt", validation_every=5)
    tokenizer, dataset = prepared.load_tokenizer(), first_dataset(prepared)
    kept = [text for i, text in enumerate(TEXTS) if i % 5 != 4]
    assert len(dataset) == dataset.num_documents == len(kept)
    bounds = dataset.document_starts(np.arange(len(kept) + 1)).tolist()
    for text, start, end in zip(kept, bounds[:-1], bounds[1:], strict=True):
        ids = dataset.tokens[start:end].tolist()
        assert ids[-1] == tokenizer.id_of(END_OF_TEXT)
        assert tokenizer.decode(ids[:-1]) == text
    assert prepared.manifest["train"]["documents"] == 36 and prepared.manifest["validation"]["documents"] == 9


def windows(prepared, split: str, seq_length: int) -> GPTDataset:
    return GPTDataset(prepared.parts[split][0], prepared.vocab_size, seq_length, split)


def test_windows_overlap_by_one_and_predict_every_token_once(tmp_path) -> None:
    prepared = prepare_texts(tmp_path, TEXTS, "gpt")
    num_tokens = prepared.manifest["train"]["tokens"]
    divisor = next(number for number in range(2, num_tokens) if num_tokens % number == 0)
    for seq_length in (17, divisor):
        dataset, tokens = windows(prepared, "train", seq_length), first_dataset(prepared).tokens[:num_tokens]
        batch = dataset.batch(np.zeros(len(dataset), dtype=np.int64), np.arange(len(dataset)))
        labels = batch["labels"].reshape(-1)
        assert np.array_equal(labels, tokens[1 : 1 + len(labels)])
        assert len(tokens) - 1 - len(labels) < seq_length
        assert np.array_equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])


def test_a_special_token_in_a_text_is_plain_text(tmp_path) -> None:
    prepared = prepare_texts(tmp_path, [*TEXTS, f"before {END_OF_TEXT} after", "last"], "gpt", validation_every=60)
    ids = first_dataset(prepared).tokens
    assert (ids == prepared.special_ids[END_OF_TEXT]).sum() == prepared.manifest["train"]["documents"]


def test_a_corpus_too_small_for_the_request_is_noted_with_both_numbers(tmp_path) -> None:
    config = local_config(tmp_path / "corpus.txt", tmp_path, validation_every=99)
    (tmp_path / "corpus.txt").write_text("\n\n".join(TEXTS))
    for _ in range(2):  # built, then cached
        prepared = prepare_corpus(config, TokenizerConfig("trained", vocab_size=1_000_000), "gpt", None)
        first, second = prepared.manifest["notes"]
        assert first.startswith("`tokenizer.vocab_size` is 1,000,000, but the corpus has only")
        assert f"{prepared.vocab_size:,} different pieces" in first
        assert "`data.validation_every` is 99, but the corpus has 45 documents" in second
    assert prepare_texts(tmp_path, TEXTS, "bert", validation_every=45).manifest["notes"][1:] == []


def test_the_share_of_unknown_tokens_is_noted(tmp_path) -> None:
    texts = [chr(0x4E00 + k) * (500 // (k + 1) + 1) for k in range(500)]
    prepared = prepare_texts(tmp_path, texts, "bert", validation_every=40)
    counts = {split: prepared.manifest[split] for split in ("train", "validation")}
    unknown, tokens = (sum(held[kind] for held in counts.values()) for kind in ("unknown_tokens", "tokens"))
    assert unknown > 100 and tokens == sum(map(len, texts))
    (note,) = prepared.manifest["notes"]
    assert note.startswith(f"{100 * unknown / tokens:.1f}% of the tokens are [UNK], from letters")


def test_what_a_given_tokenizer_cannot_spell_is_noted_whatever_it_calls_it(tmp_path) -> None:
    pieces = [("<unk>", 0.0), ("<|endoftext|>", 0.0), *((letter, -1.0) for letter in "abcdefgh")]
    Tokenizer(Unigram(pieces, unk_id=0)).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("abcz\n\nbcdz")
    given = TokenizerConfig("gpt2", path=str(tmp_path / "tokenizer.json"))
    notes = prepare_corpus(local_config(tmp_path / "a.txt", tmp_path), given, "gpt", None).manifest["notes"]
    assert notes[0].startswith("20.0% of the tokens are [UNK], ")  # of four letters and the end of the text
    assert notes[0].endswith("; tokenizer=trained fits one to this text")


@pytest.mark.parametrize("sixth, share", [("sold in Rome", "50%"), ("sold in Rome " * 99, None)])
def test_held_out_text_that_is_also_trained_on_is_noted(tmp_path, sixth: str, share: str | None) -> None:
    texts = [
        "made in Bonn",
        "bought by us",
        "made in Bonn",
        "worn",
        "lost",
        sixth,
    ]  # the third and the last are held out
    notes = prepare_texts(tmp_path, texts, "gpt", validation_every=3).manifest["notes"]
    found = [note for note in notes if "also in the training text" in note]
    assert len(found) == (share is not None) and all(note.startswith(f"{share} of the held-out text") for note in found)


@pytest.mark.parametrize("architecture", ["gpt", "bert"])
def test_a_run_that_reads_its_corpus_more_than_a_hundred_times_is_warned(tmp_path, architecture: str) -> None:
    prepared = prepare_texts(tmp_path, TEXTS, architecture, validation_every=5)
    there = len(first_dataset(prepared).tokens)
    assert describe_repetition(prepared, 100 * there) == ""
    line = describe_repetition(prepared, 250 * there)
    assert line.startswith(f"the run reads {250 * there:,} tokens, 250 times the {there:,} of its corpus;")


def test_a_cached_corpus_is_read_again_only_if_a_file_or_the_split_changes(tmp_path) -> None:
    first = prepare_texts(tmp_path, TEXTS, "bert")
    stamp = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*") if p.is_file()}
    second = prepare_texts(tmp_path, TEXTS, "bert")
    assert second == first
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*") if p.is_file()} == stamp
    assert prepare_texts(tmp_path, [*TEXTS, "One more. And more."], "bert").folder != first.folder
    assert prepare_texts(tmp_path, TEXTS, "bert", validation_every=7).folder != first.folder


def test_a_hugging_face_dataset_is_read(tmp_path) -> None:
    folder = tmp_path / "my_dataset"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    config = DataConfig("huggingface", 16, name=str(folder), cache_dir=str(tmp_path / "cache"))
    prepared = prepare_corpus(config, TRAINED, "gpt", None)
    assert prepared.manifest["train"]["documents"] + prepared.manifest["validation"]["documents"] == len(TEXTS)
    with pytest.raises(ValueError, match="`data.text_field` must be one of"):
        prepare_corpus(DataConfig("huggingface", 16, name=str(folder), text_field="body"), TRAINED, "gpt", None)
    with pytest.raises(ValueError, match="`data.name` must be a dataset that can be loaded"):
        prepare_corpus(DataConfig("huggingface", 16, name=str(tmp_path / "no_such")), TRAINED, "gpt", None)


BAD_FILES = {
    "empty.txt": (b"", "at least one document"),
    "blank.txt": (b"\n\n  \n\n", "at least one document"),
    "one.txt": (b"only one document", "at least 2 documents"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_raises_one_line(tmp_path, name) -> None:
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        prepare_corpus(local_config(tmp_path / name, tmp_path), TRAINED, "gpt", None)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").rglob("manifest.json"))


def test_undecodable_bytes_are_replaced_and_counted_on_request(tmp_path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes("\n\n".join(TEXTS).encode() + b"\n\n\xff")
    (tmp_path / "texts" / "b.txt").write_bytes(b"caf\xe9\xff here")
    config = local_config(tmp_path / "texts", tmp_path, undecodable="replace", validation_every=99)
    prepared = prepare_corpus(config, TRAINED, "gpt", None)
    assert prepared.manifest["sources"]["train"]["problems"] == {"undecodable": 2}
    assert "files of the train text: undecodable 2" in prepared.manifest["notes"]
    other = prepare_corpus(dataclasses.replace(config, undecodable="fall_back"), TRAINED, "gpt", None)
    held_out = IndexedDataset(other.parts["validation"][0].prefix).tokens.tolist()
    assert "café" in other.load_tokenizer().decode(held_out)  # not the replaced text from the cache


def test_ids_beyond_the_models_vocabulary_raise(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(TEXTS))
    with pytest.raises(ValueError, match="`model.vocab_size` must be at least the tokenizer's"):
        prepare_corpus(local_config(tmp_path / "a.txt", tmp_path), TokenizerConfig("trained", 290), "gpt", 280)


def test_a_small_model_vocabulary_sizes_the_trained_tokenizer(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(TEXTS))
    prepared = prepare_corpus(local_config(tmp_path / "a.txt", tmp_path), TokenizerConfig("trained"), "gpt", 270)
    assert prepared.vocab_size == 270


def test_a_split_shorter_than_a_window_raises(tmp_path) -> None:
    prepared = prepare_texts(tmp_path, TEXTS, "gpt")
    with pytest.raises(ValueError, match=r"at least `data.seq_length` \+ 1 \(5001\) tokens"):
        windows(prepared, "validation", 5000)


def test_the_published_tokenizers_give_the_published_ids(shared_data, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("Hello world\n\nHello world")
    config = local_config(tmp_path / "a.txt", tmp_path)
    gpt2 = prepare_corpus(config, TokenizerConfig("gpt2", path=str(shared_data / "gpt2-bpe")), "gpt", 50257)
    assert first_dataset(gpt2).tokens.tolist() == [15496, 995, 50256]
    bert = prepare_corpus(config, TokenizerConfig("bert", path=str(shared_data / "bert-uncased")), "bert", 30522)
    assert bert.load_tokenizer().decode(first_dataset(bert).tokens) == "hello world"
    assert [bert.special_ids[t] for t in ("[PAD]", "[CLS]", "[SEP]", "[MASK]")] == [0, 101, 102, 103]
    with pytest.raises(ValueError, match="`tokenizer` must suit the model"):
        prepare_corpus(config, TokenizerConfig("bert", path=str(shared_data / "bert-uncased")), "gpt", None)
    with pytest.raises(ValueError, match="`model.vocab_size` must be at least the tokenizer's 50257"):
        prepare_corpus(config, TokenizerConfig("gpt2", path=str(shared_data / "gpt2-bpe")), "gpt", 50000)


def test_unigram_cross_entropy_by_hand() -> None:
    train, validation = np.array([0, 0, 1]), np.array([0, 2])
    expected = -(np.log(3 / 6) + np.log(1 / 6)) / 2  # counts + 1: 3, 2, 1
    assert unigram_cross_entropy(train, validation, 3) == pytest.approx(expected)


def test_the_embedded_corpus_has_a_unigram_cross_entropy() -> None:
    documents, facts = embedded_documents()
    assert sum(map(len, documents)) > 1_500_000
    assert len(facts["missing_modules"]) < 0.1 * len(MODULES)
    assert all(text.strip() for text in documents)
    prepared = prepare_corpus(DataConfig("embedded", 128), TokenizerConfig("trained", vocab_size=600), "gpt", None)
    assert prepared.vocab_size == 600
    assert 4.5 < corpus_unigram_cross_entropy(prepared) < 6.0


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two.", ["One.", "Two."]),
        ("Dr. Smith met J. R. Jones. They spoke.", ["Dr. Smith met J. R. Jones.", "They spoke."]),
        ("It costs 3.50 dollars. Cheap!", ["It costs 3.50 dollars.", "Cheap!"]),
        ("The U.S. Army left. Why? Nobody knew.", ["The U.S. Army left.", "Why?", "Nobody knew."]),
        ('"Stop!" he said. "Now."', ['"Stop!" he said.', '"Now."']),
        ("See e.g. Figure 3. It shows, etc. more.", ["See e.g. Figure 3.", "It shows, etc. more."]),
        ("A title\n\nThe text\ngoes on. End", ["A title", "The text goes on.", "End"]),
        ("So am I. You too.", ["So am I.", "You too."]),
        ("Она ушла. Снег шёл! А. С. Пушкин спал.", ["Она ушла.", "Снег шёл!", "А. С. Пушкин спал."]),
        ("Il vint. Élise partit. À midi il plut.", ["Il vint.", "Élise partit.", "À midi il plut."]),
        ("Er kam. Über Nacht regnete es. Am 3. März", ["Er kam.", "Über Nacht regnete es.", "Am 3.", "März"]),
        ("Ήρθε. Έφυγε. ύστερα", ["Ήρθε.", "Έφυγε. ύστερα"]),
        ("„Ja.“ Öl floss. »Wo?« Da.", ["„Ja.“", "Öl floss.", "»Wo?«", "Da."]),
        ("« Oui. » Elle dit : « Non. » ¿Qué? ¡Ya!", ["« Oui. »", "Elle dit : « Non. »", "¿Qué?", "¡Ya!"]),
        ("Le café. Un thé. le bœuf, été. oui", ["Le café.", "Un thé. le bœuf, été. oui"]),
        ("他走了。「好！」她说。3.5米？是", ["他走了。", "「好！」", "她说。", "3.5米？", "是"]),
        ("彼は来た。 雨が降った！？はい", ["彼は来た。", "雨が降った！？", "はい"]),
        ("비가 왔다. 그는 갔다.", ["비가 왔다.", "그는 갔다."]),
        ("वह गया। वह आया।", ["वह गया।", "वह आया।"]),
        ("ذهب. عاد؟ نعم.", ["ذهب.", "عاد؟", "نعم."]),
        ("A naïst. It was. L’été Mr. Élan. B", ["A naïst.", "It was.", "L’été Mr. Élan.", "B"]),
        ("", []),
        ("  \n\n ", []),
    ],
)
def test_sentences(text, sentences) -> None:
    assert split_sentences(text) == sentences


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", [".", "a", "ab1", "a.", "'", '."', ". [", "\n ", "。", "é.", ". é", " »", ". « "])
def test_unusual_lines_of_a_megabyte_take_linear_time(piece) -> None:
    split_sentences(piece * (10**6 // len(piece)) + "é. B")  # a match attempt at each position would take hours


def test_sentences_of_real_text_keep_every_word(shared_data) -> None:
    with gzip.open(shared_data / "running-text" / "docs.shared.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    inaugural = next(row["text"] for row in rows if row["source"].endswith("inaugural"))
    sentences = split_sentences(inaugural)
    assert " ".join(sentences).split() == inaugural.split()
    assert 10 < len(inaugural.split()) / len(sentences) < 70


def test_a_prepared_corpus_in_a_shared_cache_is_readable_by_others(tmp_path) -> None:
    before = os.umask(0o022)
    try:
        prepare_texts(tmp_path, TEXTS, "gpt")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert "manifest.json" in modes and set(modes.values()) == {0o755, 0o644}, modes


@pytest.mark.parametrize("name", ["tokenizers", "corpora"])
def test_a_cache_that_cannot_be_written_is_named(tmp_path, name) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / name).write_text("in the way")
    with pytest.raises(ValueError, match=r"^`data.cache_dir` must be a folder .*, but .*cache/\w+: File exists$"):
        prepare_texts(tmp_path, TEXTS, "gpt")


@pytest.mark.parametrize("name", ["tokenizers", "corpora"])
def test_a_cache_on_a_full_disk_is_named_and_left_clean(tmp_path, monkeypatch, name) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(TEXTS))
    write = Path.write_text

    def write_some(path: Path, text: str, **kwargs) -> None:
        write(path, text[:20], **kwargs)
        if name in path.parts:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, text, **kwargs)

    monkeypatch.setattr(Path, "write_text", write_some)
    with pytest.raises(ValueError, match=r"^`data.cache_dir` must be a folder .*, but .*/cache: No space left"):
        prepare_corpus(local_config(tmp_path / "a.txt", tmp_path), TRAINED, "gpt", None)
    assert not list((tmp_path / "cache" / name).iterdir())


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"{}", None], ids=["empty", "of other content", "missing"])
def test_a_damaged_corpus_in_the_cache_is_named(tmp_path, name, content) -> None:
    path = Path(prepare_texts(tmp_path, TEXTS, "gpt").folder) / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{path.parent} is damaged; remove it to have it built again$"):
        prepare_texts(tmp_path, TEXTS, "gpt")
