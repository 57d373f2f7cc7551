"""Tokenizers: deterministic training, and published files."""

import hashlib
import json

import numpy as np
import pytest
import tokenizers
from corpora import local_config

from lmscale.config.data import TokenizerConfig
from lmscale.config.family import family_of
from lmscale.data.embedded import embedded_documents
from lmscale.data.prepare import prepare_corpus
from lmscale.data.tokenizer import (
    BERT_SPECIALS,
    Tokenizer,
    load_published_tokenizer,
    load_tokenizer,
    read_tokenizer,
)
from lmscale.data.tokenizer.vocabulary import read_vocabulary, read_whole

TEXTS = embedded_documents()[0][:29]


def train(folder, architecture: str, vocab_size: int = 700, texts: list[str] = TEXTS):
    config = TokenizerConfig("trained", vocab_size=vocab_size)
    return load_tokenizer(config, family_of(architecture).corpus, None, lambda: texts, "corpus", folder)


@pytest.mark.parametrize("architecture", ["gpt", "bert"])
def test_training_twice_gives_the_same_tokenizer(tmp_path, architecture) -> None:
    # The library's hash maps are seeded anew for each map, so an order taken from one differs within a process too.
    fingerprints = {train(tmp_path / str(i), architecture).fingerprint for i in range(4)}
    assert len(fingerprints) == 1


def test_a_trained_wordpiece_is_an_uncased_bert_vocabulary(tmp_path) -> None:
    tokenizer = train(tmp_path, "bert")
    assert tokenizer.vocab_size == 700
    assert [tokenizer.id_of(token) for token in BERT_SPECIALS] == [0, 1, 2, 3, 4]
    text = "The Statement, in Python's grammar: it's an expression."
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.id_of("[UNK]") not in ids
    pieces = [tokenizer.inner.id_to_token(i) for i in ids]
    assert "the" in pieces and any(piece.startswith("##") for piece in pieces)
    assert "".join(piece.removeprefix("##") for piece in pieces) == text.lower().replace(" ", "")
    assert [bool(flag) for flag in tokenizer.is_continuation[ids]] == [piece.startswith("##") for piece in pieces]


def test_special_tokens_around_inputs_change_neither_ids_nor_fingerprint(tmp_path) -> None:
    """Runs and corpora of before, whose tokenizers had none, stay usable."""
    tokenizer = train(tmp_path, "bert")
    assert tokenizer.inner.encode("a", "b").tokens == ["[CLS]", "a", "[SEP]", "b", "[SEP]"]
    assert tokenizer.inner.encode("a", "b").type_ids == [0, 0, 0, 1, 1]
    older = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    older.post_processor = None
    assert tokenizer.encode_batch(TEXTS) == Tokenizer(older).encode_batch(TEXTS)
    assert tokenizer.fingerprint == Tokenizer(older).fingerprint == hashlib.sha256(older.to_str().encode()).hexdigest()
    assert tokenizer.file_hash != Tokenizer(older).file_hash
    (tmp_path / "vocab.txt").write_text("\n".join(sorted(vocab := older.get_vocab(), key=vocab.get)))
    from_text = load_published_tokenizer(TokenizerConfig("bert", path=str(tmp_path / "vocab.txt")))
    assert from_text.fingerprint == tokenizer.fingerprint and from_text.file_hash == tokenizer.file_hash


def test_frequent_words_become_one_piece(tmp_path) -> None:
    tokenizer = train(tmp_path, "bert", 60, ["abc abd abc xyz abc"] * 7)
    assert len(tokenizer.encode_batch(["abc"])[0]) == 1
    assert len(tokenizer.encode_batch(["zab"])[0]) == 1  # a letter never seen at a word's start: the word is unknown
    assert tokenizer.vocab_size < 60  # the corpus has no more pieces to give


def chinese_like(num_letters: int) -> list[str]:
    """Letters of which the k-th most frequent occurs 10,000 / k times, as in a text of Chinese."""
    return [chr(0x4E00 + k) * (10_000 // (k + 1) + 1) for k in range(num_letters)]


def test_letters_are_kept_up_to_what_the_vocabulary_holds(tmp_path) -> None:
    texts, letters = chinese_like(1500), {chr(0x4E00 + k) for k in range(1500)}
    whole = train(tmp_path / "whole", "bert", 4000, texts)
    assert letters | set(BERT_SPECIALS) == whole.inner.get_vocab().keys()  # the rarest of them, too
    part = train(tmp_path / "part", "bert", 700, texts)
    assert part.vocab_size == 700 and part.inner.get_vocab().keys() - set(BERT_SPECIALS) == {
        chr(0x4E00 + k) for k in range(695)
    }
    ids = np.concatenate(part.encode_batch(texts))
    expected = sum(map(len, texts[695:]))
    assert part.count_unknown(ids) == expected and train(tmp_path, "gpt").count_unknown(ids) == 0


def test_rare_letters_take_no_ids_from_the_merges_of_a_text(tmp_path) -> None:
    texts = [*TEXTS * 4, *(chr(0x4E00 + k) for k in range(300))]  # 300 of over 600,000 letters
    pieces = train(tmp_path, "bert", 700, texts).inner.get_vocab().keys() - set(BERT_SPECIALS)
    assert len(pieces) == 695 and len(set("".join(pieces))) == 200


def test_a_vocabulary_too_small_for_the_letters_raises(tmp_path) -> None:
    with pytest.raises(ValueError, match="`tokenizer.vocab_size` must be at least .*, but is 9"):
        train(tmp_path, "bert", 9)
    with pytest.raises(ValueError, match="`tokenizer.vocab_size` must be above 256 .*, but is 256"):
        train(tmp_path, "gpt", 256)


@pytest.mark.parametrize("architecture", ["gpt", "bert"])
def test_a_size_beyond_any_memory_gives_all_pieces_of_the_text(tmp_path, architecture) -> None:
    texts = ["the cat sat on the mat"]
    largest = train(tmp_path, architecture, 10**15, texts)
    assert largest.fingerprint == train(tmp_path, architecture, 1000, texts).fingerprint
    assert len(largest.encode_batch(texts)[0]) == 6


def test_nothing_unfinished_stays_in_the_cache(tmp_path) -> None:
    train(tmp_path, "gpt")
    assert [p.suffix for p in (tmp_path / "tokenizers").iterdir()] == [".json"]


def test_a_tokenizer_json_with_truncation_and_padding_encodes_whole_documents(tmp_path) -> None:
    inner = train(tmp_path, "gpt").inner
    inner.enable_truncation(5)
    inner.enable_padding(length=9)
    inner.save(str(tmp_path / "tokenizer.json"))
    text = "one two three four five six seven eight nine ten eleven"
    lengths = []
    for path in (tmp_path / "tokenizer.json", tmp_path):
        loaded = load_tokenizer(
            TokenizerConfig("gpt2", path=str(path)), family_of("gpt").corpus, None, list, "", tmp_path
        )
        ids, short = loaded.encode_batch([text, "one"])
        assert loaded.decode(ids) == text and loaded.decode(short) == "one"
        lengths.append(len(ids))
    assert lengths[0] == lengths[1] > 9


def test_ids_beyond_a_gap_in_the_vocabulary_count(tmp_path) -> None:
    vocab = {token: i for i, token in enumerate(BERT_SPECIALS)} | {"a": 40}
    tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    config = TokenizerConfig("bert", path=str(tmp_path))
    assert load_tokenizer(config, family_of("bert").corpus, None, list, "", tmp_path).vocab_size == 41
    (tmp_path / "a.txt").write_text("a\n\na")
    with pytest.raises(ValueError, match="at least the tokenizer's 41 ids, but is 40"):
        prepare_corpus(local_config(tmp_path / "a.txt", tmp_path), config, "bert", 40)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_path_without_tokenizer_files_raises_one_line(tmp_path, kind) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    for path, message in (
        (tmp_path, "`tokenizer.path` must be"),
        (tmp_path / "nowhere", "`tokenizer.path` must be"),
        (tmp_path / "broken", "broken/tokenizer.json must be a complete tokenizer.json, but: "),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            architecture = "gpt" if kind == "gpt2" else "bert"
            load_tokenizer(
                TokenizerConfig(kind, path=str(path)), family_of(architecture).corpus, None, list, "", tmp_path
            )
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name, read", [("tokenizer.json", read_whole), ("vocab.json", read_vocabulary)])
def test_an_id_far_beyond_the_number_of_tokens_is_refused(tmp_path, name, read) -> None:
    """The library would fill its memory with the ids between when it serializes the vocabulary."""
    whole = json.loads(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).to_str())

    def write(highest: int) -> None:
        vocab = {"a": 0, "b": highest}
        values = whole | {"model": whole["model"] | {"vocab": vocab}} if read is read_whole else vocab
        (tmp_path / name).write_text(json.dumps(values))

    write(65_537)
    read(tmp_path / name)
    write(65_538)
    with pytest.raises(ValueError, match=f"{name} must number its 2 tokens below 65,538, but has the id 65,538$"):
        read(tmp_path / name)


def test_a_damaged_tokenizer_of_a_dataset_raises_one_line(tmp_path) -> None:
    for content in ("{", "", '{"version": "1.0\\n"}'):  # the library quotes the line end
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match="tokenizer.json must be a complete tokenizer.json, but: ") as caught:
            read_tokenizer(tmp_path / "tokenizer.json")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "gpt2", "path": "x", "name": "y"}, "`name` must be left out beside `path`, but is 'y'"),
        ({"kind": "trained", "name": "y"}, "`name` must be null when `tokenizer` is trained, but is 'y'"),
        ({"kind": "trained", "path": "x"}, "`path` must be null when `tokenizer` is trained, but is 'x'"),
        ({"kind": "bert", "vocab_size": 9}, "`vocab_size` must be null unless `tokenizer` is trained, but is 9"),
    ],
)
def test_a_setting_that_would_not_be_used_is_refused(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        TokenizerConfig(**values)
    TokenizerConfig("gpt2", path="x", name="openai-community/gpt2")  # as `tokenizer=gpt2 tokenizer.path=x` says
