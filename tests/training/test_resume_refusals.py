"""What a resume refuses, and what may differ from the checkpoint."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from runs import COOLDOWN, LONG, tiny_run, train_here

from lmscale.checkpoint import Checkpoint, CheckpointError, CheckpointMetadata, list_checkpoints
from lmscale.config import TransformerConfig
from lmscale.data.sampler import EpochShuffle
from lmscale.training.resolve import resolve
from lmscale.training.resuming import find_checkpoint


def test_a_new_run_is_refused_in_a_folder_with_checkpoints(finished, tmp_path) -> None:
    with pytest.raises(ValueError, match="`resume` must be auto or a path where the run folder has checkpoints"):
        resolve(tiny_run("gpt", finished))
    oldest, *_, newest = list_checkpoints(finished / "checkpoints")
    assert find_checkpoint(tiny_run("gpt", finished, resume=str(newest))).path == newest
    elsewhere = tmp_path / "run" / "checkpoints"  # of another run, whose files would be replaced
    shutil.copytree(oldest, elsewhere / oldest.name)
    weights = {"path": str(finished), "weights_only": True}
    for run_dir, resume in ((finished, str(oldest)), (finished, weights), (elsewhere.parent, str(newest))):
        with pytest.raises(ValueError, match="`resume` must be auto, or the newest checkpoint, where the run folder"):
            find_checkpoint(tiny_run("gpt", run_dir, resume=resume))


def test_a_checkpoint_of_another_model_is_refused_with_every_difference(finished, tmp_path) -> None:
    changed = {"model__num_layers": 3, "model__norm_order": "post", "model__hidden_dropout": 0.3}
    run = tiny_run("gpt", tmp_path, resume=str(finished), **changed)
    with pytest.raises(ValueError, match="is of another model") as caught:
        resolve(run)
    message = str(caught.value)
    assert "num_layers is 3 here and 2 there" in message
    assert "norm_order is 'post' here and 'pre' there" in message
    assert "hidden_dropout" not in message  # may change on resume


def test_a_checkpoint_of_a_version_with_fewer_keys_is_of_the_model_with_their_defaults(finished) -> None:
    metadata = Checkpoint.open(finished / "checkpoints" / "step_6.ckpt").metadata
    defaults = {each.name: each.default for each in dataclasses.fields(TransformerConfig)}
    old = {key: value for key, value in metadata.model.items() if value != defaults.get(key, dataclasses.MISSING)}
    assert {"parametrization", "base_num_layers", "norm_order"} & set(old) == set()
    checkpoint = Checkpoint(Path("step_6.ckpt"), dataclasses.replace(metadata, model=old))
    checkpoint.check_model(TransformerConfig.from_dict(metadata.model))
    with pytest.raises(CheckpointError, match="parametrization is 'mup' here and 'standard' there"):
        mup = TransformerConfig.from_dict(metadata.model | {"parametrization": "mup"})
        checkpoint.check_model(mup)


def test_a_checkpoint_past_the_end_of_the_run_is_refused(finished, tmp_path) -> None:
    run = tiny_run("gpt", tmp_path, resume=str(finished), trainer__max_steps=5)
    with pytest.raises(ValueError, match="`trainer.max_steps` must be at least the 6 steps .* has done, but is 5$"):
        resolve(run)


def test_a_base_size_of_null_is_that_of_the_model() -> None:
    null = TransformerConfig("gpt", 2, 64, 4, 500, 32, parametrization="completep")
    metadata = CheckpointMetadata(1, {}, null.to_dict(), tensors={}, files={}, optimizer={}, run={}, state={})
    given = dataclasses.replace(null, base_hidden_size=64, base_num_layers=2, base_head_size=16)
    checkpoint = Checkpoint(Path("step_1.ckpt"), metadata)
    checkpoint.check_model(given)
    for key, there in (("base_hidden_size", 64), ("base_num_layers", 2), ("base_head_size", 16)):
        with pytest.raises(CheckpointError, match=f"of another model: {key} is 7 here and {there} there$"):
            checkpoint.check_model(dataclasses.replace(given, **{key: 7}))
    mup = dataclasses.replace(null, parametrization="mup")  # without a rule for the depth
    with pytest.raises(CheckpointError, match="of another model: num_layers is 3 here and 2 there$"):
        saved = dataclasses.replace(metadata, model=mup.to_dict())
        Checkpoint(Path("step_1.ckpt"), saved).check_model(dataclasses.replace(mup, num_layers=3))


def test_what_does_not_change_the_function_of_the_weights_may_change_on_resume(finished) -> None:
    checkpoint = Checkpoint.open(finished / "checkpoints" / "step_6.ckpt")
    metadata = checkpoint.metadata
    free = {"hidden_dropout": 0.3, "attention_dropout": 0.3, "embedding_dropout": 0.3, "recompute": "full"}
    free |= {"attention": "exact", "initializer": "counter", "initializer_std": 0.1, "scale_residual_init": False}
    assert all(metadata.model[key] != value for key, value in free.items())
    checkpoint.check_model(TransformerConfig.from_dict(metadata.model | free))


def test_what_to_type_is_named_with_what_differs(finished, tmp_path) -> None:
    longer = {"trainer__max_steps": 8, "schedule__decay_steps": 8}
    with pytest.raises(
        ValueError, match=r"schedule.decay_steps is 8 here and 10 there \(by default trainer.max_steps\)"
    ):
        resolve(tiny_run("gpt", tmp_path, resume=str(finished), **longer))
    metadata = Checkpoint.open(finished / "checkpoints" / "step_6.ckpt").metadata
    named = dataclasses.replace(metadata, run={"model": {"name": "gpt_small"}})
    other = TransformerConfig.from_dict(metadata.model | {"architecture": "bert"})
    with pytest.raises(CheckpointError, match="architecture is 'bert' here and 'gpt' .*; it is of model=gpt_small$"):
        Checkpoint(Path("step_6.ckpt"), named).check_model(other)


def test_a_run_continues_with_the_initial_weights_that_its_record_names(finished, tmp_path) -> None:
    changed = {"model__initializer": "counter", "model__scale_residual_init": False}
    with pytest.raises(ValueError, match="is of a run with other initial weights") as caught:
        resolve(tiny_run("gpt", tmp_path, resume=str(finished), **changed, **LONG))
    assert "model.initializer is 'counter' here and 'generator' there" in str(caught.value)
    assert "model.scale_residual_init is False here and True there" in str(caught.value)
    branch = {"path": str(finished), "weights_only": True}
    resolve(tiny_run("gpt", tmp_path, resume=branch, **changed, **LONG))  # a new run, on other weights


@pytest.mark.parametrize(
    "key, value, before", [("short_seq_probability", 0.5, 0.1), ("mask_probability", 0.2, 0.15), ("max_ngram", 2, 3)]
)
def test_a_run_over_other_samples_is_refused(finished, tmp_path, key: str, value: float, before: float) -> None:
    run = tiny_run("gpt", tmp_path, resume=str(finished), **{f"data__{key}": value}, **LONG)
    with pytest.raises(ValueError, match=f"over other samples: data.{key} is {value} here and {before} there"):
        resolve(run)


def test_a_data_digest_of_other_samples_is_refused(finished, tmp_path, capfd, monkeypatch) -> None:
    """All settings agree but the samples differ, as a bug in the sampler would cause."""
    original = EpochShuffle.__call__
    monkeypatch.setattr(EpochShuffle, "__call__", lambda self, places: original(self, places + self.size))
    run_dir = shutil.copytree(finished, tmp_path / "run")
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    run = tiny_run("gpt", run_dir, resume="auto", **(LONG | {"trainer__max_steps": 7}))
    run = dataclasses.replace(run, resume=dataclasses.replace(run.resume, schedule="override"))
    assert train_here(run) == 2
    assert "the data digest must be" in capfd.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"schedule": COOLDOWN | {"decay_steps": 7}, "trainer__max_steps": 7},
            "schedule.cooldown_steps is 2 here and .* from update 2 on, and it has done 6.*; keep goes on with "
            r"the checkpoint's \(rates of .* next and .*\), override with those given here \(.*\)",
        ),
        ({"optimizer__weight_decay": 0.1}, "optimizer.weight_decay is 0.1 here and 0.01 there"),
        ({"optimizer__beta2": 0.95}, "optimizer.beta2 is 0.95 here and 0.999 there"),
    ],
)
def test_a_branch_that_would_have_been_another_run_is_refused(finished, tmp_path, changes, message) -> None:
    run = tiny_run("gpt", tmp_path, resume=str(finished), **LONG | changes)
    with pytest.raises(ValueError, match=message):
        resolve(run)
    start = resolve(dataclasses.replace(run, resume=dataclasses.replace(run.resume, schedule="keep"))).start
    assert (start.optimizer, start.schedule) == (
        tiny_run("gpt", tmp_path).optimizer,
        tiny_run("gpt", tmp_path).schedule,
    )


def test_what_a_resume_keeps_against_the_given_keys_is_printed(finished, tmp_path, capfd) -> None:
    keys = {"optimizer__weight_decay": 0.1, "optimizer__lr": 0.5, "trainer__max_steps": 7}
    run = tiny_run("gpt", tmp_path, resume={"path": str(finished), "schedule": "keep"}, **keys)
    assert train_here(run) == 0
    given = "kept from the checkpoint, not as given: optimizer.lr=0.001, optimizer.weight_decay=0.01\n"
    assert given in capfd.readouterr().out
    optimizer = json.loads((tmp_path / "config.json").read_text())["optimizer"]
    assert (optimizer["lr"], optimizer["weight_decay"]) == (0.001, 0.01)
