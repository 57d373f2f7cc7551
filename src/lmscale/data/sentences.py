"""Texts cut in sentences by rules that need no download, instead of NLTK's trained punkt model; long texts in pieces.

Pieces bound memory by bytes, not by the number of documents: no token, word or sentence depends on where they are cut.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
import tokenizers

from .tokenizer import END_OF_TEXT, Tokenizer

Item = TypeVar("Item")
DocumentEncoder = Callable[[list[str]], tuple[np.ndarray, np.ndarray, np.ndarray, int | None]]
PIECE_CHARACTERS = 2**16  # of a text at once, unless it has no space; a tokenizer needs some 200 bytes for each
GROUP_CHARACTERS = 2**20  # of several texts at once
# Before the spaces after a word. Neither a word nor a run of spaces is cut, and no n-gram, token or lower-cased letter
# depends on what is on the other side: the splitters of GPT-2 and BERT begin a new token there.
_CUT = re.compile(r"(?<=\S)[ \t\n]")
# Longer "sentences" (tables, listings) are cut, so that one piece does not fill a training sample.
MAX_SENTENCE_TOKENS = 128
_MARK = "\U0010fffd"  # separates sentences: a private-use character, which BERT's normalizer removes from texts
# Words whose full stop rarely ends a sentence.
_ABBREVIATIONS = frozenset(
    """
    adj adm al approx apr assoc aug ave blvd brig bros c ca capt cf ch chap cmdr co col comdr corp cpl dec def dept dist
    dr e ed eds eg eq esp esq est etc ex exp feb fig figs fri ft gal gen gov hon hr hrs i ie inc incl jan jr jul jun lb
    lt ltd maj mar max messrs min misc mon mr mrs ms mt no nos nov oct op orig oz p pg pl pp pres prof pt rep rev s sat
    sec sen sep sept sgt sp sr st std sun supt tech thu tue u univ v viz vol vols vs wed yr yrs
    """.split()
)
_PARAGRAPH = re.compile(r"\n[ \t]*\n")
_ENDS = "。！？｡।॥؟۔։።။។"  # stops that end a sentence whatever follows: they belong to no abbreviation and no number
# A stop with closing marks, a space, then a possible start of a sentence, whose letter is the group; or one of _ENDS.
# The second lookbehind avoids a match attempt at every dot of a line of 100,000 dots.
# French has a space inside its guillemets, and German uses them the other way round.
_BOUNDARY = re.compile(
    rf"""[.!?{_ENDS}](?:
        (?<=[.!?])(?<![.!?].)[.!?]*(?:["'“”’)\]«‹]|[ ]?[»›](?=[ ]))*[ ]
        (?=(?:["'“‘„‚(\[¿¡]|[«‹»›][ ]?)*(?:([^\W_a-zªº])|[`*:\[]))
        |(?<=[{_ENDS}])[{_ENDS}]*["'”’)\]」』）】》〉»]*[ ]?
    )""",
    re.VERBOSE,
)


def text_pieces(text: str, place: re.Pattern = _CUT) -> Iterator[str]:
    """Yield a text in pieces of about PIECE_CHARACTERS, each but the first beginning at such a place, as a space after
    a word; short ones whole.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS and (cut := place.search(text, start + PIECE_CHARACTERS)):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:] if start else text


def grouped(texts: Iterable[str]) -> Iterator[list[tuple[int, str]]]:
    """Yield the pieces of all texts in order with the number of their text, in lists of about GROUP_CHARACTERS."""
    pieces = ((number, piece) for number, text in enumerate(texts) for piece in text_pieces(text))
    return by_size(pieces, lambda numbered: len(numbered[1]), GROUP_CHARACTERS)


def by_size(items: Iterable[Item], size_of: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Yield the items in order, in lists that end where their sizes add up to `limit`."""
    held, size = [], 0
    for item in items:
        held.append(item)
        size += size_of(item)
        if size >= limit:
            yield held
            held, size = [], 0
    if held:
        yield held


def encode_arrays(tokenizer: Tokenizer, texts: Iterable[str]) -> list[np.ndarray]:
    """Encode each text as `Tokenizer.encode_batch` does, as int32 [tokens].

    The memory is that of one group of pieces and of the ids, unless a tokenizer's tokens depend on the cut.
    """
    parts: list[list[np.ndarray]] = []
    for group in grouped(texts) if tokenizer.splits_at_spaces else [list(enumerate(texts))]:
        encoded = tokenizer.inner.encode_batch_fast([piece for _, piece in group], add_special_tokens=False)
        for (number, _), encoding in zip(group, encoded, strict=True):
            if number == len(parts):
                parts.append([])
            parts[number].append(np.array(encoding.ids, dtype=np.int32))
    return [held[0] if len(held) == 1 else np.concatenate(held) for held in parts]


def document_encoder(tokenizer: Tokenizer, sequence: str) -> DocumentEncoder:
    """Return the function that encodes documents for a token file; it returns what `SentenceEncoder.encode` does.

    Args:
        sequence: what a sequence of the token file is, as in `CorpusForm`: a `document`, followed by end-of-text, or a
            `sentence`. No document is cut: the last value is None.
    """
    if sequence == "sentence":
        return SentenceEncoder(tokenizer).encode
    end = np.array([tokenizer.id_of(END_OF_TEXT)], dtype=np.int32)

    def encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray, None]:
        encoded = encode_arrays(tokenizer, texts)
        sizes = np.array([len(ids) + 1 for ids in encoded], dtype=np.int64)
        joined = np.concatenate([part for ids in encoded for part in (ids, end)])
        return joined, sizes, np.ones(len(texts), dtype=np.int64), None

    return encode


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences; blank lines always end a sentence, single line ends count as spaces.

    A stop ends a sentence if it is followed by a space and a capital, a letter of a script without capitals, a digit or
    a mark-up sign, unless it belongs to a known English abbreviation, an initial (J. Smith) or an acronym before a word
    (U.S. Army). The full stops of Chinese, Japanese, Hindi and others always end one. The rules make more mistakes than
    punkt at headings and rare abbreviations, but sentence-order prediction needs pieces of text in order, not perfect
    grammar. A language that writes no stops, as Thai, has no sentences.

    Args:
        text: any text.

    Returns:
        non-empty sentences without surrounding space: the characters of the text in order, apart from spaces.
    """
    sentences = []
    for paragraph in _PARAGRAPH.split(text):
        # In pieces: a list of all words of a book would need many times its bytes.
        pieces = (" ".join(piece.split()) for piece in text_pieces(paragraph))
        paragraph = " ".join(piece for piece in pieces if piece)
        start = 0
        for match in _BOUNDARY.finditer(paragraph):
            stop, end = match.span()
            if match[1] and match[1].title() != match[1]:
                continue  # a small letter that is not ASCII
            is_full_stop = paragraph[stop] == "." and paragraph[stop + 1] not in ".!?"
            if is_full_stop and _is_abbreviation(paragraph, start, stop):
                continue
            sentences.append(paragraph[start:end].rstrip())
            start = end
        if start < len(paragraph):
            sentences.append(paragraph[start:])
    return sentences


def _is_abbreviation(text: str, start: int, stop: int) -> bool:
    """Whether the full stop at `stop` belongs to the last word of text[start:stop]."""
    # Search from the last space on: from the start of a long sentence it would dominate the run time.
    word = text[max(start, text.rfind(" ", start, stop) + 1) : stop]
    if not word.isalpha():  # "(e.g" and '"e.g' become "e.g"
        begin = len(word)
        while begin and (word[begin - 1].isalpha() or word[begin - 1] == "."):
            begin -= 1
        word = word[begin:].lstrip(".")
    if len(word) <= 1:
        return word.isupper() and word != "I"
    return "." in word or word.lower() in _ABBREVIATIONS


class SentenceEncoder:
    """Encode the sentences of whole documents at once.

    Sentences are joined by a separator, an added token at which the tokenizer splits the text. Each sentence gets the
    same ids as if it were encoded separately, without one call per sentence.

    Args:
        tokenizer: BERT's; it is not modified.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer.inner.to_str()))
        self._tokenizer.inner.add_tokens([tokenizers.AddedToken(_MARK, normalized=False)])
        self._mark_id = self._tokenizer.id_of(_MARK)

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Encode all sentences of all texts; those of more than MAX_SENTENCE_TOKENS are cut into pieces.

        Returns:
            ids int32 [tokens]; sizes int64 [sentences], in tokens; counts int64 [texts], in sentences; and the number
            of sentences that were cut.
        """
        encoded = encode_arrays(
            self._tokenizer, (_MARK.join(split_sentences(text.replace(_MARK, ""))) + _MARK for text in texts)
        )
        ids = np.concatenate([np.empty(0, dtype=np.int32), *encoded])
        ends = np.flatnonzero(ids == self._mark_id)
        of_text = np.repeat(np.arange(len(texts)), [len(held) for held in encoded])[ends]
        lengths = np.diff(ends, prepend=-1) - 1
        # Sentences without tokens (of characters that the normalizer removes) do not count.
        of_text, lengths = of_text[lengths > 0], lengths[lengths > 0]
        pieces = -(-lengths // MAX_SENTENCE_TOKENS)
        sizes = np.full(pieces.sum(), MAX_SENTENCE_TOKENS, dtype=np.int64)
        sizes[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * MAX_SENTENCE_TOKENS
        counts = np.bincount(np.repeat(of_text, pieces), minlength=len(texts))
        return ids[ids != self._mark_id], sizes, counts, int((pieces > 1).sum())
