"""Long texts in pieces: cut only where tokens, words and sentences do not depend on the cut."""

import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from lmscale.config.data import TokenizerConfig
from lmscale.corpus import shingles
from lmscale.corpus.shingles import shingle_sets, word_ngrams
from lmscale.data import sentences
from lmscale.data.embedded import embedded_documents
from lmscale.data.sentences import SentenceEncoder, encode_arrays, grouped, split_sentences, text_pieces
from lmscale.data.tokenizer import Tokenizer, load_published_tokenizer, train_tokenizer

# Spaces of every kind, contractions, digits, marks, final sigma, combining marks, Chinese, and characters that BERT's
# normalizer removes.
PARTS = """a The word's it'll don't 1234 3.14 U.S. Mr. end. End! "Q?" ΑΣ ΣΑΣ é e\u0301 \u0301 字字 ß İ 😀 <|endoftext|>
 [MASK] \ufeff \x00 \x1c \u200b \u3000 \u00a0 \u2028 \x85 \ud800 _ ##x ... ' -""".split(" ")
SPACES = (" ", "  ", "\n", "\n\n", "\t", " \n ", "\r\n", "\u00a0", "", "\x1c", "\u3000 ")


def texts() -> list[str]:
    generator = random.Random(5)
    joined = [
        "".join(generator.choice(PARTS) + generator.choice(SPACES) for _ in range(length))
        for length in (0, 1, 2, 5, 30, 200, 1000)
        for _ in range(6)
    ]
    return [*joined, " " * 50, "\n" * 50, "x" * 300, "ab " * 100, " ab" * 100 + "  "]


@pytest.fixture
def short_pieces(monkeypatch) -> None:
    monkeypatch.setattr(sentences, "PIECE_CHARACTERS", 7)
    monkeypatch.setattr(sentences, "GROUP_CHARACTERS", 40)


def published(kind: str, shared_data: Path) -> Tokenizer:
    path = {"gpt2": "gpt2-bpe", "bert": "bert-uncased"}[kind]
    return load_published_tokenizer(TokenizerConfig(kind, path=str(shared_data / path)))


def test_pieces_are_the_text_and_begin_with_a_space_after_a_word(short_pieces) -> None:
    for text in texts():
        found = list(text_pieces(text))
        assert "".join(found) == text
        assert all(piece[0] in " \t\n" for piece in found[1:])
        assert not any(piece[-1].isspace() for piece in found[:-1])
    assert max(map(len, text_pieces("ab " * 100))) <= 7 + 3
    assert list(text_pieces("x" * 300)) == ["x" * 300]


def test_groups_have_all_pieces_in_order_and_a_bounded_size(short_pieces) -> None:
    some = ["ab " * 100, "", "c", "de " * 30]
    groups = list(grouped(some))
    assert max(sum(len(piece) for _, piece in group) for group in groups) < 40 + 10
    found = [piece for group in groups for piece in group]
    assert ["".join(piece for number, piece in found if number == n) for n in range(4)] == some


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_text_in_pieces_has_the_same_tokens(short_pieces, shared_data, kind: str) -> None:
    tokenizer, some = published(kind, shared_data), [text.replace("\ud800", "") for text in texts()]
    assert tokenizer.splits_at_spaces and max(len(list(text_pieces(text))) for text in some) > 100
    assert [ids.tolist() for ids in encode_arrays(tokenizer, some)] == tokenizer.encode_batch(some)


def test_a_tokenizer_that_joins_words_is_given_whole_texts(shared_data) -> None:
    for change in (
        lambda inner: setattr(inner, "pre_tokenizer", pre_tokenizers.Metaspace()),
        lambda inner: setattr(inner, "normalizer", normalizers.Strip()),
        lambda inner: setattr(inner, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda inner: inner.add_tokens([tokenizers.AddedToken("two words")]),
        lambda inner: inner.add_tokens([tokenizers.AddedToken("word", rstrip=True)]),
    ):
        tokenizer = published("gpt2", shared_data)
        change(tokenizer.inner)
        assert not tokenizer.splits_at_spaces


def test_the_words_of_a_text_in_pieces_are_the_same(monkeypatch) -> None:
    some = [*texts(), ""]
    whole = [function(some, n) for function in (shingle_sets, word_ngrams) for n in (1, 5)]
    monkeypatch.setattr(sentences, "PIECE_CHARACTERS", 7)
    monkeypatch.setattr(shingles, "BLOCK_CHARACTERS", 40)
    cut = [function(some, n) for function in (shingle_sets, word_ngrams) for n in (1, 5)]
    for (values, offsets), (expected, places) in zip(cut, whole, strict=True):
        assert np.array_equal(values, expected) and np.array_equal(offsets, places)


def test_the_sentences_of_a_text_in_pieces_are_the_same(monkeypatch, shared_data) -> None:
    some = [text.replace("\ud800", "") for text in texts()]
    encoder = SentenceEncoder(published("bert", shared_data))
    whole = [split_sentences(text) for text in some], encoder.encode(some)
    monkeypatch.setattr(sentences, "PIECE_CHARACTERS", 7)
    assert [split_sentences(text) for text in some] == whole[0]
    for found, expected in zip(encoder.encode(some), whole[1], strict=True):
        assert np.array_equal(found, expected)


def test_a_long_sentence_is_cut_in_as_few_pieces_as_hold_it(shared_data) -> None:
    texts = ["a " * length for length in (1, 128, 129, 256)]
    _, sizes, counts, num_cut = SentenceEncoder(published("bert", shared_data)).encode(texts)
    assert (sizes.tolist(), counts.tolist(), num_cut) == ([1, 128, 128, 1, 128, 128], [1, 1, 2, 2], 2)


@pytest.mark.parametrize("architecture", ["gpt", pytest.param("bert", marks=pytest.mark.slow)])
def test_a_tokenizer_trained_on_pieces_is_the_same(short_pieces, architecture: str) -> None:
    some = [text for text in embedded_documents()[0][:8] if len(text) < 20_000]
    cut = [piece for text in some for piece in text_pieces(text)]
    assert len(cut) > 100 * len(some)
    whole, of_pieces = (train_tokenizer(texts, architecture, 500, "size").to_str() for texts in (some, cut))
    assert whole == of_pieces
