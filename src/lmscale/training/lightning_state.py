"""Lightning's own state (loops, callbacks) as JSON in a checkpoint's metadata, and back."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def to_json(value: Any, name: str = "state") -> Any:
    """Convert to plain JSON values; tensors, non-finite floats and keys that are not strings keep their type.

    Args:
        name: of the value, for the error.

    Raises:
        ValueError: a value of another type, such as an object of a callback.
    """
    if isinstance(value, Tensor):
        return {"__tensor__": to_json(value.tolist()), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": repr(value)}
    if isinstance(value, dict):
        items = [(key, to_json(item, f"{name}[{key!r}]")) for key, item in value.items()]
        if all(isinstance(key, str) for key in value):
            return dict(items)
        return {"__items__": [[to_json(key, name), item] for key, item in items]}
    if isinstance(value, (list, tuple)):
        return [to_json(item, f"{name}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"a checkpoint must have plain values and tensors, but {name} is a {type(value).__name__}")


def from_json(value: Any) -> Any:
    """The inverse of `to_json`."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        return torch.tensor(from_json(value["__tensor__"]), dtype=getattr(torch, value["dtype"]))
    if "__float__" in value:
        return float(value["__float__"])
    if "__items__" in value:
        return {from_json(key): from_json(item) for key, item in value["__items__"]}
    return {key: from_json(item) for key, item in value.items()}


def loops_after(loops: dict[str, Any], step: int) -> dict[str, Any]:
    """The state of Lightning's fit loop in `on_train_batch_end` of a step, in a run of one epoch.

    It is computed from the step instead of stored, so that a run's checkpoint does not depend on Lightning's version.

    Args:
        loops: of a Trainer that has not begun.
    """
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = step - 1
    optimization = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for count in ("total", "current"):
        done = dict.fromkeys(("ready", "started", "processed"), step) | {"completed": step - 1}
        loops["epoch_loop.batch_progress"][count] = done
        optimization["step"][count] = {"ready": step, "completed": step}
        optimization["zero_grad"][count] = dict.fromkeys(("ready", "started", "completed"), step)
        loops["epoch_loop.scheduler_progress"][count] = {"ready": step, "completed": step}
        loops["epoch_progress"][count] |= {"ready": 1, "started": 1}
    return loops


def count_steps(loops: dict[str, Any]) -> None:
    """Let the state of Lightning's fit loop count steps as batches: a batch of an older checkpoint is a micro-batch."""
    steps = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    for count, batches in loops["epoch_loop.batch_progress"].items():
        if count in steps:
            in_hook = batches["processed"] - batches["completed"]  # 1 when saved in `on_train_batch_end`
            batches |= dict.fromkeys(("ready", "started", "processed"), steps[count]["completed"])
            batches["completed"] = batches["processed"] - in_hook
