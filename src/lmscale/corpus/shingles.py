"""Word n-grams of many texts at once, as 64-bit hashes; near-duplicates and overlap are measured on them.

A word is a match of `\\w+` in the lower-cased text, in Python's Unicode sense. In scripts without spaces between
words, such as Chinese, each letter is a word, so an n-gram there is one of characters.

Texts are joined and read in blocks of UTF-8: a table marks the characters of words, a word's bytes are loaded eight at
a time, and everything after that is arithmetic on whole arrays. All constants are fixed, so a hash is the same in every
process and on every machine.
"""

import functools
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import xxhash

from ..data.sentences import by_size, text_pieces
from ..hashing import mix

BLOCK_CHARACTERS = 2**16  # read at once, or one longer word: the arrays of a block fit a core's cache
BLOCK_WORDS = 2**15
LONG_WORD_BYTES = 64  # longer words are hashed one by one: each further 8 bytes would need a pass over all words
_MULTIPLIER = np.uint64(0x9E6C63D0876A9A47)  # base of the polynomial of an n-gram: odd, otherwise arbitrary
_MASKS = np.array([2 ** (8 * k) - 1 for k in range(9)], dtype=np.uint64)  # the first k of 8 bytes
_LONG_WORD_SEED, _NO_WORDS_SEED = 1, 2  # different, so that a text without words never collides with a word
_ASCII_IS_WORD = bytes(chr(byte).isalnum() or chr(byte) == "_" for byte in range(128)) + bytes(128)
_WORD, _AFTER_WORD = re.compile(r"\w+"), re.compile(r"(?<=\w)\W")
_ALONE = 2  # kind of a letter that is a word by itself
# Blocks of Unicode without spaces between words: Thai, Lao, Burmese, Khmer, kana, Bopomofo and Chinese characters.
UNSPACED = (
    (0x0E00, 0x0EFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x3005, 0x3007),
    (0x3040, 0x312F),
    (0x31A0, 0x31FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9D),
    (0x1AFF0, 0x1B16F),
    (0x20000, 0x3FFFF),
)


def shingle_sets(texts: Sequence[str], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute the set of word n-grams of each text.

    A text of fewer than n words has one shingle made of all its words; a text without words has one made of its
    stripped characters. Every text thus has a shingle, and equal short texts have similarity 1 instead of 0 / 0.

    Args:
        texts: any strings; lone surrogates and NUL are allowed.
        n: words per shingle, at least 1.

    Returns:
        values: uint64 [total], hashes of the shingles, ascending and distinct within each text;
        offsets: int64 [texts + 1], index in `values` at which each text begins.
    """
    words, first = _hash_words(texts)
    values, offsets = _ngrams(words, first, n)
    values, offsets = _with_short_texts(values, offsets, texts, words, first)
    for start, end in pairwise(offsets.tolist()):
        values[start:end].sort()
    is_new = starts_run(values)
    is_new[offsets[:-1]] = True  # no text is empty here
    return values[is_new], offsets_of(is_new)[offsets]


def word_ngrams(texts: Sequence[str], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute all word n-grams of each text in order, including repeated ones.

    Args:
        texts: any strings.
        n: words per n-gram, at least 1.

    Returns:
        values: uint64 [total], the same hashes as `shingle_sets` computes;
        offsets: int64 [texts + 1]. A text of fewer than n words has none.
    """
    words, first = _hash_words(texts)
    return _ngrams(words, first, n)


def polynomial(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Hash several uint64 arrays of equal shape elementwise: a polynomial modulo 2**64, then `mix`."""
    total = columns[0].copy()
    for column in columns[1:]:
        np.multiply(total, _MULTIPLIER, out=total)
        np.add(total, column, out=total)
    return mix(total)


def offsets_of(counts: np.ndarray) -> np.ndarray:
    """Return where each of several concatenated groups begins, and the end of the last, int64 [groups + 1]."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def starts_run(ordered: np.ndarray) -> np.ndarray:
    """Mark the values that differ from their predecessor."""
    is_first = np.ones(len(ordered), dtype=bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return is_first


def distinct(keys: np.ndarray) -> np.ndarray:
    """Sort-based `np.unique`; since numpy 2.3 that function hashes integers, which is many times slower on millions."""
    keys = np.sort(keys)
    return keys[starts_run(keys)]


def _hash_words(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of the words of all texts, uint64 [words], and the first word of each, int64 [texts + 1]."""
    hashes, num_words = [np.empty(0, dtype=np.uint64)], np.zeros(len(texts) + 1, dtype=np.int64)
    pieces = (
        (number, piece)
        for number, text in enumerate(texts)
        for spaced in text_pieces(text)  # the lower case of a letter may depend on its neighbours, but not on a space
        for piece in text_pieces(spaced.lower(), _AFTER_WORD)
    )
    for group in by_size(pieces, lambda numbered: len(numbered[1]), BLOCK_CHARACTERS):
        lengths = np.fromiter((len(piece) for _, piece in group), dtype=np.int64, count=len(group))
        ends = np.cumsum(lengths + 1)  # in the block; each piece is followed by a line end, which no word contains
        block = "".join(f"{piece}\n" for _, piece in group)
        edges = _edges(_kinds(block))
        hashes.append(_hash_block(block, edges))
        counts = np.diff(np.searchsorted(edges[::2], ends), prepend=0)
        np.add.at(num_words, [number + 1 for number, _ in group], counts)
    return np.concatenate(hashes), np.cumsum(num_words)


def _kinds(block: str) -> np.ndarray:
    """Mark the characters that belong to words by 1, or by _ALONE, uint8 [characters]."""
    if block.isascii():
        return np.frombuffer(block.encode("ascii").translate(_ASCII_IS_WORD), dtype=np.uint8)
    return _kind_table().take(np.frombuffer(block.encode("utf-32-le", "surrogatepass"), dtype="<u4"))


@functools.cache
def _kind_table() -> np.ndarray:
    """Mark the code points that `\\w` matches, by the Unicode tables of this Python."""
    kinds = np.zeros(0x110000, dtype=np.uint8)
    for match in _WORD.finditer("".join(map(chr, range(0x110000)))):
        kinds[match.start() : match.end()] = 1
    for first, last in UNSPACED:
        kinds[first : last + 1] *= _ALONE
    return kinds


def _edges(kinds: np.ndarray) -> np.ndarray:
    """Return the alternating starts and ends of words."""
    changes = np.empty(len(kinds) + 1, dtype=bool)
    changes[0], changes[-1] = kinds[0], kinds[-1]
    np.not_equal(kinds[1:], kinds[:-1], out=changes[1:-1])
    is_alone = kinds == _ALONE
    if not is_alone.any():
        return np.flatnonzero(changes)
    changes[:-1] |= is_alone
    places = np.flatnonzero(changes)
    around = np.pad(kinds, 1)
    return np.repeat(places, 1 + ((around[places] > 0) & (around[places + 1] > 0)))  # the end of a word and a start


def _hash_block(block: str, edges: np.ndarray) -> np.ndarray:
    """Hash the words of a block from their UTF-8, 8 bytes at a time, mixed after each step."""
    encoded = _encode(block)
    if len(encoded) != len(block):
        edges = _byte_places(block)[edges]
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    # View every byte of the buffer as the start of an 8-byte number, without a copy.
    numbers = np.ndarray((len(encoded) + 1,), dtype="<u8", buffer=encoded + bytes(8), strides=(1,))
    hashes = mix(numbers[starts] & _MASKS.take(np.minimum(lengths, 8)))
    for done in range(8, LONG_WORD_BYTES, 8):
        more = np.flatnonzero(lengths > done)
        if len(more) == 0:
            return hashes
        mask = _MASKS.take(np.minimum(lengths[more] - done, 8))
        hashes[more] = polynomial((hashes[more], numbers[starts[more] + done] & mask))
    for word in np.flatnonzero(lengths > LONG_WORD_BYTES).tolist():
        whole = encoded[starts[word] : starts[word] + lengths[word]]
        hashes[word] = xxhash.xxh3_64_intdigest(whole, seed=_LONG_WORD_SEED)
    return hashes


def _byte_places(block: str) -> np.ndarray:
    """Return the byte at which each character begins in the UTF-8 of a block, int64 [characters + 1]."""
    points = np.frombuffer(block.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    widths = np.ones(len(points), dtype=np.int8)
    for first_wider in (0x80, 0x800, 0x10000):
        widths += points >= first_wider
    return offsets_of(widths)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _ngrams(words: np.ndarray, first: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the n-grams within texts, in order, and the index of each text's first."""
    offsets = offsets_of(np.maximum(np.diff(first) - (n - 1), 0))
    values = np.empty(offsets[-1], dtype=np.uint64)
    inside = np.ones(len(words), dtype=bool)
    for back in range(1, n):  # no n-gram begins at the last n - 1 words of a text
        inside[np.maximum(first[1:] - back, first[:-1])[first[1:] > first[:-1]]] = False
    done = 0
    for start in range(0, len(words) - (n - 1), BLOCK_WORDS):
        end = min(start + BLOCK_WORDS, len(words) - (n - 1))
        some = polynomial([words[start + k : end + k] for k in range(n)])[inside[start:end]]
        values[done : done + len(some)] = some
        done += len(some)
    return values, offsets


def _with_short_texts(
    values: np.ndarray, offsets: np.ndarray, texts: Sequence[str], words: np.ndarray, first: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Add one shingle for each text that has no n-gram."""
    short = np.flatnonzero(np.diff(offsets) == 0)
    if len(short) == 0:
        return values, offsets
    num_words = np.diff(first)[short]
    shingles = np.empty(len(short), dtype=np.uint64)
    for number in np.flatnonzero(np.bincount(num_words)).tolist():
        which = num_words == number
        if number == 0:
            stripped = [_encode(texts[text].lower().strip()) for text in short[which].tolist()]
            shingles[which] = [xxhash.xxh3_64_intdigest(held, seed=_NO_WORDS_SEED) for held in stripped]
        else:
            begins = first[short[which]]
            shingles[which] = polynomial([words[begins + k] for k in range(number)])
    counts = np.diff(offsets)
    values = np.insert(values, offsets[short], shingles)
    counts[short] = 1
    return values, offsets_of(counts)
