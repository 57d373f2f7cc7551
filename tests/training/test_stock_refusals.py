"""What our strategy, module and data do not support is refused in one line under a stock Trainer."""

import math
import sys

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from ranks import run_in_turn, run_ranks
from stock import SIZES, fit_and_save, parts, steps, trainer, users_loader
from torch.utils.data import DataLoader

from lmscale.config import TransformerConfig
from lmscale.training.module import GPTModule
from lmscale.training.strategy import TensorParallelStrategy


class Unfreezing(BaseFinetuning):
    """Adds weights to the optimizer in an epoch."""

    def freeze_before_training(self, pl_module) -> None:
        pass

    def finetune_function(self, pl_module, epoch, optimizer) -> None:
        pass


REFUSED = {
    "value": ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "`gradient_clip_algorithm` must be norm"),
    "mixed": ({"precision": "bf16-mixed"}, "`precision` must be one of 64-true, 32-true, bf16-true, 16-true"),
    "accumulation": (
        {"accumulate_grad_batches": 2},
        "`accumulate_grad_batches` must be 1, .* but is 2",
    ),
    "schedule": (
        {"callbacks": [GradientAccumulationScheduler({0: 2})]},
        "`accumulate_grad_batches` must be 1, because .* but is {0: 2}",
    ),
    "average": ({"callbacks": [StochasticWeightAveraging(1e-2)]}, "`callbacks` must not average weights"),
    "running average": ({"callbacks": [EMAWeightAveraging()]}, "`callbacks` must not average .* EMAWeightAveraging"),
    "unfreezing": ({"callbacks": [Unfreezing()]}, "`callbacks` must not unfreeze .* Unfreezing"),
    "a negative norm": ({"gradient_clip_val": -1.0}, "`gradient_clip_val` must be at least 0, but is -1.0"),
    "no number": ({"gradient_clip_val": math.nan}, "`gradient_clip_val` must be at least 0, but is nan"),
    "writer": ({"plugins": [AsyncCheckpointIO()]}, "`plugins` must not write checkpoints, .* but there is Async"),
    "size": ({"tp_size": 2}, "`tp_size` must divide the 1 ranks, but is 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_conflicting_options_raise_one_line(tmp_path, name) -> None:
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as error:
        trainer(tmp_path, **options).fit(*parts())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [{"map_location": "cpu"}, {"strict": False}, {"weights_only": False}])
def test_options_of_lightning_that_would_do_nothing_are_refused(tmp_path, value) -> None:
    fit_and_save(tmp_path / "one.ckpt", max_steps=0)
    [name] = value
    with pytest.raises(
        ValueError, match=f"^`{name}` must be left out of `load_from_checkpoint`, .*, but is {value[name]!r}$"
    ):
        GPTModule.load_from_checkpoint(tmp_path / "one.ckpt", **value)
    GPTModule.load_from_checkpoint(tmp_path / "one.ckpt", map_location=None, strict=True, weights_only=True)


class Saving(GPTModule):
    """Saves its hyperparameters, as Lightning's guides do."""

    def __init__(self, config: TransformerConfig, size: int, *ignored: str) -> None:
        super().__init__(config)
        self.save_hyperparameters(ignore=["ignored", *ignored])


def test_a_module_that_asks_for_what_a_checkpoint_cannot_do_is_refused(tmp_path) -> None:
    module, data = parts()
    message = (
        r"^`save_hyperparameters` must save plain values \(without `config`: ignore=\['config'\]\), but config is a "
    )
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path).fit(Saving(module.config, 3), data)
    fit_and_save(tmp_path / "one.ckpt", Saving(module.config, 3, "config"), data, max_steps=1)
    assert Saving.load_from_checkpoint(tmp_path / "one.ckpt").hparams.size == 3
    module.strict_loading = False
    with pytest.raises(ValueError, match="^`strict_loading` must be True, because all weights are read, but is False$"):
        trainer(tmp_path).fit(module, data)


def test_a_call_that_is_refused_after_another_shows_its_own_error(tmp_path) -> None:
    module, data = parts()
    tried = trainer(tmp_path, fast_dev_run=True)
    tried.fit(module, data)
    with pytest.raises(ValueError, match="You cannot execute"):
        tried.test(module, data, ckpt_path="best")


def test_another_precision_is_refused_once_the_model_is_built(tmp_path) -> None:
    module, data = parts()
    trainer(tmp_path, max_steps=1).fit(module, data)
    with pytest.raises(ValueError, match="`precision` must stay fp64 for this module, but is fp32"):
        trainer(tmp_path / "other", precision="32-true").fit(module, data)


@pytest.mark.parametrize("with_own_loader", [True, False])
def test_a_strategy_without_tensor_ranks_is_refused(with_own_loader) -> None:
    module, data = parts()
    plain = L.Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match="^`strategy` must be a TensorParallelStrategy, but is SingleDeviceStrategy$"):
        plain.fit(module, users_loader() if with_own_loader else data)


def test_data_of_another_family_or_vocabulary_are_refused(tmp_path) -> None:
    gpt, bert = parts(), parts("bert")
    for module, data, family in ((gpt[0], bert[1], "bert"), (bert[0], gpt[1], "gpt")):
        with pytest.raises(ValueError, match=rf"^`family` of the data must be the model's \(\w+\), but is {family}$"):
            trainer(tmp_path).fit(module, data)
    small = GPTModule(TransformerConfig("gpt", vocab_size=500, **SIZES))
    with pytest.raises(ValueError, match="^`vocab_size` of the model must be at least the tokenizer's 600 ids, but is"):
        trainer(tmp_path).validate(small, gpt[1])


@pytest.mark.parametrize(("name", "value"), [("tokens", 600), ("tokens", -100), ("labels", 600), ("labels", -1)])
def test_ids_of_a_users_loader_that_the_model_lacks_are_refused(tmp_path, name: str, value: int) -> None:
    tokens = torch.arange(8)
    loader = DataLoader([{"tokens": tokens, "labels": torch.full((8,), -100), name: torch.full((8,), value)}])
    with pytest.raises(ValueError, match=rf"^`{name}` must be ids below .* \(600\), but one is {value}$"):
        steps(tmp_path, loader, None)


def test_an_empty_batch_of_a_users_loader_is_refused(tmp_path) -> None:
    empty = torch.empty(0, 8, dtype=torch.int64)
    loader = DataLoader([{"tokens": empty, "labels": empty}], batch_size=None)
    with pytest.raises(ValueError, match=r"^a batch of the DataLoader must have sequences, but `tokens` is \[0, 8\]$"):
        steps(tmp_path, loader, None)


def test_several_ranks_in_a_notebook_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True)
    with pytest.raises(ValueError, match="^`devices` must be 1 in a notebook or an interactive session.*but is 2$"):
        L.Trainer(strategy=TensorParallelStrategy(tp_size=2), devices=2, accelerator="cpu")
    L.Trainer(strategy=TensorParallelStrategy(), devices=1, accelerator="cpu", logger=False)


def saving_at_an_exception(rank: int, folder: str) -> list[str]:
    """The errors of two ranks that would save where one of them fails."""

    def run(callback: L.Callback) -> str:
        options = {"callbacks": [callback], "logger": False, "enable_progress_bar": False, "max_steps": 1}
        several = L.Trainer(strategy=TensorParallelStrategy(tp_size=2), devices=2, accelerator="cpu", **options)
        with pytest.raises(ValueError) as error:
            several.fit(*parts())
        return str(error.value)

    return run_in_turn(rank, run, [OnExceptionCheckpoint(folder), ModelCheckpoint(folder, save_on_exception=True)])


def test_several_ranks_do_not_save_at_an_exception(tmp_path) -> None:
    """Which is on one of them: it would wait for the others."""
    message = "`callbacks` must not save at an exception on one of 2 ranks, but there is "
    expected = [message + name for name in ("OnExceptionCheckpoint", "ModelCheckpoint")]
    assert run_ranks(saving_at_an_exception, 2, str(tmp_path)) == [expected] * 2
