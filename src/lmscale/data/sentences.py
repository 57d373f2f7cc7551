"""A sentence splitter that needs no download: rules, in place of the trained punkt model of NLTK."""

import re
import string

import numpy as np
import tokenizers

from .tokenizer import Tokenizer

# A longer "sentence" (a table, a listing) is cut: one piece may not fill a training sample.
MAX_SENTENCE_TOKENS = 128
_MARK = "\U0010fffd"  # stands between sentences: a private character, which BERT's normalizer drops from a text
# Words whose full stop seldom ends a sentence.
_ABBREVIATIONS = frozenset(
    """
    adj adm al approx apr assoc aug ave blvd brig bros c ca capt cf ch chap cmdr co col comdr corp cpl dec def dept dist
    dr e ed eds eg eq esp esq est etc ex exp feb fig figs fri ft gal gen gov hon hr hrs i ie inc incl jan jr jul jun lb
    lt ltd maj mar max messrs min misc mon mr mrs ms mt no nos nov oct op orig oz p pg pl pp pres prof pt rep rev s sat
    sec sen sep sept sgt sp sr st std sun supt tech thu tue u univ v viz vol vols vs wed yr yrs
    """.split()
)
_PARAGRAPH = re.compile(r"\n[ \t]*\n")
# A stop, with what closes after it, then space, then something a sentence may begin with.
# The look behind it keeps a line of 100,000 dots from being tried at every dot.
_BORDER = re.compile(r"""(?<![.!?])[.!?]+["'”’)\]]* (?=["'“‘(\[]*[A-Z0-9`*:\[])""")
_LETTERS = string.ascii_letters + "."


def split_sentences(text: str) -> list[str]:
    """Cut a text into sentences; blank lines always end one, single line ends are spaces.

    A stop ends a sentence when space and a capital, a digit or a mark-up sign follow, unless it belongs to a known
    abbreviation, an initial (J. Smith) or an acronym in front of a word (U.S. Army). Rules make mistakes that punkt
    does not, at headings and unusual abbreviations; sentence-order prediction needs pieces of text in order, not
    perfect grammar.

    Args:
        text: any text.

    Returns:
        sentences without surrounding space, none empty; joined by spaces they are the words of the text in order.
    """
    sentences = []
    for paragraph in _PARAGRAPH.split(text):
        paragraph = " ".join(paragraph.split())
        start = 0
        for match in _BORDER.finditer(paragraph):
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
    # From the last space on: a search from the start of a long sentence would cost more than all the rest.
    word = text[max(start, text.rfind(" ", start, stop) + 1) : stop]
    if not (word.isascii() and word.isalpha()):
        word = word[len(word.rstrip(_LETTERS)) :].lstrip(".")  # (e.g and "e.g are e.g
    if len(word) <= 1:
        return word.isupper() and word != "I"
    return "." in word or word.lower() in _ABBREVIATIONS


class SentenceEncoder:
    """Encodes the sentences of documents, a whole document at a time.

    Sentences are joined by a mark of their own, an added token that splits the text for the tokenizer: each sentence
    gets the ids it would get alone, without the cost of a call for each.

    Args:
        tokenizer: of BERT; not changed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer.inner.to_str()))
        self._tokenizer.inner.encode_special_tokens = True
        self._tokenizer.inner.add_tokens([tokenizers.AddedToken(_MARK, normalized=False)])
        self._mark_id = self._tokenizer.id_of(_MARK)

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """The ids of all sentences of all texts, those of more than MAX_SENTENCE_TOKENS in pieces.

        Returns:
            ids int32 [tokens], back to back; sizes int64 [sentences], in tokens; counts int64 [texts], in sentences;
            how many sentences were cut.
        """
        marked = [_MARK.join(split_sentences(text.replace(_MARK, ""))) + _MARK for text in texts]
        encoded = self._tokenizer.encode_batch(marked)
        ids = np.concatenate([np.empty(0, dtype=np.int32), *(np.array(held, dtype=np.int32) for held in encoded)])
        ends = np.flatnonzero(ids == self._mark_id)
        of_text = np.repeat(np.arange(len(texts)), [len(held) for held in encoded])[ends]
        lengths = np.diff(ends, prepend=-1) - 1
        # A sentence without a token (of characters the vocabulary drops) is none.
        of_text, lengths = of_text[lengths > 0], lengths[lengths > 0]
        pieces = -(-lengths // MAX_SENTENCE_TOKENS)
        sizes = np.full(pieces.sum(), MAX_SENTENCE_TOKENS, dtype=np.int64)
        sizes[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * MAX_SENTENCE_TOKENS
        counts = np.bincount(np.repeat(of_text, pieces), minlength=len(texts))
        return ids[ids != self._mark_id], sizes, counts, int((pieces > 1).sum())
