"""A sentence splitter that needs no download: rules, in place of the trained punkt model of NLTK."""

import re

from .tokenizer import Tokenizer

# A longer "sentence" (a table, a listing) is cut: one piece may not fill a training sample.
MAX_SENTENCE_TOKENS = 128
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
_BORDER = re.compile(r"""([.!?]+)(["'”’)\]]*)\s+(?=["'“‘(\[]*[A-Z0-9`*:\[])""")
_LAST_WORD = re.compile(r"([A-Za-z][A-Za-z.]*)$")


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
            if match.group(1) == "." and _is_abbreviation(paragraph[start : match.start()]):
                continue
            sentences.append(paragraph[start : match.end()].strip())
            start = match.end()
        rest = paragraph[start:].strip()
        if rest:
            sentences.append(rest)
    return sentences


def encode_sentences(texts: list[str], tokenizer: Tokenizer) -> tuple[list[list[list[int]]], int]:
    """For each text the ids of its sentences, those of more than MAX_SENTENCE_TOKENS in pieces.

    Returns:
        a list of sentences, lists of ids, for each text; how many sentences were cut.
    """
    sentences = [split_sentences(text) for text in texts]
    encoded = iter(tokenizer.encode_batch([sentence for held in sentences for sentence in held]))
    documents, num_cut = [], 0
    for held in sentences:
        pieces = []
        for _ in held:
            ids = next(encoded)
            pieces += [ids[i : i + MAX_SENTENCE_TOKENS] for i in range(0, len(ids), MAX_SENTENCE_TOKENS)]
            num_cut += len(ids) > MAX_SENTENCE_TOKENS
        documents.append(pieces)
    return documents, num_cut


def _is_abbreviation(before: str) -> bool:
    """Whether the stop after `before` belongs to its last word."""
    match = _LAST_WORD.search(before)
    if match is None:
        return False
    word = match.group(1)
    if len(word) == 1:
        return word.isupper() and word != "I"
    return "." in word or word.lower() in _ABBREVIATIONS
