"""What a field of a configuration may hold, said once, by its type; `Checked` refuses every other value.

    lr: AtLeastZero
    decay: Literal["cosine", "linear", "constant"]
    tp_size: Literal["auto"] | Positive = 1

Refusals have one form, "`name` must be RULE, but is VALUE"; `from_dict.build` puts the dotted key in place of the name.
"""

import dataclasses
import difflib
import os
import re
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

_IN_WORDS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text", type(None): "null"}
_IN_WORDS |= {list: "a list", dict: "a group of keys"}
_MAX_LISTED = 12  # names in a message
# No tab, none of the line ends of `str.splitlines`, and no lone surrogate, which is not UTF-8.
_LINE = re.compile(r"[^\t\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029\ud800-\udfff]+")


@dataclass(frozen=True)
class Rule:
    """A rule of a field beside its type, in `Annotated[type, rule]`."""

    words: str
    holds: Callable[[Any], bool]


class PathRule(Rule):
    """The rule of a path, whose home folder `from_dict.build` expands."""


_AT_LEAST_0 = Rule("at least 0", lambda number: number >= 0)
Positive = Annotated[int, Rule("a whole number of at least 1", lambda number: number >= 1)]
AtLeastTwo = Annotated[int, Rule("at least 2", lambda number: number >= 2)]
Count = Annotated[int, _AT_LEAST_0]
AtLeastZero = Annotated[float, _AT_LEAST_0]
AboveZero = Annotated[float, Rule("above 0", lambda number: number > 0)]
Fraction = Annotated[float, Rule("at least 0 and below 1", lambda number: 0 <= number < 1)]  # such as a dropout
Share = Annotated[float, Rule("above 0 and at most 1", lambda number: 0 < number <= 1)]
Seed = Annotated[int, Rule("at least 0 and below 2^63", lambda number: 0 <= number < 2**63)]  # of torch's generators
PathText = Annotated[str, PathRule("a path", bool)]  # an empty one would be the working directory
Steps = Annotated[
    list, Rule("a list of whole numbers of at least 1", lambda steps: all(_fits(Positive, step) for step in steps))
]
Accelerator = Literal["auto", "cpu", "gpu"]


class Checked:
    """Base of dataclasses that are checked when one is made: each field against its type, then `check_rules`."""

    def __post_init__(self) -> None:
        for name, hint in hints_of(type(self)).items():
            check(hint, getattr(self, name), name)
        self.check_rules()

    def check_rules(self) -> None:
        """Check what the types of the fields do not say, such as that two keys suit each other.

        Raises:
            ValueError: a rule is broken.
        """


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """The types of the fields of a dataclass, with their rules."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def kinds_of(hint: Any) -> tuple:
    """The alternatives of a type."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def check(hint: Any, value: object, name: str) -> None:
    """Refuse a value that fits none of the alternatives of a type."""
    kinds = kinds_of(hint)
    if any(_fits(kind, value) for kind in kinds):
        return
    broken = [rule.words for kind in kinds if _is_of(kind, value) for rule in _rules(kind) if not rule.holds(value)]
    choices = [choice for kind in kinds for choice in _choices(kind)]
    meant = did_you_mean(value, choices) if choices else ""
    # Hydra reads 2024, 1E5 and true as numbers and a switch, as which they lose how they were written.
    is_lost = _base(kinds[0]) is str and isinstance(value, int | float)
    quotes = f"""; quotes make it text: '{name}="..."'""" if is_lost else ""
    if broken:  # neither null nor a group is a remedy
        kinds = tuple(kind for kind in kinds if _base(kind) not in (type(None), dict))
    refuse(name, _join(kinds, broken), value, meant + quotes)


def require(owner: object, name: str, rule: str, holds: bool) -> None:
    """Refuse the value of a field, or of a field of a field, unless a rule holds."""
    if not holds:
        refuse(name, rule, attrgetter(name)(owner))


def refuse(name: str, rule: str, value: object, more: str = "") -> NoReturn:
    """Raise the ValueError of a value that breaks a rule."""
    shown = {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
    raise ValueError(f"`{name}` must be {rule}, but is {shown}{more}")


def list_some(names: list[str]) -> str:
    """The first names, separated by commas, and the number of the others."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def in_words(hint: Any) -> str:
    """What a type allows."""
    kinds = kinds_of(hint)
    return _join(kinds, [" and ".join(rule.words for rule in _rules(kind)) for kind in kinds if _rules(kind)])


def _join(kinds: Iterable[Any], rules: list[str]) -> str:
    """The alternatives in words, null last; the rules, if any, in place of the types that have some."""
    listed = [choice for kind in kinds for choice in _choices(kind)]
    plain = [kind for kind in kinds if not _choices(kind) and not (rules and _rules(kind)) and kind is not type(None)]
    words = [_words_of(kind) for kind in plain]
    words += [f"{'one of ' * (len(listed) > 1)}{', '.join(listed)}"] * bool(listed)
    return " or ".join([*words, *rules, *(["null"] if type(None) in kinds else [])])


def _words_of(kind: Any) -> str:
    if is_path(kind):
        return "a path"
    of_paths = get_origin(kind) is dict and is_path(get_args(kind)[0])
    return "weights by path ({A: 1, B: 2})" if of_paths else _IN_WORDS.get(_base(kind), _IN_WORDS[dict])


def _rules(kind: Any) -> tuple[Rule, ...]:
    return getattr(kind, "__metadata__", ())


def _fits(kind: Any, value: object) -> bool:
    if _choices(kind):
        return value in _choices(kind)
    return _is_of(kind, value) and all(rule.holds(value) for rule in _rules(kind))


def _is_of(kind: Any, value: object) -> bool:
    base = _base(kind)
    if isinstance(value, bool) or base not in (int, float):
        return isinstance(base, type) and isinstance(value, base) and not (isinstance(value, bool) and base is int)
    if base is int:
        return isinstance(value, int)
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max  # not nan, nor a longer whole number


def _base(kind: Any) -> Any:
    return getattr(kind, "__origin__", kind)


def _choices(kind: Any) -> tuple[str, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def expand_home(path: str, name: str) -> str:
    """A path with the home folder in place of `~` or `~user` at its start, as a shell expands a whole word.

    Raises:
        ValueError: there is no such user, whose name would become that of a folder.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        more = f"; there is no such user (~ alone needs HOME), and a name that begins with ~ is typed as ./{path}"
        refuse(name, "a path", path, more)
    return expanded


def is_path(kind: Any) -> bool:
    """Return whether an alternative of a type is that of a path."""
    return any(isinstance(rule, PathRule) for rule in _rules(kind))


def is_line(value: object) -> bool:
    """Return whether a value is one line of text without tabs, which can be a cell of a table."""
    return isinstance(value, str) and _LINE.fullmatch(value) is not None


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The end of a message: a question that names the known word that `word` most likely means; empty if none is
    like it."""
    meant = closest(word, known)
    return f"; did you mean `{meant}`?" if meant else ""


def closest(word: object, known: Iterable[str]) -> str | None:
    """The known word that `word` most likely means: the only one that contains it, one that differs by a slip, the
    longest that it begins with (`prenorm`), or one that is like it.
    """
    word, known = str(word).lower(), {name.lower(): name for name in known}
    containing = [name for name in known if len(word) > 2 and word in name]
    begun = [name for name in known if len(name) > 2 and word.startswith(name) and word[len(name) :][:1] != "."]
    close = (
        (containing if len(containing) == 1 else [])
        or difflib.get_close_matches(word, known, n=1, cutoff=0.8)
        or sorted(begun, key=len)[-1:]
        or difflib.get_close_matches(word, known, n=1)
    )
    return known[close[0]] if close else None
