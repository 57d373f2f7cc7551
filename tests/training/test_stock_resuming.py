"""Under a stock Trainer a module resumes from its checkpoints, and is fitted again, as Lightning documents it."""

from datetime import timedelta

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from runs import run_jobs, tiny_run
from stock import fit_and_save, logged, parts, trainer

from lmscale.checkpoint import Checkpoint, CheckpointError
from lmscale.training.module import GPTModule


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, precision) -> None:
    options = {"precision": precision, "max_steps": 5, "val_check_interval": 2, "check_val_every_n_epoch": None}
    module, data = parts(hidden_dropout=0.1)
    kept = ModelCheckpoint(tmp_path / "kept", filename="{step}", monitor="val/loss", save_top_k=-1)
    trainer(tmp_path / "whole", callbacks=[kept], **options).fit(module, data)
    first = min((tmp_path / "kept").glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    whole = {name: param.clone() for name, param in module.model.named_parameters()}
    module, data = parts(hidden_dropout=0.1)
    trainer(tmp_path / "resumed", **options).fit(module, data, ckpt_path=first)
    assert all(torch.equal(param, whole[name]) for name, param in module.model.named_parameters())
    losses = logged(tmp_path / "resumed", "train/loss")
    assert losses == logged(tmp_path / "whole", "train/loss")[-len(losses) :] and len(losses) == 3


class Freeze(L.Callback):
    """Freezes the word embedding and keeps what it was."""

    def on_fit_start(self, trainer, pl_module) -> None:
        self.weight = pl_module.model.transformer.word_embedding.weight.requires_grad_(False)
        self.before = self.weight.clone()


def test_frozen_weights_stay_also_after_a_resume(tmp_path) -> None:
    frozen, (module, data) = Freeze(), parts()
    trainer(tmp_path / "whole", callbacks=[frozen], max_steps=4).fit(module, data)
    assert torch.equal(frozen.weight, frozen.before)
    fit_and_save(tmp_path / "two.ckpt", callbacks=[frozen], max_steps=2)
    again, data = parts()
    trainer(tmp_path / "resumed", callbacks=[frozen], max_steps=4).fit(again, data, ckpt_path=tmp_path / "two.ckpt")
    for (name, param), expected in zip(again.named_parameters(), module.parameters(), strict=True):
        assert torch.equal(param, expected), name


def test_a_module_is_fitted_again_as_one_of_those_weights_is(tmp_path) -> None:
    module, data = parts(hidden_dropout=0.1)
    fit_and_save(tmp_path / "two.ckpt", module, data, max_steps=2)
    fresh, _ = parts(hidden_dropout=0.1)
    fresh.weights_from = Checkpoint.open(tmp_path / "two.ckpt")
    for name, each in (("again", module), ("fresh", fresh)):
        trainer(tmp_path / name).fit(each, parts()[1])
    assert module.completed_steps == 3
    assert logged(tmp_path / "again", "train/loss") == logged(tmp_path / "fresh", "train/loss")
    assert all(map(torch.equal, module.parameters(), fresh.parameters()))


def test_a_module_that_goes_on_from_its_own_checkpoint_equals_the_uninterrupted_run(tmp_path) -> None:
    whole, data = parts(hidden_dropout=0.1)
    trainer(tmp_path / "whole", max_steps=4).fit(whole, data)
    module, data = parts(hidden_dropout=0.1)
    for number, path in ((2, None), (4, tmp_path / "2.ckpt")):
        part = trainer(tmp_path / str(number), max_steps=number)
        part.fit(module, data, ckpt_path=path)
        part.save_checkpoint(tmp_path / f"{number}.ckpt")
    assert all(map(torch.equal, module.parameters(), whole.parameters()))


def test_a_trained_module_goes_back_to_the_checkpoint_that_it_began_from(tmp_path) -> None:
    path = tmp_path / "two.ckpt"
    fit_and_save(path, max_steps=2)
    module = GPTModule.load_from_checkpoint(str(path), micro_batch_size=4)
    for name in ("once", "again"):
        trainer(tmp_path / name, max_steps=4).fit(module, parts()[1], ckpt_path=str(path))
    assert logged(tmp_path / "once", "train/loss") == logged(tmp_path / "again", "train/loss")


def test_a_trainer_goes_on_where_it_stopped_when_its_steps_are_raised(tmp_path) -> None:
    module, data = parts()
    one = trainer(tmp_path, max_steps=2)
    one.fit(module, data)
    one.fit_loop.epoch_loop.max_steps = 4
    one.fit(module, data)
    assert one.global_step == module.completed_steps == 4 and len(logged(tmp_path, "train/loss")) == 4


def test_a_checkpoint_of_the_training_script_resumes(tmp_path) -> None:
    run_jobs([tiny_run("gpt", tmp_path / "run", checkpoint__save_every_steps=2, checkpoint__keep_last=None)], 1)
    module, data = parts()
    path = tmp_path / "run" / "checkpoints" / "step_2.ckpt"
    other = Checkpoint.open(path.with_name("step_3.ckpt"))
    module.weights_from = other  # a model that began from another goes on from this one
    trainer(tmp_path, gradient_clip_val=1.0).fit(module, data, ckpt_path=path)
    with other.reader() as reader:
        for name, param in module.model.named_parameters():
            assert torch.equal(param, reader.read(f"model/{name}")), name
    for call in (trainer(tmp_path).validate, trainer(tmp_path).test):
        assert len(call(module, data, ckpt_path=path, verbose=False)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_order": "peri"}, "norm_order is 'peri' here and 'pre' there"),
        ({"num_attention_heads": 3}, "num_attention_heads is 3 here and 4 there"),
        ({"parametrization": "mup", "base_hidden_size": 12}, "parametrization is 'mup' here and 'standard' there$"),
    ],
)
def test_a_checkpoint_of_another_model_with_the_same_tensors_is_refused(tmp_path, changes, message) -> None:
    fit_and_save(tmp_path / "one.ckpt", max_steps=1)
    module, data = parts(**changes)
    with pytest.raises(CheckpointError, match=f"^checkpoint one.ckpt is of another model: .*{message}"):
        trainer(tmp_path).fit(module, data, ckpt_path=tmp_path / "one.ckpt")


def test_a_checkpoint_within_a_step_repeats_the_step(tmp_path) -> None:
    class Fails(GPTModule):
        def loss_sums(self, batch: dict, sample_keys: torch.Tensor) -> torch.Tensor:
            assert self.completed_steps != 1 or batch["sample_numbers"][0] % 8 == 0, "second micro-batch"
            return super().loss_sums(batch, sample_keys)

    saved = ModelCheckpoint(tmp_path / "kept", save_on_exception=True)
    module, data = parts(hidden_dropout=0.1)
    module.__class__ = Fails
    with pytest.raises(AssertionError, match="second micro-batch"):
        trainer(tmp_path / "failed", callbacks=[saved]).fit(module, data)
    (path,) = (tmp_path / "kept").glob("*.ckpt")
    for name, start in (("whole", None), ("resumed", path)):
        trainer(tmp_path / name).fit(*parts(hidden_dropout=0.1), ckpt_path=start)
    assert logged(tmp_path / "resumed", "train/loss") == logged(tmp_path / "whole", "train/loss")[1:]


def test_a_run_with_another_step_size_is_refused_instead_of_running_out_of_data(tmp_path) -> None:
    module, data = parts()
    last = ModelCheckpoint(tmp_path / "kept", save_last=True)
    trainer(tmp_path, callbacks=[last], max_steps=2).fit(module, data)
    module, data = parts()
    data.global_batch_size = 4
    resumed = trainer(tmp_path / "resumed", max_steps=4)
    with pytest.raises(ValueError, match="`global_batch_size` must stay 8, as in the checkpoint, but is 4"):
        resumed.fit(module, data, ckpt_path=tmp_path / "kept" / "last.ckpt")


class Keeping(L.Callback):
    """Wants to keep what JSON does not have."""

    def state_dict(self) -> dict:
        return {"runs": [{"took": timedelta(1)}]}


def test_a_state_that_a_checkpoint_cannot_have_is_named(tmp_path) -> None:
    one = trainer(tmp_path, callbacks=[Keeping()], max_steps=1, enable_checkpointing=False)
    one.fit(*parts())
    with pytest.raises(
        ValueError, match=r"but state\['callbacks'\]\['Keeping'\]\['runs'\]\[0\]\['took'\] is a timedelta$"
    ):
        one.save_checkpoint(tmp_path / "one.ckpt")
