"""Removal of WikiText's tokenization artifacts, for a fair evaluation of subword models.

WikiText's files are tokenized into words (`1 @,@ 000 people , he said .`). A subword model trained on raw text should
read `1,000 people, he said.`, and its loss on that text is divided by the original number of words (section 5.2 and
appendix E; Radford et al. 2019, section 3.1).
"""

import re

# (pattern, replacement), applied in this order, each to the result of the previous one. The number of subwords, and
# hence T of the paper's perplexity, depends on every rule.
_RULES = [
    ("s '", "s'"),
    *((re.escape(f" @{sign}@ "), sign) for sign in "-,."),
    *((re.escape(f" {sign} "), f"{sign} ") for sign in ":;.!?,"),
    # Spaces just inside a pair of brackets or quotes, which may span lines.
    *(
        (rf"{re.escape(first)}\s*([^{re.escape(last)}]*?)\s*{re.escape(last)}", rf"{first}\1{last}")
        for first, last in ("()", "[]", "{}", '""', "''")
    ),
    *((" ".join("=" * count), "=" * count) for count in (4, 3, 2)),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
]


def detokenize(text: str) -> str:
    """Approximate the raw text of WikiText.

    Source: identical to NVIDIA/Megatron-LM v1.0, `tasks/zeroshot_gpt2/detokenizer.py`, on WikiText's files, on which
        the paper's T is based. (A rule there for digits after an apostrophe never matches.)
    """
    for pattern, replacement in _RULES:
        text = re.sub(pattern, replacement, text)
    return text


def count_words(text: str) -> int:
    """Count T_o, the words of the raw text as in the paper: separated by single spaces; line ends are part of words."""
    return len(text.strip().split(" "))
