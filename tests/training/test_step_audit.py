"""Every collective of whole training steps, counted through the pretraining entry and its Lightning Trainer.

A step is expected to have the planner's collectives and the few listed here, no others. The counts include what
Lightning sends of its own.
"""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from collective_trace import KINDS, CollectiveRecorder
from ranks import run_ranks
from runs import _train_all, tiny_run, train_here

from lmscale.planner.communication import step_collectives
from lmscale.training import pretrain as entry
from lmscale.training.resolve import resolve
from lmscale.training.run import Run

PAIRS = {  # of two ranks
    "tensor": {"tp_size": 2, "dp_size": 1},
    "data": {"tp_size": 1, "dp_size": 2},
    "sequence": {"tp_size": 2, "dp_size": 1, "sequence_parallel": True},
    "zero1": {"tp_size": 1, "dp_size": 2, "zero1": True},
    "stages": {"pp_size": 2},
    "planted": {"tp_size": 2, "dp_size": 1},
    "teacher": {"tp_size": 2},
    "teacher, sequence": {"tp_size": 2, "sequence_parallel": True},
}
GRIDS = {  # of four
    "grid": {"tp_size": 2, "dp_size": 2},
    "grid, sequence": {"tp_size": 2, "dp_size": 2, "sequence_parallel": True},
    "grid, sequence, zero1": {"tp_size": 2, "dp_size": 2, "sequence_parallel": True, "zero1": True},
    "stages, sequence": {"tp_size": 2, "pp_size": 2, "sequence_parallel": True},
    "stages, data, zero1": {"pp_size": 2, "dp_size": 2, "zero1": True},
}
NUMBER = 8  # bytes
# Besides the planner's: whether a rank wants to stop or a timed checkpoint is due, two votes; over the data group, in
# the last stage, the number of scored tokens, which a step's loss is divided by; over the stages the loss.
EVERY_STEP = {"world": ("all_reduce", 2 * NUMBER)} | dict.fromkeys(("data", "pipeline"), ("all_reduce", NUMBER))


def planned(run: Run, dp_rank: int, stage: int) -> Counter:
    """The planner's collectives of a step of a stage of a data rank, (kind, group, bytes)."""
    found = Counter()
    for c in step_collectives(run.workload, run.layout, dp_rank, stage):
        found[c.kind, c.group, c.num_bytes] += c.count
    return found


class _Phases(L.Callback):
    """Names the step, or the validation, that a collective belongs to; the last callback."""

    __module__ = "lmscale.tests"  # as a user's it would make a step wait for the weights of ZeRO-1

    def __init__(self, recorder: CollectiveRecorder) -> None:
        self.recorder = recorder

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.recorder.name_groups(pl_module.parallel)
        self.recorder.phase = "step 1"

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.recorder.phase = f"step {pl_module.completed_steps + 1}"

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.step, self.recorder.phase = self.recorder.phase, "validation"

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.recorder.phase = self.step

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.recorder.phase = "end"


class _Planted(L.Callback):
    """A broadcast as that of Lightning's SIGTERM flag."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        torch.distributed.broadcast(torch.zeros(1), src=0)


def _audit(rank: int, runs: list[Run], planted: int | None) -> list[dict[str, Counter]]:
    """Per run, the collectives (kind, group, bytes) of each phase of the fit; run number `planted` has one too many."""
    found: list[dict[str, Counter]] = []
    add_callbacks, train = entry.add_callbacks, entry.pretrain
    recorder = CollectiveRecorder()

    def add(run: Run, session: Any) -> Any:
        report = add_callbacks(run, session)
        session.trainer.callbacks += [*([_Planted()] if len(found) == planted else []), _Phases(recorder)]
        return report

    def audited(run: Run) -> int:
        recorder.collectives.clear()
        recorder.phase = "start"
        with recorder:
            code = train(run)
        phases: dict[str, Counter] = {}
        kinds = {name: kind for kind, name in KINDS.items()}
        for c in recorder.collectives:
            group = name_of_world(run) if c.group == "world" else c.group
            if c.kind == "recv_":  # its other end counts
                continue
            phases.setdefault(c.phase, Counter())[kinds.get(c.kind, c.kind), group, c.num_bytes] += 1
        found.append(phases)
        return code

    with mock.patch.object(entry, "add_callbacks", add), mock.patch("runs.pretrain", audited):
        _train_all(rank, runs, 0, None)
    return found


def audit(folder: Path, layouts: dict[str, dict], world_size: int) -> dict[str, tuple[Run, list[dict]]]:
    """By layout: the job, and for each data rank and stage the collectives of each phase, equal on all tensor ranks."""
    runs = []
    for name, layout in layouts.items():
        changes = {"max_steps": 5, "validate_every_steps": 3}
        changes = {f"trainer__{key}": value for key, value in changes.items()}
        changes |= {"data__seq_length": 32} | {f"parallel__{key}": value for key, value in layout.items()}
        if "teacher" in name:
            wider = {"model__hidden_size": 32, "model__num_layers": 3, "trainer__max_steps": 1}
            assert train_here(tiny_run("gpt", folder / f"{name} of", **wider)) == 0
            changes["teacher"] = {"path": str(folder / f"{name} of"), "temperature": 2.0}
        runs.append(resolve(tiny_run("gpt", folder / name, logger__log_every_steps=3, **changes)))
    planted = [*layouts].index("planted") if "planted" in layouts else None
    by_rank = [[_steps(phases) for phases in found] for found in run_ranks(_audit, world_size, runs, planted)]
    answers = {}
    for name, run, *ranks in zip(layouts, runs, *by_rank, strict=True):
        tp_size = run.layout.tp_size
        assert all(ranks[rank] == ranks[rank - rank % tp_size] for rank in range(world_size))
        answers[name] = run, ranks[::tp_size]
    return answers


def _steps(phases: dict[str, Counter]) -> dict[str, Counter]:
    """Without start, validation and end: data ranks may validate on different numbers of samples."""
    return {name: counts for name, counts in phases.items() if name.startswith("step")}


def name_of_world(run: Run) -> str:
    """torch gives a mesh's group of all ranks the world's own group: both have one name here."""
    several = [name for name, size in run.layout.axes.items() if size > 1]
    return several[0] if len(several) == 1 else "world"


def expected(run: Run, dp_rank: int, stage: int = 0) -> Counter:
    """The planner's collectives of a stage of a data rank and those of EVERY_STEP."""
    found = planned(run, dp_rank, stage)
    for group, (kind, num_bytes) in EVERY_STEP.items():
        if group == "data" and stage < run.layout.pp_size - 1:
            continue
        if group == "world" or run.layout.axes[group] > 1:
            found[kind, name_of_world(run) if group == "world" else group, num_bytes] += 1
    return found


def check(run: Run, ranks: list[dict[str, Counter]]) -> None:
    """On every data rank and stage a step has what is expected; a row of metrics.csv adds one over the data group."""
    for number, phases in enumerate(ranks):
        usual, has_data = expected(run, *divmod(number, run.layout.pp_size)), run.layout.dp_size > 1
        assert phases["step 2"] == phases["step 4"] == usual
        assert phases["step 3"] - usual == Counter({("all_reduce", "data", NUMBER): 1} if has_data else {})
        assert usual - phases["step 3"] == Counter()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, tuple[Run, list[dict]]]:
    """The layouts of two ranks, audited in one start of two processes."""
    return audit(tmp_path_factory.mktemp("pairs"), PAIRS, 2)


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "planted"])
def test_a_step_of_two_ranks_has_the_planned_collectives_and_the_listed_ones(pairs, name: str) -> None:
    check(*pairs[name])


def test_a_planted_broadcast_before_each_step_is_found(pairs) -> None:
    run, (phases,) = pairs["planted"]
    assert phases["step 4"] - expected(run, 0) == Counter({("broadcast", "tensor", 4): 1})
    with pytest.raises(AssertionError):
        check(run, [phases])


@pytest.mark.slow
def test_a_step_of_four_ranks_has_the_planned_collectives_and_the_listed_ones(tmp_path) -> None:
    for run, ranks in audit(tmp_path, GRIDS, 4).values():
        check(run, ranks)
