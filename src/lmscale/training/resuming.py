"""Which checkpoint a run starts from, whether it is intact, whether it fits the run, and under which schedule."""

import dataclasses
from collections.abc import Iterable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointVersionError,
    find_given,
    list_checkpoints,
    set_aside,
)
from ..config.from_dict import flatten
from ..config.pretrain import RunConfig
from ..config.training import OptimizerConfig, ScheduleConfig
from ..data.data_digest import digest_text, expected_digest
from ..data.sampler import RunSamples
from ..results import CHECKPOINTS, METRICS, RECORD
from ..runtime.messages import warn
from ..runtime.ranks import AgreedError, Ranks
from ..runtime.world import is_restart
from .step.learning_rate import learning_rate_of_update

_LEFT_BY_A_RUN = (METRICS, RECORD)
# Keys that determine which samples a run sees, and in which order; the corpus is compared by the hash of its tokens.
_DATA_KEYS = ("seed", "global_batch_size", "data.seq_length", "data.short_seq_probability", "data.mask_probability")
_DATA_KEYS += ("data.max_ngram",)
# Keys that determine the initial weights, which only the run's start draws; the record names them for the whole run.
_INITIAL_KEYS = ("model.initializer", "model.initializer_std", "model.scale_residual_init")
_COUNTERS = ("num_updates", "num_skipped", "skipped_in_a_row", "loss_scale")
_STATE = ("data_digest", "corpus_hash")


def find_checkpoint(run: RunConfig) -> Checkpoint | None:
    """Resolve `resume.path`: None, the newest readable checkpoint of the run folder, or that of a path.

    A path may be a checkpoint or a run folder (then its newest). All ranks check the tensors' bytes later
    (`agree_on_checkpoint`).

    Raises:
        CheckpointError: the path has no complete checkpoint.
        ValueError: `auto` finds several, none of them intact. The run folder has checkpoints, but the one to start from
            is elsewhere, or before the newest of them: they would mix with the run's own; or it has none, but metrics
            of another run, which would be lost.
    """
    path, folder = run.resume.path, Path(run.run_dir) / CHECKPOINTS
    own = list_checkpoints(folder)
    if is_restart() and own:
        path = "auto"
    left = [name for name in _LEFT_BY_A_RUN if (Path(run.run_dir) / name).exists()]
    # Under `auto`, metrics may be of this run, stopped before its first checkpoint; a record is of a completed run.
    if left and not own and not is_restart() and (path != "auto" or RECORD in left):
        raise ValueError(
            f"`hydra.run.dir` must be another folder for a new run, but {run.run_dir} has the "
            f"{' and '.join(left)} of an earlier one, without checkpoints to resume from"
        )
    if path == "none":
        if own:
            raise ValueError(
                f"`resume` must be auto or a path where the run folder has checkpoints ({own[-1].name} in "
                f"{run.run_dir}), but is none; a run from the start needs another hydra.run.dir"
            )
        return None
    if path == "auto":
        problems = []
        for newest in reversed(own):
            try:
                return _open(newest)
            except CheckpointVersionError:
                raise  # as in `agree_on_checkpoint`
            except CheckpointError as error:
                problems.append(error)
        if problems:
            raise ValueError(
                f"no checkpoint in {folder} can be read; {problems[0]}; a run from the start needs another "
                "hydra.run.dir"
            )
        return None
    chosen = _open(find_given("resume", path, "none, auto, a checkpoint or a run folder").absolute())
    if own and (run.resume.weights_only or chosen.path.resolve() != own[-1].resolve()):
        raise ValueError(
            f"`resume` must be auto, or the newest checkpoint, where the run folder has checkpoints ({own[-1].name} in "
            f"{run.run_dir}), but is {path!r}; a run that branches off needs another hydra.run.dir"
        )
    return chosen


def _open(path: Path) -> Checkpoint:
    checkpoint = Checkpoint.open(path)
    checkpoint.check_files()
    return checkpoint


def check_resumable(
    run: RunConfig, corpus_hash: str, checkpoint: Checkpoint, teacher: Any = None
) -> tuple[OptimizerConfig, ScheduleConfig]:
    """Check that a run fits the checkpoint of its model that it continues; returns its optimizer and schedule.

    Args:
        corpus_hash: hash of the tokenized training text.
        teacher: the run's `CheckedTeacher`, if it has one.

    Raises:
        ValueError: the initial weights, the teacher or the data differ; every difference is listed. The checkpoint is
            past the end of the run. The rates so far or the optimizer differ under `resume.schedule=assert`.
    """
    name, metadata = checkpoint.path.name, checkpoint.metadata
    if not metadata.optimizer:
        raise ValueError(f"checkpoint {name} has only weights; `resume.weights_only`=true starts a run from them")
    lacking = [key for key in _COUNTERS if key not in metadata.optimizer] + [
        k for k in _STATE if k not in metadata.state
    ]
    if lacking:
        raise ValueError(f"checkpoint {name} cannot be resumed: its metadata lacks {', '.join(lacking)}")
    last_step, key = min(
        (run.trainer.max_steps, "max_steps"),
        (run.trainer.stop_after_steps or run.trainer.max_steps, "stop_after_steps"),
    )
    if metadata.step > last_step and not (Path(run.run_dir) / RECORD).is_file():  # else the run has ended
        raise ValueError(
            f"`trainer.{key}` must be at least the {metadata.step} steps that checkpoint {name} has done, but is "
            f"{last_step}"
        )
    then = {"model.initializer": "generator"} | flatten(metadata.run)  # from before there was a choice: without the key
    differences = _differences(_INITIAL_KEYS, run, then)
    if differences:
        raise ValueError(
            f"checkpoint {name} is of a run with other initial weights: {'; '.join(differences)} (a new run draws them)"
        )
    here, there = {} if teacher is None else teacher.identity, metadata.state.get("teacher") or {}
    if here != there:
        own, other = (dict(sorted(a.items() - b.items())) or "none" for a, b in ((here, there), (there, here)))
        raise ValueError(
            f"checkpoint {name} is of a run with another teacher: {own} here and {other} there "
            "(`resume.weights_only`=true starts a new run from the weights)"
        )
    differences = _differences(_DATA_KEYS, run, then)
    if corpus_hash != metadata.state["corpus_hash"]:
        differences.append("the corpus has other tokens")
    if differences:
        raise ValueError(
            f"checkpoint {name} is of a run over other samples: {'; '.join(differences)} (a step is also a place in "
            "the data; `resume.weights_only`=true starts a new run from the weights)"
        )
    return _choose_schedule(run, then, name, metadata.optimizer["num_updates"])


def _differences(keys: Iterable[str], run: RunConfig, then: dict[str, Any]) -> list[str]:
    now = {key: attrgetter(key)(run) for key in keys}
    return [f"{key} is {here!r} here and {then.get(key)!r} there" for key, here in now.items() if here != then.get(key)]


def _choose_schedule(
    run: RunConfig, then: dict[str, Any], name: str, num_updates: int
) -> tuple[OptimizerConfig, ScheduleConfig]:
    """The optimizer and the schedule that `resume.schedule` chooses; `then` are the checkpoint's keys."""
    names = [each.name for each in dataclasses.fields(ScheduleConfig)]
    constants = [f"optimizer.{each.name}" for each in dataclasses.fields(OptimizerConfig)]
    constants = [key for key in constants if key in then and key not in ("optimizer.lr", "optimizer.moments")]
    others = _differences(constants, run, then)
    differences = others + [
        f"{each} (by default trainer.max_steps)" if each.startswith("schedule.decay_steps") else each
        for each in _differences([*(f"schedule.{each}" for each in names), "optimizer.lr"], run, then)
    ]
    if not differences or run.resume.schedule == "override":
        return run.optimizer, run.schedule
    schedule, lr = ScheduleConfig(**{each: then.get(f"schedule.{each}") for each in names}), then.get("optimizer.lr")
    if run.resume.schedule == "keep":
        kept = {key.removeprefix("optimizer."): then[key] for key in constants}
        return dataclasses.replace(run.optimizer, lr=lr, **kept), schedule
    # A run may branch off while the rates are the same: its decay comes later, or it is longer at a constant rate.
    choices = (run.schedule, run.optimizer.lr), (schedule, lr)
    updates = range(1, num_updates + 1)
    first = next((k for k in updates if len({learning_rate_of_update(k, *choice) for choice in choices}) > 1), None)
    if others or first is not None:

        def rates(schedule: ScheduleConfig, lr: float) -> str:
            ends = (learning_rate_of_update(k, schedule, lr) for k in (num_updates + 1, run.trainer.max_steps))
            return "{:.3g} next and {:.3g} at the end".format(*ends)

        since = "" if first is None else f"; the rates differ from update {first} on, and it has done {num_updates}"
        raise ValueError(
            f"`resume.schedule` must be keep or override where the rates so far or the optimizer are not those of "
            f"{name} ({'; '.join(differences)}{since}), but is assert; keep goes on with the checkpoint's (rates of "
            f"{rates(schedule, lr)}), override with those given here ({rates(run.schedule, run.optimizer.lr)})"
        )
    return run.optimizer, run.schedule


def agree_on_checkpoint(run: RunConfig, run_dir: Path, ranks: Ranks) -> Checkpoint | None:
    """Choose the checkpoint to load, on all ranks, and compare every byte of it with its checksums.

    The run folder is locked. The ranks divide the files among them. Under `resume=auto`, and when a job with
    `max_restarts` restarts, a damaged checkpoint of the run is set aside with a warning if one before it is intact.

    Raises:
        AgreedError: it is damaged, none of several is intact, or as `find_checkpoint`.

    Communicates:
        a few small objects over the world, between the hosts.
    """
    found = ranks.agree(partial(find_checkpoint, run), first_rank_only=True)
    own = list_checkpoints(run_dir / CHECKPOINTS)[::-1]
    falls_back = run.resume.path == "auto" or (is_restart() and bool(own))
    candidates = own if falls_back else [found.path] if found else []
    falls_back, candidates = ranks.broadcast((falls_back, candidates))
    damaged: list[tuple[Path, AgreedError]] = []

    def open_intact(path: Path) -> Checkpoint:
        checkpoint = found if found is not None and found.path == path else Checkpoint.open(path)
        checkpoint.check_intact(ranks.rank, ranks.size)
        return checkpoint

    for path in candidates:
        try:
            checkpoint = ranks.agree(partial(open_intact, path))
        except AgreedError as error:
            # Of another version it is not damaged: falling back to an older one would hide that.
            if not falls_back or isinstance(error.__cause__, CheckpointVersionError):
                raise
            damaged.append((path, error))
            continue
        if ranks.is_first:
            for worse, reason in damaged:
                warn(f"{reason}; set aside as {set_aside(worse).name}, falling back to {path.name}")
        return checkpoint
    if damaged:  # all keep their names: without any, the next start would begin the run anew
        number, folder = len(damaged), run_dir / CHECKPOINTS
        raise AgreedError(f"none of the {number} checkpoints in {folder} is good; the newest: {damaged[0][1]}")
    return None


def check_data_digest(checkpoint: Checkpoint, samples: RunSamples, ranks: Ranks) -> None:
    """Check on all ranks that the samples a checkpoint has consumed are those that this run would have consumed.

    Raises:
        AgreedError: they differ, although every setting agrees.

    Communicates:
        one all-reduce of a number over the world, between the hosts.
    """
    metadata = checkpoint.metadata
    digest = expected_digest(samples.sampler(), metadata.step, ranks.rank, ranks.size)
    if ranks.size > 1:
        dist.all_reduce(digest, group=ranks.group)
    expected, found = digest_text(int(digest)), metadata.state["data_digest"]
    if found != expected:
        raise AgreedError(
            f"checkpoint {checkpoint.path.name}: the data digest must be {expected} after step {metadata.step}, "
            f"but is {found}: that run saw other samples, or in another order, than this run would have"
        )
