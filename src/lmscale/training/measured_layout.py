"""The record of measured layouts: what it was measured for, and the layout that a run takes from it."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from ..config.layout import ParallelConfig
from ..config.plan import PlanConfig
from ..config.pretrain import RunConfig
from ..results import count_cores, cpu_model

LAYOUT = ("tp_size", "dp_size", "zero1", "batch_halves")  # what is compared; threads follow from it
_OPTIONS = ("sequence_parallel", "zero1", "batch_halves", "pad_heads", "shared_memory")  # as they were requested


def count_devices(is_gpu: bool) -> int:
    """GPUs of this machine, or the cores that this process may use."""
    if not is_gpu:
        return count_cores()
    import torch

    return torch.cuda.device_count()


def measured_for(config: PlanConfig | RunConfig, is_gpu: bool, compiles: bool) -> dict[str, Any]:
    """What the time of a step depends on besides the layout, by key; of the machine its processor and devices."""
    if is_gpu:
        import torch
    return {
        **{f"model.{key}": value for key, value in config.model.to_dict().items()},
        **{f"parallel.{name}": getattr(config.parallel, name) for name in _OPTIONS},
        "data.seq_length": config.data.seq_length,
        "micro_batch_size": config.micro_batch_size,
        "global_batch_size": config.global_batch_size,
        "precision": config.precision.dtype,
        "optimizer.moments": config.optimizer.moments,
        "trainer.matmul_precision": config.trainer.matmul_precision,
        "compile": compiles,
        "processor": cpu_model(),
        "gpu": torch.cuda.get_device_name() if is_gpu else None,
        "number of devices": count_devices(is_gpu),
    }


def digest(measured: dict[str, Any]) -> str:
    """SHA-256 of `measured_for`, which tells whether a record has been edited."""
    return hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()


def read_measured_layout(run: RunConfig, is_gpu: bool, compiles: bool) -> tuple[ParallelConfig, int | None]:
    """The fastest layout of `parallel.record` as a request, and the threads per rank that it was measured with.

    Raises:
        ValueError: the record is missing or damaged, or of another training or machine; names what differs.
    """
    path, threads = run.parallel.record, run.trainer.num_threads
    measured, best = _read(Path(path))
    here = json.loads(json.dumps(measured_for(run, is_gpu, compiles)))
    different = [
        f"{key} {measured.get(key)!r} instead of {value!r}" for key, value in here.items() if measured.get(key) != value
    ]
    if run.model.vocab_size is None and (run.tokenizer.kind, run.tokenizer.vocab_size) != ("trained", None):
        different.append("the vocabulary of tokenizer=trained")
    if threads not in (None, best["threads"]):
        different.append(f"trainer.num_threads {best['threads']} instead of {threads}")
    if different:
        raise ValueError(
            f"`parallel.record` must be of this training on this machine, but {path} was measured with "
            f"{', '.join(different)}; measure again with `python src/plan.py measure=N`"
        )
    request = dataclasses.replace(run.parallel, record=None, **{name: best[name] for name in LAYOUT})
    return request, best["threads"]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the layouts of a record were measured for, and the fastest."""
    rule = "`parallel.record` must be what `python src/plan.py measure=N` has written"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{rule}, but {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{rule}, but {path} cannot be read: {error}") from None
    try:
        measured, best = record["config"], record["layouts"][0]
        intact = digest(measured) == record["config_digest"] and {*LAYOUT, "threads"} <= set(best)
    except (KeyError, TypeError, IndexError):
        intact = False
    if not intact:
        raise ValueError(f"{rule}, but {path} is something else or was edited")
    return measured, best
