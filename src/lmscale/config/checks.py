"""Checks that several dataclasses share."""


def require_positive(owner: object, *names: str) -> None:
    """Refuse the named integer fields of `owner` unless they are at least 1."""
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"`{name}` must be a whole number of at least 1, but is {value!r}")


def require_fraction(owner: object, *names: str) -> None:
    """Refuse the named fields of `owner` unless 0 <= value < 1 (a dropout or a probability)."""
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, (int, float)) or not 0.0 <= value < 1.0:
            raise ValueError(f"`{name}` must be at least 0 and below 1, but is {value!r}")
