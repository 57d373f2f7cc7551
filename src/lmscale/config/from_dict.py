"""Build dataclasses from nested plain values; errors name the dotted key."""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args, get_origin

from .checks import Checked, check, did_you_mean, expand_home, hints_of, is_path, kinds_of, refuse

ADDED = ("run_dir", "overrides")  # by the entry point


def build(cls: type, values: dict, prefix: str = ""):
    """Build the dataclass `cls` from a plain dict, refusing unknown and missing keys and wrong types.

    Raises:
        ValueError: names the key with its `prefix`, what was expected, and the value.
    """
    if not isinstance(values, dict):
        refuse(prefix.rstrip("."), "a group of keys", values)
    fields = {key_of(f): f for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        meant = did_you_mean(prefix + unknown[0], [prefix + name for name in fields])
        raise ValueError(f"`{prefix}{unknown[0]}` is not a known key; known here: {', '.join(fields)}{meant}")
    arguments = {}
    for name, spec in fields.items():
        if name in values:
            arguments[spec.name] = _built(hints_of(cls)[spec.name], values[name], prefix + name)
        elif spec.default is spec.default_factory is dataclasses.MISSING:
            raise ValueError(f"`{prefix}{name}` must be given")
    with keys_of(cls, prefix):
        return cls(**arguments)


class EntryConfig(Checked):
    """The whole configuration of an entry point."""

    @classmethod
    def from_dict(cls, values: dict):
        """Build from nested plain values; of the keys that the entry point adds, those without a field are left out.

        Raises:
            ValueError: an unknown key, a missing key or an invalid value, with its dotted name.
        """
        own = {field.name for field in dataclasses.fields(cls)}
        return build(cls, {key: value for key, value in values.items() if key in own or key not in ADDED})

    def to_dict(self) -> dict:
        """Nested plain values, ready for JSON; `from_dict` gives an equal configuration back."""
        return to_plain(self)


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
    return list(value) if isinstance(value, (list, tuple)) else value


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted key."""
    flat = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def key_of(field: dataclasses.Field) -> str:
    """The key of a field; the field of a Python keyword (`async`) ends with an underscore."""
    return field.name.rstrip("_")


def _built(hint: Any, value: object, name: str) -> object:
    """`value` as one of the types of `hint`; whole numbers pass as floats, YAML's `1e-4` string too, `~` as the home
    folder of a path."""
    for kind in kinds_of(hint):
        if isinstance(value, dict) and dataclasses.is_dataclass(kind):
            return build(kind, value, f"{name}.")
        if isinstance(value, dict) and get_origin(kind) is dict:  # by names that the user gives
            of_key, of_item = get_args(kind)
            items = ((_built(of_key, key, name) if isinstance(key, str) else key, key) for key in value)
            return {built: _built(of_item, value[key], f"{name}.{key}") for built, key in items}
        if isinstance(value, str) and is_path(kind):
            value = expand_home(value, name)
    numbers = {getattr(kind, "__origin__", kind) for kind in kinds_of(hint)} & {int, float}
    if float in numbers and isinstance(value, (str, int)) and not isinstance(value, bool):
        try:
            value = float(value)
        except (ValueError, OverflowError):
            pass  # `check` refuses it
    elif int in numbers and isinstance(value, float) and value.is_integer():
        value = int(value)
    check(hint, value, name)
    return value
