"""Clean documents as in section 4.1: repair the text, join lines, filter by language and by length.

Each datatrove step counts the documents it changes or drops, by reason. Filters can save the first few dropped
documents per reason and task for inspection.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Collection
from itertools import islice
from pathlib import Path

import ftfy
import tokenizers
from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from ftfy.badness import is_bad
from ftfy.fixes import uncurl_quotes

from ..data.tokenizer import read_tokenizer
from .language import UNKNOWN, identify_language
from .work_folder import save_json

# ftfy's defaults, as upstream used them: also straight quotes, NFC, no ligatures, and entities up to the first `<`.
REPAIR = ftfy.TextFixerConfig(explain=False)
Judge = Callable[[str], str | None]  # a text -> the reason to drop it; None keeps it
NUM_SAMPLES = 20  # dropped documents saved per reason and task
SAMPLE_CHARACTERS = 200

_ENTITY = "&#?[0-9A-Za-z]{1,24};"
# ftfy does not change a text without any of these: characters outside plain ASCII, or a possible HTML entity.
_NOT_PLAIN = re.compile(rf"[^\t\n\f -~]|{_ENTITY}")
# What ftfy's steps after the encoding fix, apart from curly quotes: control characters, breaks, ligatures, widths.
_NEEDS_FTFY = re.compile(
    f"{_ENTITY}|[\x00-\x08\x0b\r\x0e-\x1f\x7f-\x9f\u0132\u0133\u0149\u01c4-\u01cc\u01f1-\u01f3\u2028\u2029\u206a-\u206f"
    "\u3000\ud800-\udfff\ufb00-\ufb06\ufeff\uff01-\uffff]"
)
# Megatron-LM's `general_cleaning`: a break after a word (not after punctuation) and a run of spaces become one space.
_STORY_BREAKS = re.compile(r"\n(?<=\w\n)\n* ?|  +")  # both alternatives start with a literal, which searches faster
_WORD_START = re.compile(r"(?:^|[ \t\n\r])[0-9A-Za-z]")
_PIECE = re.compile(r"\w+|[^\w\s]")


def repair_text(text: str) -> str:
    """Compute `ftfy.fix_text(text, REPAIR)` exactly, but call ftfy only on lines that it may change.

    ftfy repairs each line separately and leaves lines of plain ASCII without entities unchanged. Most other lines are
    not mojibake and only need their curly quotes straightened, which is done here directly.
    """
    parts, done = [], 0
    markup = text.find("<")
    while match := _NOT_PLAIN.search(text, done):
        start = text.rfind("\n", done, match.start()) + 1 or done
        end = text.find("\n", match.end()) + 1 or len(text)
        # ftfy unescapes entities only up to the first `<` of the text.
        config = REPAIR if markup < 0 or start <= markup else REPAIR._replace(unescape_html=False)
        parts += text[done:start], _repair_line(text[start:end], config)
        done = end
    return "".join([*parts, text[done:]]) if parts else text


def _repair_line(line: str, config: ftfy.TextFixerConfig) -> str:
    if len(line) <= config.max_decode_length and not _NEEDS_FTFY.search(line) and not is_bad(line):
        plain = uncurl_quotes(line)
        # ftfy repeats until nothing changes, so its second pass would see the straight quotes.
        if unicodedata.is_normalized("NFC", plain) and (plain == line or not is_bad(plain)):
            return plain
    return ftfy.fix_text(line, config)


def join_story_lines(text: str) -> str:
    """Replace each line break that follows a word, and each run of spaces, by one space.

    CC-Stories breaks lines inside paragraphs. A break after punctuation is kept, which preserves most paragraphs; a
    heading without punctuation is joined to the text after it.

    Source: `general_cleaning` in tools/openwebtext/cleanup_fix_dataset.py of Megatron-LM; the output is identical.
    """
    return _STORY_BREAKS.sub(" ", text)


class EditText(PipelineStep):
    """Edit every document, and drop documents that become empty (repaired ones: of control characters only).

    Counts those that changed by `label` and those dropped as `empty`.

    Args:
        name: of the step.
        edit: the function of a text.
        sources: names of the sources to edit; None: all.
    """

    type = "CLEAN"

    def __init__(
        self, name: str, edit: Callable[[str], str], label: str, sources: Collection[str] | None = None
    ) -> None:
        self.name, self.edit, self.label, self.sources = name, edit, label, sources
        super().__init__()

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yield the documents."""
        for document in data:
            if self.sources is None or document.metadata["source"] in self.sources:
                with self.track_time():
                    text = self.edit(document.text)
                    if text != document.text:
                        self.stat_update(self.label)
                        document.text = text
            if document.text.strip():
                yield document
            else:
                self.stat_update("empty")


class DropDocuments(PipelineStep):
    """Drop documents, and count them as `kept` or by the reason for dropping them.

    Args:
        name: of the step.
        make_judge: called once per task; returns the function that judges a text, such as `judge_language`.
        samples: folder for the first NUM_SAMPLES dropped documents per reason, as `<task>.json`:
            {reason: [{source, file, row, id, text}]}, with text truncated to SAMPLE_CHARACTERS. None saves none.
    """

    type = "FILTER"

    def __init__(self, name: str, make_judge: Callable[[], Judge], samples: Path | None = None) -> None:
        self.name, self.make_judge, self.samples = name, make_judge, samples
        super().__init__()

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yield the documents to keep."""
        judge, dropped = self.make_judge(), {}
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
            save_json(self.samples / f"{rank:05d}.json", dropped)


def judge_language(language: str, min_score: float) -> Judge:
    """Return a function that keeps texts in the given language.

    Reasons: `other_language`; `unsure`, where the language is the most probable one but its probability is below
    `min_score`; `no_letters`.

    Args:
        language: code as returned by `identify_language`; see `check_language`.
        min_score: minimum probability of the language.
    """

    def judge(text: str) -> str | None:
        found, score = identify_language(text)
        if found == language:
            return "unsure" if score < min_score else None
        return "no_letters" if found == UNKNOWN else "other_language"

    return judge


def judge_length(min_tokens: int, tokenizer_file: Path | None) -> Judge:
    """Return a function that keeps texts of at least `min_tokens` tokens, with the reason `short`.

    Args:
        tokenizer_file: a `tokenizers` JSON file. None (the tokenizer will be trained on the kept documents) counts
            words and punctuation marks (`\\w+|[^\\w\\s]`) instead, a lower bound for tokens of a small vocabulary.
    """
    is_long = token_test(min_tokens, tokenizer_file)
    return lambda text: None if is_long(text) else "short"


def token_test(min_tokens: int, tokenizer_file: Path | None) -> Callable[[str], bool]:
    """Return a test for texts of at least `min_tokens` tokens that avoids tokenizing texts that are certainly longer.

    Megatron-LM skips tokenization above 8 characters per token, which is a guess. Here a text is long enough if at
    least `min_tokens` of its words begin with an ASCII letter or digit: byte-level BPE and WordPiece produce at least
    one token per such word, while they may drop or merge others (lone accents, control characters). With any other
    tokenizer every text is tokenized.

    Args:
        tokenizer_file: see `judge_length`.
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
        # BPE is slow on a megabyte without spaces.
        if longest is not None and len(text) >= min_tokens * longest:
            return True
        return len(tokenizer.encode(text, add_special_tokens=False)) >= min_tokens

    return is_long


def _has(pattern: re.Pattern, text: str, count: int) -> bool:
    return sum(1 for _ in islice(pattern.finditer(text), count)) == count


def _shortcuts(spec: dict) -> tuple[bool, int | None]:
    """Return whether every word that begins with an ASCII letter or digit is at least one token, and the length of
    the longest token in bytes (None where a token may represent any number of bytes).

    Args:
        spec: a tokenizer's JSON.
    """
    model, splitter, added = spec["model"], spec["pre_tokenizer"] or {}, spec["added_tokens"]
    if any(token["lstrip"] or token["rstrip"] or re.search(r"\s", token["content"]) for token in added):
        return False, None
    normalizer = (spec["normalizer"] or {}).get("type")
    if model["type"] == "BPE" and normalizer is None and splitter.get("type") == "ByteLevel":
        letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        if splitter.get("use_regex", True) and all(letter in model["vocab"] for letter in letters):
            lengths = [len(token) for token in model["vocab"]]  # one letter of the alphabet encodes one byte
            return True, max(lengths + [len(token["content"].encode()) for token in added])
    is_bert = (model["type"], normalizer, splitter.get("type")) == ("WordPiece", "BertNormalizer", "BertPreTokenizer")
    return is_bert, None
