"""Invertible removal of WikiText's tokenization artifacts, for a fair evaluation of subword models.

WikiText's files are tokenized into words (`1 @,@ 000 people , he said .`). A subword model trained on raw text should
read `1,000 people, he said.`, and its loss on that text is divided by the original number of words (section 5.2 and
appendix E; Radford et al. 2019, section 3.1). The original cannot be recovered from the text alone (`H. americanus` and
`it ended. The` had spaces in different places), so all changes are recorded and can be undone exactly.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """Replacement of every match of a pattern.

    Args:
        groups: numbers of the groups to replace; 0 is the whole match.
    """

    pattern: re.Pattern
    replacement: str
    groups: tuple[int, ...] = (0,)

    def apply(self, text: str) -> tuple[str, list[tuple[int, str]]]:
        """Return the changed text, and for every change its position there and the old text."""
        pieces, changes, read, written = [], [], 0, 0
        for match in self.pattern.finditer(text):
            for group in self.groups:
                start, stop = match.span(group)
                if text[start:stop] == self.replacement:
                    continue
                pieces += [text[read:start], self.replacement]
                written += start - read
                changes.append((written, text[start:stop]))
                written += len(self.replacement)
                read = stop
        return "".join([*pieces, text[read:]]), changes

    def undo(self, text: str, changes: list[tuple[int, str]]) -> str:
        """Invert `apply`."""
        pieces, read = [], 0
        for place, old in changes:
            pieces += [text[read:place], old]
            read = place + len(self.replacement)
        return "".join([*pieces, text[read:]])


def _literal(old: str, new: str) -> Rule:
    return Rule(re.compile(re.escape(old)), new)


def _paired(opening: str, closing: str) -> Rule:
    """Remove spaces just inside a pair of brackets or quotes, which may span lines."""
    first, last = re.escape(opening), re.escape(closing)
    return Rule(re.compile(rf"{first}(\s*)[^{last}]*?(\s*){last}"), "", (1, 2))


# Applied in this order, each to the result of the previous one. The number of subwords, and hence T of the paper's
# perplexity, depends on every rule.
RULES = (
    _literal("s '", "s'"),
    *(_literal(f" @{sign}@ ", sign) for sign in "-,."),
    *(_literal(f" {sign} ", f"{sign} ") for sign in ":;.!?,"),
    *(_paired(*pair) for pair in ("()", "[]", "{}", '""', "''")),
    *(_literal(" ".join("=" * count), "=" * count) for count in (4, 3, 2)),
    _literal(" ° ", "°"),
    _literal(" \n", "\n"),
    _literal("\n ", "\n"),
    _literal(" N ", " 1 "),
    _literal(" 's", "'s"),
)


@dataclass(frozen=True)
class Detokenized:
    """A text without the artifacts.

    Args:
        changes: per rule, the position and the old text of each change.
    """

    text: str
    changes: tuple[list[tuple[int, str]], ...]

    def restore(self) -> str:
        """Restore the original text exactly."""
        text = self.text
        for rule, changes in zip(reversed(RULES), reversed(self.changes), strict=True):
            text = rule.undo(text, changes)
        return text


def detokenize(text: str) -> Detokenized:
    """Approximate the raw text of WikiText.

    Source: identical to NVIDIA/Megatron-LM v1.0, `tasks/zeroshot_gpt2/detokenizer.py`, on WikiText's files, on which
        the paper's T is based. (A rule there for digits after an apostrophe never matches.)
    """
    all_changes = []
    for rule in RULES:
        text, changes = rule.apply(text)
        all_changes.append(changes)
    return Detokenized(text, tuple(all_changes))


def count_words(text: str) -> int:
    """Count T_o, the words of the raw text as in the paper: separated by single spaces; line ends are part of words."""
    return len(text.strip().split(" "))
