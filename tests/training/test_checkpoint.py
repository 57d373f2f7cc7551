"""Checkpoints: exact resume, other layouts, atomic names, errors, and retention."""

import dataclasses
import itertools
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from ranks import torchrun_rank
from runs import COOLDOWN, LONG, assert_same_run, read_record, read_rows, read_tensors, run_jobs, tiny_run, train_here
from sharding import equal_tensors

from lmscale.checkpoint import METADATA, Checkpoint, CheckpointError, list_checkpoints
from lmscale.data.data_digest import digest_text
from lmscale.parallel import ParallelContext
from lmscale.runtime import ranks
from lmscale.runtime.exit_codes import DONE, INTERRUPTED
from lmscale.runtime.interruption import Interruption
from lmscale.training import resolve as resolve_module
from lmscale.training import resuming
from lmscale.training.callbacks import checkpointing
from lmscale.training.callbacks.sample_digest import SampleDigest
from lmscale.training.pretrain import pretrain
from lmscale.training.resolve import resolve
from lmscale.training.resuming import find_checkpoint

DROPOUT = {"model__hidden_dropout": 0.1, "model__attention_dropout": 0.1}


def train(run) -> None:
    """Train in this process."""
    assert train_here(run) == 0


@pytest.mark.parametrize(
    ("architecture", "dtype", "moments"), [("gpt", "fp32", "fp32"), ("bert", "bf16", "bf16"), ("gpt", "fp16", "fp32")]
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(
    tmp_path, architecture, dtype, moments, built_elsewhere
) -> None:
    """Also where the default device is not the CPU, as on a GPU: in bf16 the checkpoint has other types than the model,
    and row-parallel weights are cut along dimension 1."""
    settings = DROPOUT | LONG | {"precision__dtype": dtype, "precision__initial_loss_scale": 2.0**20}
    settings["optimizer__moments"] = moments
    train(tiny_run(architecture, tmp_path / "whole", **settings))
    for stop in (1, 4, None):
        train(tiny_run(architecture, tmp_path / "parts", trainer__stop_after_steps=stop, resume="auto", **settings))
    whole, parts = (read_rows(tmp_path / name) for name in ("whole", "parts"))
    assert [row["step"] for row in parts] == [1, 2, 3, 4, 5, 6]
    for row, other in zip(whole, parts, strict=True):
        for column in ("train/loss", "grad_norm", "lr", "loss_scale", "num_skipped"):
            assert repr(row[column]) == repr(other[column]), (column, row["step"])  # also nan, of a skipped step
        if row["step"] % 2 == 0:
            assert row["val/loss"] == other["val/loss"]
    tensors = read_tensors(tmp_path / "whole")
    assert equal_tensors(tensors, read_tensors(tmp_path / "parts"))
    types = {key.partition("/")[0]: tensor.dtype for key, tensor in tensors.items()}
    half = torch.bfloat16 if moments == "bf16" else torch.float32
    assert types == {"model": torch.float32, "exp_avg": half, "exp_avg_sq": half}  # of half types the masters


@pytest.mark.parametrize("dtype", ["fp64", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_run_resumes_at_any_other_layout(tmp_path, capfd, dtype) -> None:
    """Stopped after every step and resumed at another layout, it ends as a run in one process does."""
    settings = LONG | {"model__hidden_dropout": 0.1, "model__attention_dropout": 0.1, "model__attention": "exact"}
    settings |= {"model__hidden_size": 96, "model__vocab_multiple": 96, "precision__dtype": dtype}  # for three ranks
    settings |= {"trainer__max_steps": 7, "micro_batch_size": 2, "optimizer__weight_decay": 0.1}
    train(tiny_run("gpt", tmp_path / "whole", **settings))
    layouts = [
        {"tp_size": 2},
        {"dp_size": 2, "zero1": True},
        {"tp_size": 2, "dp_size": 2, "zero1": True},
        {"pp_size": 2},
        {"tp_size": 2, "pp_size": 2},
        {"tp_size": 3, "pad_heads": True},
        {},
    ]
    for step, layout in enumerate(layouts, start=1):
        sizes = {"tp_size": 1, "dp_size": 1} | layout
        run = tiny_run(
            "gpt", tmp_path / "moved", parallel=sizes, trainer__stop_after_steps=step, resume="auto", **settings
        )
        capfd.readouterr()
        run_jobs([run], math.prod(value for key, value in sizes.items() if key.endswith("_size")))
        if layout == layouts[2]:
            pieces = Checkpoint.open(list_checkpoints(tmp_path / "moved" / "checkpoints")[-1]).metadata
            assert {len(entry.pieces) for entry in pieces.tensors.values()} == {1, 2}  # pieces of tensor ranks only
            assert len(pieces.files) == 4  # every rank wrote a file
    line = "layout: changed from the checkpoint's 1 data x 3 tensor to 1 data x 1 tensor\n"
    assert line in capfd.readouterr().out
    bound = 1e-12 if dtype == "fp64" else 2e-2
    for row, other in zip(read_rows(tmp_path / "whole"), read_rows(tmp_path / "moved"), strict=True):
        assert other["train/loss"] == pytest.approx(row["train/loss"], rel=bound)
    tensors, others = read_tensors(tmp_path / "whole"), read_tensors(tmp_path / "moved")
    for key, tensor in tensors.items():
        torch.testing.assert_close(others[key], tensor, rtol=0, atol=bound)


def note_parses(log: Path, patch: Callable = setattr) -> None:
    """Let this process write a line to `log` whenever it reads the metadata of a checkpoint."""
    original = Path.read_text

    def read_text(path: Path, *args, **options) -> str:
        if path.name == METADATA:
            with open(log, "a") as file:
                print(path.parent.name, file=file)
        return original(path, *args, **options)

    patch(Path, "read_text", read_text)


def note_parses_of_rank(rank: int, folder: Path) -> None:
    note_parses(folder / f"rank_{rank}")


def test_a_resume_parses_its_metadata_once_before_its_ranks_start_and_once_on_each(tmp_path, monkeypatch) -> None:
    """Thousands of tensors of a large model are in it, and every rank asks the file system for them."""
    note_parses(tmp_path / "command", monkeypatch.setattr)
    settings = {"parallel__tp_size": 2, "resume": "auto"}
    run_jobs([tiny_run("gpt", tmp_path / "run", trainer__stop_after_steps=1, **settings)], 2)
    assert not (tmp_path / "command").exists()
    note = partial(note_parses_of_rank, folder=tmp_path)
    run_jobs([tiny_run("gpt", tmp_path / "run", trainer__stop_after_steps=2, **settings)], 2, fault=note)
    for process in ("command", "rank_0", "rank_1"):
        assert (tmp_path / process).read_text() == "step_1.ckpt\n", process
    train(tiny_run("gpt", tmp_path / "run", resume="auto"))  # the command's process is the rank
    assert (tmp_path / "command").read_text() == "step_1.ckpt\nstep_2.ckpt\nstep_2.ckpt\n"


def test_the_newest_checkpoints_are_kept_and_no_partial_ones_remain(finished) -> None:
    assert sorted(p.name for p in (finished / "checkpoints").iterdir()) == ["step_4.ckpt", "step_6.ckpt", "tokenizer"]


def test_auto_resumes_from_the_newest_complete_checkpoint(finished, tmp_path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    shutil.copytree(run_dir / "checkpoints" / "step_6.ckpt", run_dir / "checkpoints" / ".step_8.ckpt.unfinished")
    shutil.copytree(run_dir / "checkpoints" / "step_6.ckpt", run_dir / "checkpoints" / "step_10.ckpt")
    (run_dir / "checkpoints" / "step_10.ckpt" / "metadata.json").unlink()
    assert find_checkpoint(tiny_run("gpt", run_dir, resume="auto")).path.name == "step_6.ckpt"
    assert find_checkpoint(tiny_run("gpt", tmp_path / "new", resume="auto")) is None
    with pytest.raises(
        CheckpointError, match="^`resume` must be none, .*step_10.ckpt is not a checkpoint: it has no m"
    ):
        find_checkpoint(tiny_run("gpt", tmp_path / "new", resume=str(run_dir)))
    older = run_dir / "checkpoints" / "step_4.ckpt"
    assert find_checkpoint(tiny_run("gpt", tmp_path / "new", resume=str(older))).path.name == "step_4.ckpt"


def test_a_checkpoint_without_all_its_files_is_not_resumed_from(finished, tmp_path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    newest = run_dir / "checkpoints" / "step_6.ckpt"
    next(newest.glob("*.safetensors")).unlink()
    for resume in (str(newest), {"path": str(run_dir), "weights_only": True}):
        with pytest.raises(CheckpointError, match="step_6.ckpt: rank_0_of_1.safetensors must have .* but is missing"):
            find_checkpoint(tiny_run("gpt", tmp_path / "new", resume=resume))
    assert find_checkpoint(tiny_run("gpt", run_dir, resume="auto")).path.name == "step_4.ckpt"


@pytest.mark.parametrize("dp_rank", [0, 1])
def test_one_data_rank_continues_the_digest_of_all(dp_rank) -> None:
    digest, module = SampleDigest(), SimpleNamespace(parallel=ParallelContext(dp_rank=dp_rank, dp_size=2))
    digest.on_load_checkpoint(None, module, {"lmscale": {"data_digest": digest_text(5)}})
    assert int(digest.value) == (0 if dp_rank else 5)


def test_a_restart_of_a_run_from_weights_alone_continues_its_own_checkpoint_as_any_run(
    finished, tmp_path, monkeypatch
) -> None:
    run = tiny_run("gpt", tmp_path, resume={"path": str(finished), "weights_only": True}, trainer__stop_after_steps=2)
    train_here(run)
    for module in (resuming, resolve_module):
        monkeypatch.setattr(module, "is_restart", lambda: True)
    run = dataclasses.replace(run, trainer=dataclasses.replace(run.trainer, stop_after_steps=None))
    start = resolve(run).start
    assert start.resumes and start.step == 2
    with pytest.raises(ValueError, match="is of a run over other samples: seed is 7 here"):
        resolve(dataclasses.replace(run, seed=7))


# The learning rate is too high from the second step on, so the first step is the best.
WORSE = {"trainer__validate_every_steps": 1, "optimizer__lr": 1.0, "schedule__decay": "constant", "resume": "auto"}
WORSE |= {"schedule__warmup_steps": 8, "trainer__num_validation_samples": 40}


def test_the_best_checkpoints_are_kept_also_after_a_resume(tmp_path) -> None:
    settings = WORSE | {"trainer__max_steps": 8, "checkpoint__keep_last": 1, "checkpoint__keep_best": 2}
    for stop in (5, None):
        train(tiny_run("gpt", tmp_path, trainer__stop_after_steps=stop, **settings))
    losses = {int(row["step"]): row["val/loss"] for row in read_rows(tmp_path)}
    paths = list_checkpoints(tmp_path / "checkpoints")
    kept = [Checkpoint.open(path).metadata.step for path in paths]
    best = sorted(losses, key=losses.get)[:1]
    assert best[0] < 8 and best[0] in kept and kept[-1] == 8 and len(kept) <= 3
    for path in paths:
        metadata = Checkpoint.open(path).metadata
        assert metadata.state["validation"]["val/loss"] == losses[metadata.step]


def test_a_resumed_run_saves_a_validation_only_if_it_is_better_than_those_before(tmp_path) -> None:
    settings = WORSE | {"trainer__max_steps": 5, "checkpoint__keep_last": None, "checkpoint__keep_best": 1}
    for stop in (3, None):
        train(tiny_run("gpt", tmp_path, trainer__stop_after_steps=stop, **settings))
    losses = [row["val/loss"] for row in read_rows(tmp_path)]
    best = [step for step in range(1, 6) if losses[step - 1] == min(losses[:step])]
    found = {Checkpoint.open(path).metadata.step for path in list_checkpoints(tmp_path / "checkpoints")}
    assert found == {*best, 3, 5} and 4 not in found


def test_checkpoints_are_saved_at_time_intervals(tmp_path, monkeypatch) -> None:
    """Half a minute passes between two looks at the clock: at the start, after each step and after each save."""
    clock = mock.Mock(wraps=time, monotonic=itertools.count(step=30).__next__)
    monkeypatch.setattr(checkpointing, "time", clock)
    changes = {"trainer__max_steps": 5, "checkpoint__save_every_minutes": 0.75, "checkpoint__save_last": False}
    train(tiny_run("gpt", tmp_path, checkpoint__keep_last=None, trainer__validate_every_steps=5, **changes))
    paths = list_checkpoints(tmp_path / "checkpoints")
    assert [path.name for path in paths] == ["step_2.ckpt", "step_4.ckpt"]
    states = [Checkpoint.open(path).metadata.state for path in paths]
    assert not any("validation" in state for state in states)  # the last one was before step 1


def test_an_interrupted_run_is_saved_also_where_its_last_step_would_not_be(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Interruption, "install", lambda self: setattr(self, "received", signal.SIGTERM))
    assert train_here(tiny_run("gpt", tmp_path, checkpoint__save_last=False)) == INTERRUPTED
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step_1.ckpt"]
    assert train_here(tiny_run("gpt", tmp_path / "ended", trainer__max_steps=1)) == DONE


def test_decays_that_branch_off_are_bitwise_the_runs_that_had_their_schedule_from_the_start(tmp_path) -> None:
    constant = {"decay": "constant", "warmup_steps": 1, "decay_steps": 9}
    kept = {"checkpoint__save_every_steps": 1, "checkpoint__keep_last": None}
    train(tiny_run("bert", tmp_path / "stable", schedule=constant, trainer__max_steps=4, **DROPOUT, **kept))
    for step, last in ((1, 4), (3, 5), (2, 6)):  # the last one is at the peak until step 4
        changes = DROPOUT | {"schedule": COOLDOWN | {"decay_steps": last}, "trainer__max_steps": last}
        branch, whole = tmp_path / f"branch-{last}", tmp_path / f"whole-{last}"
        train(tiny_run("bert", branch, resume=str(tmp_path / f"stable/checkpoints/step_{step}.ckpt"), **changes))
        train(tiny_run("bert", whole, **changes))
        assert [row["step"] for row in read_rows(branch)] == list(range(step + 1, last + 1))
        for row, other in zip(read_rows(branch), read_rows(whole)[step:], strict=True):
            assert (row["lr"], row["train/loss"]) == (other["lr"], other["train/loss"])
        assert equal_tensors(read_tensors(branch), read_tensors(whole))
    assert [path.name for path in list_checkpoints(tmp_path / "stable" / "checkpoints")][-1] == "step_4.ckpt"


def test_auto_scores_the_sequences_of_the_checkpoint_however_long_the_run_becomes(tmp_path) -> None:
    auto = {"trainer__num_validation_samples": "auto", "trainer__max_validation_share": 0.2}
    constant = {"schedule": {"decay": "constant", "warmup_steps": 1, "decay_steps": 9}} | auto
    first = resolve(tiny_run("gpt", tmp_path / "first", **constant))
    assert pretrain(first) == 0
    longer = tiny_run("gpt", tmp_path / "first", resume="auto", trainer__max_steps=9, **constant)
    assert resolve(longer).num_validation_samples == first.num_validation_samples
    branch = dataclasses.replace(longer, run_dir=str(tmp_path / "branch"))
    branch = dataclasses.replace(branch, resume=dataclasses.replace(longer.resume, path=str(tmp_path / "first")))
    assert resolve(branch).num_validation_samples == first.num_validation_samples
    for weights in ({}, {"resume": {"path": str(tmp_path / "first"), "weights_only": True}}):
        anew = tiny_run("gpt", tmp_path / "anew", trainer__max_steps=9, **weights, **constant)
        assert resolve(anew).num_validation_samples > 2 * first.num_validation_samples


def test_a_half_precision_run_resumes_in_fp32_from_its_exact_masters(tmp_path) -> None:
    train(tiny_run("gpt", tmp_path / "half", precision__dtype="bf16"))
    before = read_tensors(tmp_path / "half")
    resumed = {"resume": {"path": str(tmp_path / "half"), "schedule": "override"}, "trainer__max_steps": 4}
    run = tiny_run("gpt", tmp_path / "full", precision__dtype="fp32", optimizer__lr=0.0, **resumed)
    train(run)
    after = read_tensors(tmp_path / "full")
    for key, tensor in before.items():
        if key.startswith("model/"):
            assert torch.equal(after[key], tensor), key  # a learning rate of 0 changes nothing
            assert not tensor.any() or not torch.equal(tensor, tensor.bfloat16().float()) or tensor.ndim == 1


def test_restarted_ranks_go_on_from_their_own_checkpoint_where_a_run_began_from_weights(
    finished, tmp_path, monkeypatch
) -> None:
    settings = DROPOUT | {"resume": {"path": str(finished), "weights_only": True}}
    train(tiny_run("gpt", tmp_path / "whole", **settings))
    first, again = (
        resolve(tiny_run("gpt", tmp_path / "parts", trainer__stop_after_steps=stop, **settings)) for stop in (2, None)
    )
    assert pretrain(first) == 0
    (tmp_path / "parts" / "record.json").unlink()  # a job that has died leaves none
    for name, value in (torchrun_rank(0, 1) | {"TORCHELASTIC_RESTART_COUNT": "1"}).items():
        monkeypatch.setenv(name, value)
    assert pretrain(again) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_the_record_describes_the_run(finished) -> None:
    record = read_record(finished)
    assert record["kind"] == "run" and record["seed"] == 1234
    assert record["metrics"]["steps"]["value"] == 6
    length = datetime.fromisoformat(record["finished"]) - datetime.fromisoformat(record["started"])
    assert length.total_seconds() + 1 >= record["metrics"]["train_time"]["value"]
    assert record["metrics"]["val/loss"]["value"] < record["metrics"]["val_start/loss"]["value"]
    assert record["config"]["model"]["vocab_size"] == 600
    assert record["config"]["corpus"]["train"]["sha256"]


def test_a_file_that_another_host_writes_may_appear_late(tmp_path, monkeypatch) -> None:
    """As with NFS; a folder that is not shared stays empty."""
    late = tmp_path / "checkpoints" / ".note"

    def write() -> None:
        late.parent.mkdir()
        late.touch()

    timer = threading.Timer(0.5, write)
    timer.start()
    assert ranks._appears(late)
    timer.join()
    monkeypatch.setattr(ranks, "_NFS_DELAY_S", 0.3)
    assert not ranks._appears(tmp_path / "checkpoints" / ".other")
