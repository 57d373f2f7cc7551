"""Read the paper's numbers from `paper.yaml`, the only file that states them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_FIELDS = ("id", "paper", "unit", "command", "origin")
_SHAPE = ("num_layers", "hidden_size", "num_attention_heads")


@dataclass(frozen=True)
class Entry:
    """A number of the paper.

    Args:
        id: `place/configuration/quantity`, where place is `table_1`, `figure_5`, `section_4.1`, `appendix_e`, ...
        paper: the value as printed, in `unit`; text if the paper gives text.
        command: command that would reproduce it; empty for results of others.
        origin: how the value was obtained.
        source: where our value comes from, as described in `paper.yaml`.
    """

    id: str
    paper: float | str
    unit: str
    command: str
    origin: str
    source: Mapping[str, Any]


def _read(groups: list[dict[str, Any]]) -> tuple[Entry, ...]:
    entries = []
    for group in groups:
        shared = {"command": "", "origin": "printed"} | {key: value for key, value in group.items() if key != "numbers"}
        for number in group["numbers"]:
            values = shared | number
            source = {key: value for key, value in values.items() if key not in _FIELDS}
            entries.append(Entry(**{key: values[key] for key in _FIELDS}, source=source))
    return tuple(entries)


_CONTENT = yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text(encoding="utf-8"))
ENTRIES = _read(_CONTENT["groups"])
SHORT_FORM: dict[str, str] = _CONTENT["short_form"]
PAPER = {entry.id: entry.paper for entry in ENTRIES}


def paper_shape(model: str) -> tuple[int, int, int]:
    """Layers, hidden size and heads of a model, such as `table_1/gpt_1.2b`."""
    return tuple(PAPER[f"{model}/{key}"] for key in _SHAPE)
