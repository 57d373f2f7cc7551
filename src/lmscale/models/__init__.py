"""BERT and GPT from one tensor-parallel transformer layer.

Names are imported on first use, so that `config` and `planner` can read the families without torch.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "BERT": "bert.model",
    "GPT": "gpt.model",
    "build_model": "build",
    "scored_positions": "bert.model",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
