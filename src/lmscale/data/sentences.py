"""A rule-based sentence splitter that needs no download, instead of NLTK's trained punkt model."""

import re
import string

import numpy as np
import tokenizers

from .tokenizer import Tokenizer

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
# A stop with closing marks, a space, then a possible start of a sentence.
# The lookbehind avoids a match attempt at every dot of a line of 100,000 dots.
_BOUNDARY = re.compile(r"""(?<![.!?])[.!?]+["'”’)\]]* (?=["'“‘(\[]*[A-Z0-9`*:\[])""")
_LETTERS = string.ascii_letters + "."


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences; blank lines always end a sentence, single line ends count as spaces.

    A stop ends a sentence if it is followed by a space and a capital, a digit or a mark-up sign, unless it belongs to a
    known abbreviation, an initial (J. Smith) or an acronym before a word (U.S. Army). The rules make more mistakes than
    punkt at headings and rare abbreviations, but sentence-order prediction needs pieces of text in order, not perfect
    grammar.

    Args:
        text: any text.

    Returns:
        non-empty sentences without surrounding space; joined by spaces they are the words of the text in order.
    """
    sentences = []
    for paragraph in _PARAGRAPH.split(text):
        paragraph = " ".join(paragraph.split())
        start = 0
        for match in _BOUNDARY.finditer(paragraph):
            stop, end = match.span()
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
    if not (word.isascii() and word.isalpha()):
        word = word[len(word.rstrip(_LETTERS)) :].lstrip(".")  # "(e.g" and '"e.g' become "e.g"
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
        self._tokenizer.inner.encode_special_tokens = True
        self._tokenizer.inner.add_tokens([tokenizers.AddedToken(_MARK, normalized=False)])
        self._mark_id = self._tokenizer.id_of(_MARK)

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Encode all sentences of all texts; those of more than MAX_SENTENCE_TOKENS are cut into pieces.

        Returns:
            ids int32 [tokens]; sizes int64 [sentences], in tokens; counts int64 [texts], in sentences; and the number
            of sentences that were cut.
        """
        marked = [_MARK.join(split_sentences(text.replace(_MARK, ""))) + _MARK for text in texts]
        encoded = self._tokenizer.encode_batch(marked)
        ids = np.concatenate([np.empty(0, dtype=np.int32), *(np.array(held, dtype=np.int32) for held in encoded)])
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
