"""WikiText without its tokenisation artefacts, and with them again: the text a subword model is fairly judged on.

WikiText's files are cut into words (`1 @,@ 000 people , he said .`). A model of subwords that was trained on written
text should read `1,000 people, he said.`, and its probability of that text is charged to the words there were (section
5.2 and appendix E; Radford et al. 2019, section 3.1). The text alone does not tell every word (`H. americanus` and `it
ended. The` had their blanks in different places), so what was changed is kept, and gives the file back to the letter.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """A replacement wherever a pattern is found.

    Args:
        groups: numbers of the groups that are replaced; 0 is the whole match.
    """

    pattern: re.Pattern
    replacement: str
    groups: tuple[int, ...] = (0,)

    def apply(self, text: str) -> tuple[str, list[tuple[int, str]]]:
        """The changed text, and the place in it and the old text of every change."""
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
        """The text that `apply` was given."""
        pieces, read = [], 0
        for place, old in changes:
            pieces += [text[read:place], old]
            read = place + len(self.replacement)
        return "".join([*pieces, text[read:]])


def _literal(old: str, new: str) -> Rule:
    return Rule(re.compile(re.escape(old)), new)


def _paired(opening: str, closing: str) -> Rule:
    """No blanks inside a pair of brackets or quotes; the pair may stretch over lines."""
    first, last = re.escape(opening), re.escape(closing)
    return Rule(re.compile(rf"{first}(\s*)[^{last}]*?(\s*){last}"), "", (1, 2))


# In this order; what a rule has changed is seen by those behind it. The number of subwords, and so T of the paper's
# perplexity, depends on every one of them.
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
    """A text without the artefacts.

    Args:
        changes: of each rule, where it changed the text and what was there.
    """

    text: str
    changes: tuple[list[tuple[int, str]], ...]

    def restore(self) -> str:
        """The text with the artefacts, letter for letter."""
        text = self.text
        for rule, changes in zip(reversed(RULES), reversed(self.changes), strict=True):
            text = rule.undo(text, changes)
        return text


def detokenize(text: str) -> Detokenized:
    """WikiText as it was written, as far as that can be known.

    Source: the behaviour of NVIDIA/Megatron-LM v1.0, `tasks/zeroshot_gpt2/detokenizer.py`, on files of WikiText, which
        the paper's T belongs to. (A rule there for digits behind an apostrophe never matches.)
    """
    all_changes = []
    for rule in RULES:
        text, changes = rule.apply(text)
        all_changes.append(changes)
    return Detokenized(text, tuple(all_changes))


def count_words(text: str) -> int:
    """T_o, the words of the raw text as the paper counts them: what single blanks separate, a line end being part of a
    word."""
    return len(text.strip().split(" "))
