"""Build dataclasses from nested plain values; errors name the dotted key."""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from .checks import did_you_mean

_IN_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
_IN_WORDS |= {list: "a list", dict: "a group of keys"}


def build(cls: type, values: dict, prefix: str):
    """Build the dataclass `cls` from a plain dict, refusing unknown and missing keys and wrong types.

    Raises:
        ValueError: names the key with its `prefix`, what was expected, and the value.
    """
    hints = typing.get_type_hints(cls)
    fields = {key_of(f): f for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        meant = did_you_mean(prefix + unknown[0], [prefix + name for name in fields])
        raise ValueError(f"`{prefix}{unknown[0]}` is not a known key; known here: {', '.join(fields)}{meant}")
    arguments = {}
    for name, spec in fields.items():
        if name not in values:
            if spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
                raise ValueError(f"`{prefix}{name}` must be given")
            continue
        hint, value = hints[spec.name], values[name]
        if isinstance(value, dict) and type(None) in typing.get_args(hint):  # a group that may be null
            hint = next((each for each in typing.get_args(hint) if dataclasses.is_dataclass(each)), hint)
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise ValueError(f"`{prefix}{name}` must be a group of keys, but is {value!r}")
            arguments[spec.name] = build(hint, value, f"{prefix}{name}.")
        elif typing.get_origin(hint) is dict and dataclasses.is_dataclass(typing.get_args(hint)[1]):
            arguments[spec.name] = _build_each(typing.get_args(hint)[1], value, prefix + name)
        else:
            arguments[spec.name] = _convert(hint, value, prefix + name)
    with keys_of(cls, prefix):
        return cls(**arguments)


def _build_each(cls: type, values: object, name: str) -> dict:
    """One dataclass per name that the user gives: `sources.wikipedia`, `sources.books`."""
    if not isinstance(values, dict) or not all(isinstance(value, dict) for value in values.values()):
        raise ValueError(f"`{name}` must be names with a group of keys each, but is {values!r}")
    return {key: build(cls, value, f"{name}.{key}.") for key, value in values.items()}


@contextmanager
def keys_of(cls: type, prefix: str) -> Iterator[None]:
    """A ValueError raised inside names fields of `cls` as the user types them: `max_steps` as `trainer.max_steps`."""
    names = {key_of(f) for f in dataclasses.fields(cls)}
    try:
        yield
    except ValueError as error:
        text = re.sub(r"`(\w+)`", lambda name: f"`{prefix}{name[1]}`" if name[1] in names else name[0], str(error))
        raise ValueError(text) from None


def to_plain(value: object) -> object:
    """Nested plain values from which `build` builds an equal dataclass."""
    if dataclasses.is_dataclass(value):
        return {key_of(f): to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    return list(value) if isinstance(value, (list, tuple)) else value


def key_of(field: dataclasses.Field) -> str:
    """The key of a field; the field of a Python keyword (`async`) ends with an underscore."""
    return field.name.rstrip("_")


def _convert(hint: object, value: object, name: str) -> object:
    """`value` as one of the types of `hint`; whole numbers pass as floats, YAML's `1e-4` string too."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        plain = typing.get_origin(kind) or kind
        if issubclass(plain, Enum):
            return value  # its class knows the choices
        if plain is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return _finite(value, name)
        if plain is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if plain not in (int, float) and isinstance(value, plain):
            return value
    if float in kinds and isinstance(value, str):  # YAML 1.1 reads 1e-4 (no dot) as a string
        try:
            number = float(value)
        except ValueError:
            pass
        else:
            return _finite(number, name)
    if int in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    words = _IN_WORDS | ({str: "auto"} if {bool, int} & set(kinds) else {})  # the only text in place of these
    expected = " or ".join(words.get(k, str(k)) for k in kinds)
    # Hydra reads 2024, 1E5 and true as numbers and a switch, as which they lose how they were written.
    is_lost = words.get(kinds[0]) == "text" and isinstance(value, int | float)
    quotes = f"""; quotes make it text: '{name}="..."'""" if is_lost else ""
    raise ValueError(f"`{name}` must be {expected}, but is {value!r}{quotes}")


def _finite(value: float, name: str) -> float:
    """`value`, unless it is nan or infinite: no key accepts these, and JSON cannot hold them."""
    if not math.isfinite(value):
        raise ValueError(f"`{name}` must be a finite number, but is {value}")
    return float(value)
