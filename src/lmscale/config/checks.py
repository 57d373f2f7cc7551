"""Checks that several dataclasses share; `from_dict.build` puts the dotted key in place of the field's name."""

import difflib
import math
import re
from collections.abc import Iterable

ACCELERATORS = ("auto", "cpu", "gpu")
MATMUL_PRECISIONS = ("highest", "high", "medium")  # of torch.set_float32_matmul_precision
# No tab, none of the line ends of `str.splitlines`, and no lone surrogate, which is not UTF-8.
_LINE = re.compile(r"[^\t\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029\ud800-\udfff]+")


def is_line(value: object) -> bool:
    """Return whether a value is one line of text without tabs, which can be a cell of a table."""
    return isinstance(value, str) and _LINE.fullmatch(value) is not None


def require_positive(owner: object, *names: str) -> None:
    """Refuse the named integer fields of `owner` unless they are at least 1."""
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"`{name}` must be a whole number of at least 1, but is {value!r}")


def require_not_negative(owner: object, *names: str) -> None:
    """Refuse the named numbers of `owner` unless they are at least 0."""
    for name in names:
        if not getattr(owner, name) >= 0:
            raise ValueError(f"`{name}` must be at least 0, but is {getattr(owner, name)!r}")


def require_above_zero(owner: object, *names: str) -> None:
    """Refuse the named numbers of `owner` unless they are finite and above 0."""
    for name in names:
        value = getattr(owner, name)
        if not (value > 0 and math.isfinite(value)):
            finite = " and finite" if value == math.inf else ""
            raise ValueError(f"`{name}` must be above 0{finite}, but is {value!r}")


def require_fraction(owner: object, *names: str) -> None:
    """Refuse the named fields of `owner` unless 0 <= value < 1 (a dropout or a probability)."""
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, (int, float)) or not 0.0 <= value < 1.0:
            raise ValueError(f"`{name}` must be at least 0 and below 1, but is {value!r}")


def require_path(owner: object, *names: str) -> None:
    """Refuse the named paths of `owner` if they are empty: they would be the working directory."""
    for name in names:
        if not getattr(owner, name):
            raise ValueError(f"`{name}` must be a path, but is {getattr(owner, name)!r}")


def require_one_of(owner: object, name: str, choices: tuple) -> None:
    """Refuse the named field of `owner` unless it is one of the choices."""
    value = getattr(owner, name)
    if value not in choices:
        meant = did_you_mean(value, choices)
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}, but is {value!r}{meant}")


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The end of a message: a question that names the only known word that contains `word`, or else the one most like
    it; empty if there is none."""
    known, word = list(known), str(word)
    containing = [name for name in known if len(word) > 2 and word in name]
    close = containing if len(containing) == 1 else difflib.get_close_matches(word, known, n=1)
    return f"; did you mean `{close[0]}`?" if close else ""


def require_seed(owner: object) -> None:
    """Refuse a `seed` that torch's generators do not take."""
    if not 0 <= owner.seed < 2**63:
        raise ValueError(f"`seed` must be at least 0 and below 2^63, but is {owner.seed!r}")
