import os
import re
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from ground_truth import newsgroup_bodies, plain_shingles, race_articles, searched_pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from lmscale.corpus import shingles
from lmscale.corpus.shingles import shingle_sets, word_ngrams
from lmscale.data import sentences

# Characters that lower-case to several (İ), depending on context (Σ) or not at all, that are letters but not word
# characters (combining marks), that have 1 to 4 bytes, or that are lone surrogates.
ALPHABET = "aAbB9_ \n-'İΣσßéÉ中文カไ。क्षै٣½ⅷⓐ\u0301\u200d\ud800\udfff\x00😀𝒳𐐀"
AWKWARD = [
    "",
    " \n\t ",
    "...",
    " ... ",
    "!?",
    "one",
    "One two",
    "ONE, TWO; three_four",
    "İstanbul İ i̇stanbul istanbul",
    "ΑΣ ας ασ ΑΣΑ",
    "straße STRASSE",
    "中文 文字 中文 文字 中文",
    "a\x00b a b \ud800c c",
    "x" * 7 + " " + "x" * 8 + " " + "x" * 9 + " " + "x" * 64 + " " + "x" * 65 + " " + "x" * 66,
    "the cat sat on the mat the cat sat on the mat",
    "é" * 31 + " " + "é" * 32 + " " + "é" * 33,
]


def sets_of(texts: list[str], n: int) -> list[set]:
    values, offsets = shingle_sets(texts, n)
    assert values.dtype == np.uint64 and offsets.dtype == np.int64 and len(offsets) == len(texts) + 1
    parts = [values[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    assert all((part[1:] > part[:-1]).all() for part in parts)
    return [set(part.tolist()) for part in parts]


def assert_like_plain_sets(texts: list[str], n: int) -> None:
    ours, theirs = sets_of(texts, n), [plain_shingles(text, n) for text in texts]
    assert [len(held) for held in ours] == [len(held) for held in theirs]
    for i in range(len(texts)):
        assert [len(ours[i] & held) for held in ours] == [len(theirs[i] & held) for held in theirs]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_shingles_of_awkward_texts_equal_those_of_plain_python(n) -> None:
    assert_like_plain_sets(AWKWARD, n)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text(ALPHABET, max_size=60), max_size=6), st.integers(1, 4))
def test_shingles_of_random_texts_equal_those_of_plain_python(texts, n) -> None:
    assert_like_plain_sets(texts, n)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(ALPHABET, max_size=40), max_size=5), st.integers(1, 4), st.integers(1, 9), st.integers(1, 5))
def test_block_boundaries_do_not_change_the_result(texts, n, characters, words) -> None:
    expected = sets_of(texts, n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentences, "PIECE_CHARACTERS", characters)
        patch.setattr(shingles, "BLOCK_CHARACTERS", characters)
        patch.setattr(shingles, "BLOCK_WORDS", words)
        assert sets_of(texts, n) == expected


def test_a_text_without_spaces_is_read_in_blocks(monkeypatch) -> None:
    sizes, hash_block = [], shingles._hash_block
    monkeypatch.setattr(shingles, "_hash_block", lambda *block: (sizes.append(len(block[0])), hash_block(*block))[1])
    monkeypatch.setattr(sentences, "PIECE_CHARACTERS", 50)
    monkeypatch.setattr(shingles, "BLOCK_CHARACTERS", 50)
    assert_like_plain_sets(["word,\u3002" * 1000], 2)
    assert max(sizes) < 2 * 50


def test_shingles_of_real_texts_equal_those_of_plain_python(shared_data) -> None:
    posts = list(newsgroup_bodies(shared_data).values())
    texts = race_articles(shared_data, "dev")[:100] + posts[::60] + sorted(posts, key=len)[-5:]
    assert_like_plain_sets(texts, 5)


def test_word_characters_equal_those_of_re() -> None:
    expected = [re.match(r"\w", chr(code)) is not None for code in range(0x110000)]
    every = "".join(map(chr, range(0x110000)))
    found = np.concatenate([shingles._kinds(every[i : i + 128]) for i in range(0, len(every), 128)])
    assert (found > 0).tolist() == expected


@pytest.mark.parametrize(
    "text", ["中文字符々〆、文", "ひらがなカタカナー", "ﾊﾝｶｸ", "ภาษาไทย", "ພາສາລາວ", "မြန်မာ", "ភាសាខ្មែរ", "𠀀𪜀"]
)
def test_each_letter_of_a_script_without_spaces_is_a_word(text: str) -> None:
    letters = [letter for letter in text if re.match(r"\w", letter)]
    assert word_ngrams([text], 1)[1].tolist() == [0, len(letters)]
    assert word_ngrams([f"GPT{text}2 été 한국어"], 1)[1].tolist() == [0, len(letters) + 4]


def test_a_chinese_text_with_one_other_character_is_a_near_duplicate() -> None:
    text = "".join(chr(0x4E00 + number) + "，" * (number % 23 == 22) for number in range(92))
    found, jaccard = searched_pairs([text, text.replace(chr(0x4E00 + 50), "中")])
    assert found.tolist() == [[0, 1]] and jaccard == (88 - 5) / (88 + 5)


def test_a_text_has_the_same_shingles_alone_and_in_a_batch() -> None:
    together = sets_of(AWKWARD * 2, 5)
    assert together == [sets_of([text], 5)[0] for text in AWKWARD * 2]


def test_ngrams_are_in_order_with_repetitions_and_hash_like_shingles() -> None:
    texts = ["a b a b a b", "", "a b", "b a b c"]
    values, offsets = word_ngrams(texts, 3)
    assert offsets.tolist() == [0, 4, 4, 4, 6]
    aba, bab = values[0], values[1]
    assert values[:5].tolist() == [aba, bab, aba, bab, bab] and len({aba, bab, values[5]}) == 3
    sets, borders = shingle_sets(texts, 3)
    assert sets[: borders[1]].tolist() == sorted([aba, bab])


def test_words_that_differ_in_one_byte_have_different_hashes_at_every_length() -> None:
    words = [("x" * k + last) for k in range(140) for last in "abé"]
    values, _ = word_ngrams([" ".join(words)], 1)
    assert len(set(values.tolist())) == len(words)


def test_hashes_are_uniform_over_all_bits() -> None:
    # Words of 8 letters that differ only in the last: a polynomial of their bytes without mixing would collide.
    letters = [chr(97 + k) for k in range(26)]
    texts = [f"aaaaaaa{a} bbbbbbb{b} ccccccc{c}" for a in letters for b in letters for c in letters]
    values, _ = word_ngrams(texts, 3)
    assert len(np.unique(values)) == 26**3
    bits = (values[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    # 17,576 fair bits have a standard deviation of 0.0038 around one half; 64 of them stay within 5.
    assert abs(bits.mean(axis=0) - 0.5).max() < 0.019


def test_hashes_are_the_same_in_every_process() -> None:
    texts = ["The cat sat on the mat.", "Ünïcode wörds, fünf ßtück 中文", "two words", "?!"]
    code = f"from lmscale.corpus.shingles import *; print(*shingle_sets({texts!r}, 5)[0].tolist())"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    # Literal values, because files of different versions of the code are compared.
    assert [int(value) for value in run.stdout.split()] == [
        0x06CBBA3748F2F8F3,
        0xDB0C4E65C321AD06,
        0x8B03B565F53B4B56,
        0xE8B1A6CC5D381E63,
        0xAFC890C6E54EA9B3,
        0xC334A0EB0D0F7F0A,
    ]


@pytest.mark.slow
def test_one_text_of_50_mb_takes_bounded_memory() -> None:
    text = "".join(f"word{k} and more, " for k in range(2_800_000))
    assert len(text) > 50e6
    tracemalloc.start()
    values, offsets = shingle_sets([text], 5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(values) == offsets[-1] == 3 * 2_800_000 - 4
    assert peak < 12 * len(text)


def test_a_single_word_of_10_mb_is_one_shingle() -> None:
    values, offsets = shingle_sets(["é" * 5_000_000 + "!", "é" * 5_000_000, "é" * 4_999_999], 5)
    assert offsets.tolist() == [0, 1, 2, 3]
    assert values[0] == values[1] != values[2]


def test_no_texts_have_no_shingles() -> None:
    for function in (shingle_sets, word_ngrams):
        values, offsets = function([], 5)
        assert len(values) == 0 and offsets.tolist() == [0]
