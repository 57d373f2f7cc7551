"""What section 4.1 does to each document: repaired, its lines joined, kept if it is in the language and long enough.

Each step of datatrove's here counts what it changes or drops, by reason. Filters can leave the first few dropped
documents of every reason and task for people to look at.
"""

import json
import re
import unicodedata
from abc import abstractmethod
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

import ftfy
import tokenizers
from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from ftfy.badness import is_bad
from ftfy.fixes import uncurl_quotes

from ..data.tokenizer import read_tokenizer
from .language import UNKNOWN, identify_language, known_languages
from .work_folder import complete_file

# ftfy's defaults, as upstream used them: also straight quotes, NFC, no ligatures, and entities up to the first `<`.
REPAIR = ftfy.TextFixerConfig(explain=False)
NUM_SAMPLES = 20  # dropped documents that are kept for each reason and task
SAMPLE_CHARACTERS = 200

_ENTITY = "&#?[0-9A-Za-z]{1,24};"
# ftfy leaves a text alone that has none of these: anything but plain ASCII, or what may be an HTML entity.
_NOT_PLAIN = re.compile(rf"[^\t\n\f -~]|{_ENTITY}")
# What ftfy's steps after the encoding look for, beside curly quotes: control characters, breaks, ligatures, widths.
_NEEDS_FTFY = re.compile(
    f"{_ENTITY}|[\x00-\x08\x0b\r\x0e-\x1f\x7f-\x9f\u0132\u0133\u0149\u01c4-\u01cc\u01f1-\u01f3\u2028\u2029\u206a-\u206f"
    "\u3000\ud800-\udfff\ufb00-\ufb06\ufeff\uff01-\uffff]"
)
# Upstream's `general_cleaning`: a break after a word (not after punctuation) and a run of spaces become one space.
_STORY_BREAKS = re.compile(r"\n(?<=\w\n)\n* ?|  +")  # both begin with a character: faster to search for
_WORD_START = re.compile(r"(?:^|[ \t\n\r])[0-9A-Za-z]")
_PIECE = re.compile(r"\w+|[^\w\s]")


def repair_text(text: str) -> str:
    """`ftfy.fix_text(text, REPAIR)`, to the character, without ftfy where it cannot change anything.

    ftfy mends each line by itself; lines that are plain ASCII without entities stay as they are. Of the others, those
    that ftfy would not take for mojibake and that only lose their curly quotes, as most do, lose them here.
    """
    parts, done = [], 0
    markup = text.find("<")
    while match := _NOT_PLAIN.search(text, done):
        start = text.rfind("\n", done, match.start()) + 1 or done
        end = text.find("\n", match.end()) + 1 or len(text)
        # ftfy unescapes entities until it has seen the first `<` of the text.
        config = REPAIR if markup < 0 or start <= markup else REPAIR._replace(unescape_html=False)
        parts += text[done:start], _repair_line(text[start:end], config)
        done = end
    return "".join([*parts, text[done:]]) if parts else text


def _repair_line(line: str, config: ftfy.TextFixerConfig) -> str:
    if len(line) <= config.max_decode_length and not _NEEDS_FTFY.search(line) and not is_bad(line):
        plain = uncurl_quotes(line)
        # ftfy goes round until nothing changes: the second time it would look at the straight quotes.
        if unicodedata.is_normalized("NFC", plain) and (plain == line or not is_bad(plain)):
            return plain
    return ftfy.fix_text(line, config)


def join_story_lines(text: str) -> str:
    """One space for each line break that follows a word and for each run of spaces.

    CC-Stories breaks its lines inside paragraphs. A break after punctuation stays, so paragraphs mostly do; a heading
    without punctuation is joined to what follows.

    Source: `general_cleaning` in tools/openwebtext/cleanup_fix_dataset.py of Megatron-LM, the same text out.
    """
    return _STORY_BREAKS.sub(" ", text)


class RepairText(PipelineStep):
    """Repair every document by `repair_text`; documents of which nothing is left (control characters) are dropped."""

    type = "CLEAN"
    name = "repair text"

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yield the documents, counted as `repaired` where they changed and `empty` where they vanished."""
        for document in data:
            with self.track_time():
                text = repair_text(document.text)
                if text != document.text:
                    self.stat_update("repaired")
                    document.text = text
            if text.strip():
                yield document
            else:
                self.stat_update("empty")


class JoinStoryLines(PipelineStep):
    """`join_story_lines` for the documents of some sources, counted as `joined` where they changed.

    Args:
        sources: names of the sources.
    """

    type = "CLEAN"
    name = "join lines"

    def __init__(self, sources: Iterable[str]) -> None:
        super().__init__()
        self.sources = frozenset(sources)

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yield the documents."""
        for document in data:
            if document.metadata["source"] in self.sources:
                with self.track_time():
                    text = join_story_lines(document.text)
                    if text != document.text:
                        self.stat_update("joined")
                        document.text = text
            yield document


class DocumentFilter(PipelineStep):
    """A step that drops documents, counted as `kept` or by the reason.

    Args:
        samples: folder for the first NUM_SAMPLES dropped documents of each reason, as `<task>.json`:
            {reason: [{source, file, row, id, text}]}, the text cut to SAMPLE_CHARACTERS; None keeps none.
    """

    type = "FILTER"

    def __init__(self, samples: Path | None = None) -> None:
        super().__init__()
        self.samples = samples

    @abstractmethod
    def judge(self) -> Callable[[str], str | None]:
        """What gives the reason to drop a text, or None; made once in each task."""

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yield the documents that are kept."""
        judge, dropped = self.judge(), {}
        for document in data:
            with self.track_time():
                reason = judge(document.text)
            self.stat_update(reason or "kept")
            if reason is None:
                yield document
                continue
            examples = dropped.setdefault(reason, [])
            if len(examples) < NUM_SAMPLES:
                place = {name: document.metadata[name] for name in ("source", "file", "row")}
                examples.append(place | {"id": document.id, "text": document.text[:SAMPLE_CHARACTERS]})
        if self.samples is not None:
            with complete_file(self.samples / f"{rank:05d}.json") as path:
                path.write_text(json.dumps(dropped, indent=1, ensure_ascii=False), encoding="utf-8")


class KeepLanguage(DocumentFilter):
    """Drop documents that are not in a language.

    Reasons: `other_language`; `unsure`, where the language is the most probable one but less than `min_score`;
    `no_letters`.

    Args:
        language: code as `identify_language` gives it.
        min_score: probability the language must have.

    Raises:
        ValueError: a language that the model does not know.
    """

    name = "keep the language"

    def __init__(self, language: str = "en", min_score: float = 0.3, samples: Path | None = None) -> None:
        super().__init__(samples)
        if language not in known_languages():
            raise ValueError(
                f"`language` must be a code that lid.176 knows ({', '.join(sorted(known_languages()))}), "
                f"but is {language!r}"
            )
        self.language, self.min_score = language, min_score

    def judge(self) -> Callable[[str], str | None]:
        """See the class."""
        return self._reason

    def _reason(self, text: str) -> str | None:
        found, score = identify_language(text)
        if found == self.language:
            return "unsure" if score < self.min_score else None
        return "no_letters" if found == UNKNOWN else "other_language"


class DropShort(DocumentFilter):
    """Drop documents of fewer than `min_tokens` tokens, as `short`.

    Args:
        min_tokens: a document with as many stays.
        tokenizer_file: a `tokenizers` JSON file. None, where the tokenizer is yet to be trained on what is kept, counts
            words and punctuation marks (`\\w+|[^\\w\\s]`), of which there are fewer than tokens of a small vocabulary.
    """

    name = "drop short"

    def __init__(self, min_tokens: int, tokenizer_file: Path | None, samples: Path | None = None) -> None:
        super().__init__(samples)
        self.min_tokens, self.tokenizer_file = min_tokens, tokenizer_file

    def judge(self) -> Callable[[str], str | None]:
        """See the class."""
        is_long = token_test(self.min_tokens, self.tokenizer_file)
        return lambda text: None if is_long(text) else "short"


def token_test(min_tokens: int, tokenizer_file: Path | None) -> Callable[[str], bool]:
    """What tells whether a text has at least `min_tokens` tokens, without tokenizing those that certainly have.

    Upstream skips tokenization from 8 characters a token on, which is a guess; here a text is long enough when so many
    of its words begin with an ASCII letter or digit. Byte-level BPE and WordPiece make at least one token of each such
    word; they may drop or join others (lone accents, control characters). Any other tokenizer tokenizes everything.

    Args:
        tokenizer_file: see DropShort.
    """
    if tokenizer_file is None:
        return lambda text: _has(_PIECE, text, min_tokens)
    tokenizer = read_tokenizer(tokenizer_file).inner
    tokenizer.no_truncation()
    tokenizer.no_padding()
    words_are_tokens, longest = _shortcuts(json.loads(tokenizer.to_str()))

    def is_long(text: str) -> bool:
        if words_are_tokens and _has(_WORD_START, text, min_tokens):
            return True
        # A megabyte without a space would keep BPE busy for long.
        if longest is not None and len(text) >= min_tokens * longest:
            return True
        return len(tokenizer.encode(text, add_special_tokens=False)) >= min_tokens

    return is_long


def _has(pattern: re.Pattern, text: str, count: int) -> bool:
    return sum(1 for _ in islice(pattern.finditer(text), count)) == count


def _shortcuts(spec: dict) -> tuple[bool, int | None]:
    """Whether a word that begins with an ASCII letter or digit is a token or more; the bytes of the longest token.

    Args:
        spec: a tokenizer's JSON. The length is None where a token may stand for any number of bytes.
    """
    model, splitter, added = spec["model"], spec["pre_tokenizer"] or {}, spec["added_tokens"]
    if any(token["lstrip"] or token["rstrip"] or re.search(r"\s", token["content"]) for token in added):
        return False, None
    normalizer = (spec["normalizer"] or {}).get("type")
    if model["type"] == "BPE" and normalizer is None and splitter.get("type") == "ByteLevel":
        letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        if splitter.get("use_regex", True) and all(letter in model["vocab"] for letter in letters):
            lengths = [len(token) for token in model["vocab"]]  # a letter of the alphabet stands for a byte
            return True, max(lengths + [len(token["content"].encode()) for token in added])
    is_bert = (model["type"], normalizer, splitter.get("type")) == ("WordPiece", "BertNormalizer", "BertPreTokenizer")
    return is_bert, None
