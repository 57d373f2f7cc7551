"""Literal values of the command line, protected from the grammar of Hydra and of OmegaConf (`${`, `???`)."""

import sys
from collections.abc import Collection
from typing import Any

_texts: dict[str, str] = {}  # by placeholder, which Hydra reads instead


def set_aside(keys: Collection[str]) -> None:
    """Replace the values of these keys in `sys.argv` by placeholders."""
    for i, arg in enumerate(sys.argv):
        key, equals, text = arg.partition("=")
        if equals and key in keys:
            placeholder = f"__literal_{i}__"
            sys.argv[i], _texts[placeholder] = f"{key}={placeholder}", text


def put_back(value: Any) -> Any:
    """`value`, of nested dicts and lists, with the placeholders replaced by their texts, in overrides too."""
    if isinstance(value, dict):
        return {key: put_back(item) for key, item in value.items()}
    if isinstance(value, list):
        return [put_back(item) for item in value]
    if not isinstance(value, str) or not _texts:
        return value
    key, equals, text = value.rpartition("=")
    return key + equals + _texts.get(text, text)
