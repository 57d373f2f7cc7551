"""Tiny real runs for tests: jobs built as by the entry point, run on real ranks, read back from the run folder."""

import csv
import gc
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from ranks import run_in_turn, run_ranks
from sharding import equal_tensors

from lmscale.checkpoint import Checkpoint, list_checkpoints
from lmscale.config.pretrain import RunConfig
from lmscale.training.pretrain import pretrain
from lmscale.training.resolve import resolve
from lmscale.training.run import Run

REPOSITORY = Path(__file__).resolve().parents[2]
# Dropout masks are independent of the layout: always for hidden dropout, for attention dropout with exact attention.
DROPOUT = {"model__hidden_dropout": 0.2, "model__attention_dropout": 0.2, "model__attention": "exact"}
COOLDOWN = {"decay": "linear", "warmup_steps": 1, "cooldown_steps": 2}
LONG = {"trainer__max_steps": 6, "trainer__validate_every_steps": 2}
SEQUENCE = {"parallel__sequence_parallel": True, "data__seq_length": 32}
MUP = {"model__parametrization": "mup", "model__base_hidden_size": 6, "model__base_head_size": 3}
ONE = "1x1x1"  # the folder of the run in one process; see run_layouts


def tiny_run(architecture: str, run_dir: Path, **changes) -> RunConfig:
    """A run of three steps of a 2-layer model in fp64, without dropout; `changes` by dotted key with `__`."""
    values = {
        "name": f"{architecture}_test",
        "run_dir": str(run_dir),
        "model": {
            "family": architecture,
            "num_layers": 2,
            "hidden_size": 24,
            "num_attention_heads": 4,
            "vocab_size": None,
            "max_position_embeddings": 33,
            "vocab_multiple": 64,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "data": {"kind": "embedded", "seq_length": 33},
        "tokenizer": {"kind": "trained", "vocab_size": 600},
        "parallel": {"tp_size": 1, "dp_size": 1},
        "optimizer": {"lr": 1e-3},
        "schedule": {"decay": "linear", "warmup_steps": 1, "decay_steps": 10},
        "trainer": {
            "max_steps": 3,
            "accelerator": "cpu",
            "num_threads": 1,
            "num_validation_samples": 7,
            "max_validation_share": 1.0,  # as a tiny recipe, or a GPU would refuse the run
            "progress_bar": False,
        },
        "precision": {"dtype": "fp64"},
        "checkpoint": {},
        "resume": {},
        "logger": {"tensorboard": False},
        "micro_batch_size": 4,
        "global_batch_size": 8,
        "compile": False,
    }
    return RunConfig.from_dict(change(values, changes))


def change(values: dict, changes: dict[str, object]) -> dict:
    """Set values by dotted key with `__`."""
    for key, value in changes.items():
        *groups, name = key.split("__")
        target = values
        for group in groups:
            target = target[group]
        target[name] = value
    return values


def train_here(run: RunConfig) -> int:
    """Train in this process; returns the exit code."""
    return pretrain(resolve(run))


def run_jobs(
    runs: list[RunConfig], world_size: int, expected: int = 0, fault: Callable[[int], None] | None = None
) -> None:
    """Train every run in turn on the same `world_size` processes, started as by torchrun.

    Args:
        expected: the exit code they must end with.
        fault: called on each rank, with its number, before the first run.
    """
    resolved = []
    for run in runs:
        assert run.parallel.tp_size * run.parallel.num_stages * run.parallel.dp_size == world_size
        resolved.append(resolve(run))
    run_ranks(_train_all, world_size, resolved, expected, fault)


def at(layout: tuple[int, int, int]) -> dict[str, int]:
    """The keys of a layout, given as (tp_size, pp_size, dp_size)."""
    return dict(zip(("parallel__tp_size", "parallel__pp_size", "parallel__dp_size"), layout, strict=True))


def run_layouts(cases: Iterable[tuple[str, Path, dict, Iterable[tuple[int, int, int]]]]) -> None:
    """Train each (family, folder, changes, layouts) in one process, in `folder/1x1x1`, and at each of its layouts.

    The ranks are started once per world size.
    """
    runs: dict[int, list[RunConfig]] = {}
    for family, folder, changes, layouts in cases:
        for layout in ((1, 1, 1), *layouts):
            run = tiny_run(family, folder / "{}x{}x{}".format(*layout), **changes, **at(layout))
            runs.setdefault(math.prod(layout), []).append(run)
    for world_size, those in runs.items():
        run_jobs(those, world_size)


def _train_all(rank: int, runs: list[Run], expected: int, fault: Callable[[int], None] | None) -> None:
    if fault is not None:
        fault(rank)
    gc.freeze()  # garbage collection at the Trainer's end would take half the time of a tiny run
    assert run_in_turn(rank, pretrain, runs) == [expected] * len(runs)


def read_rows(run_dir: str | Path) -> list[dict[str, float]]:
    """metrics.csv as numbers, without empty cells."""
    with open(Path(run_dir) / "metrics.csv", encoding="utf-8", newline="") as file:
        return [{k: float(v) for k, v in row.items() if v != ""} for row in csv.DictReader(file)]


def read_record(run_dir: str | Path) -> dict:
    """The run's record."""
    return json.loads((Path(run_dir) / "record.json").read_text(encoding="utf-8"))


def read_tensors(run_dir: str | Path) -> dict[str, torch.Tensor]:
    """Full logical tensors of the newest checkpoint: weights and moments."""
    with Checkpoint.open(list_checkpoints(Path(run_dir) / "checkpoints")[-1]).reader() as reader:
        return {key: reader.read(key) for key in reader.checkpoint.metadata.tensors}


def assert_equal_runs(one: Path, other: Path, bound: float = 1e-12, moments: float = 10.0) -> None:
    """Compare two runs in fp64: losses, norms and validations relatively, weights, and moments.

    Args:
        moments: the bound of moments in `bound`s of their largest element. Adam amplifies the rounding errors of
            near-zero gradients.
    """
    rows, others = read_rows(one), read_rows(other)
    assert [row["step"] for row in rows] == [row["step"] for row in others] != []
    for row, twin in zip(rows, others, strict=True):
        for column in row:
            if column.partition("/")[0] in ("train", "val", "grad_norm"):
                assert abs(twin[column] - row[column]) < bound * abs(row[column]), (column, row["step"])
    records = [read_record(path)["metrics"] for path in (one, other)]
    for metric in {"val/loss", "val_start/loss"} & records[0].keys() & records[1].keys():
        values = [record[metric]["value"] for record in records]
        assert abs(values[1] - values[0]) < bound * values[0], metric
    tensors, others = read_tensors(one), read_tensors(other)
    assert tensors.keys() == others.keys()
    for key, tensor in tensors.items():
        most = bound if key.startswith("model/") else moments * bound * max(tensor.abs().max().item(), 1e-30)
        assert (others[key] - tensor).abs().max() < most, key


def assert_same_run(one: Path, other: Path) -> None:
    """Compare losses, norms and every tensor bitwise."""
    for row, twin in zip(read_rows(one), read_rows(other), strict=True):
        for column in ("step", "train/loss", "grad_norm", "lr"):
            assert row[column] == twin[column], (column, row["step"])
    assert equal_tensors(read_tensors(one), read_tensors(other))
