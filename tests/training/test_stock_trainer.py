"""A stock Lightning Trainer with our strategy, module and data works as Lightning and our library guide document it."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    RichProgressBar,
)
from ranks import make_context, run_in_turn, run_ranks
from runs import REPOSITORY, read_rows, run_jobs, tiny_run
from sharding import small_config
from stock import fit_and_save, logged, parts, run_script, steps, trainer, users_loader
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection, SumMetric

from lmscale.data.datamodule import TextDataModule
from lmscale.parallel import ParallelContext
from lmscale.training.module import GPTModule
from lmscale.training.strategy import TensorParallelStrategy


@pytest.mark.parametrize("architecture", ["gpt", "bert"])
def test_the_metrics_equal_those_of_the_training_script(tmp_path, architecture) -> None:
    run_jobs([tiny_run(architecture, tmp_path / "run")], 1)
    module, data = parts(architecture)
    trainer(tmp_path, gradient_clip_val=1.0).fit(module, data)
    for column in ("train/loss", "grad_norm"):
        expected = [row[column] for row in read_rows(tmp_path / "run")]
        assert logged(tmp_path, column) == pytest.approx(expected, rel=1e-6), column  # the logger stores fp32


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from lightning.pytorch.callbacks import ModelCheckpoint
from stock import *
if __name__ == "__main__":
    folder = Path({folder!r})
    module, data = parts()
    both = L.Trainer(
        strategy=TensorParallelStrategy(tp_size=2), devices=2, accelerator="cpu", max_steps=3, precision="64-true",
        logger=CSVLogger(folder, name="", version="logs"), log_every_n_steps=1,
        gradient_clip_val=1.0, val_check_interval=1, check_val_every_n_epoch=None, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(folder / "kept", monitor="val/loss", save_top_k=2, save_last=True)])
    both.fit(module, data)
    (losses,) = both.test(module, data, ckpt_path="last", verbose=False)
    one = both.predict(module, data)[0]
    if both.is_global_zero:
        torch.save((losses, one), folder / "found.pt")
"""


@pytest.mark.slow
def test_two_processes_give_the_same_losses_and_their_checkpoint_resumes_in_one(tmp_path) -> None:
    tests = str(REPOSITORY / "tests")
    run_script(SCRIPT.format(paths=[tests, tests + "/training"], folder=str(tmp_path)), tmp_path)
    run_jobs([tiny_run("gpt", tmp_path / "run", parallel__tp_size=2)], 2)
    expected = [row["train/loss"] for row in read_rows(tmp_path / "run")]
    assert logged(tmp_path, "train/loss") == pytest.approx(expected, rel=1e-6)
    losses, predicted = torch.load(tmp_path / "found.pt")
    module, data = parts()
    alone = trainer(tmp_path / "alone", max_steps=4)
    (again,) = alone.test(module, data, ckpt_path=tmp_path / "kept" / "last.ckpt", verbose=False)
    assert again == pytest.approx(losses, rel=1e-6)
    assert torch.equal(alone.predict(module, data)[0], predicted)
    alone.fit(module, data, ckpt_path=tmp_path / "kept" / "last.ckpt")
    assert len(logged(tmp_path / "alone", "train/loss")) == 1  # only the fourth step


def sum_and_samples(rank: int) -> tuple[float, dict[str, int]]:
    strategy = TensorParallelStrategy(tp_size=2)
    strategy.parallel = make_context(tp_size=2, dp_size=2)
    logged = strategy.reduce(torch.tensor(1.0 + strategy.parallel.dp_rank), reduce_op="sum")
    return float(logged), strategy.distributed_sampler_kwargs


def test_a_logged_sum_counts_each_model_once_and_the_tensor_ranks_of_a_model_see_the_same_samples() -> None:
    found = run_ranks(sum_and_samples, 4)
    assert found == [(3.0, {"num_replicas": 2, "rank": dp_rank}) for dp_rank in (0, 0, 1, 1)]


class Counting(GPTModule):
    """Counts the validation sequences with a metric of torchmetrics."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.count = MetricCollection({"count": SumMetric(), "copied": copy.deepcopy(SumMetric())})

    def validation_step(self, batch, batch_idx) -> None:
        super().validation_step(batch, batch_idx)
        self.count.update(float(len(batch["tokens"])))
        self.log_dict(self.count)


def counted(rank: int) -> list[dict[str, float]]:
    """What a module and a copy of it count, on two tensor ranks and on two data ranks."""

    def run(tp_size: int) -> dict[str, float]:
        plain, data = parts()
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        several = L.Trainer(strategy=TensorParallelStrategy(tp_size=tp_size), devices=2, accelerator="cpu", **options)
        [found] = several.validate(module := Counting(plain.config), data, verbose=False)
        module.count.update(1.0)
        again, gathered = copy.deepcopy(module.count).compute()["count"], module.all_gather(torch.ones(3))
        return {"again": float(again), "gathered": float(gathered.sum())} | found

    return run_in_turn(rank, run, [2, 1])


def test_metrics_and_gathered_values_count_each_sample_once() -> None:
    for of_one_model, of_two in run_ranks(counted, 2):
        assert of_one_model["count"] == of_two["count"] == of_one_model["copied"] == 7.0
        assert (of_one_model["again"], of_two["again"]) == (1.0, 2.0)
        assert (of_one_model["gathered"], of_two["gathered"]) == (3.0, 6.0)


def test_best_and_last_checkpoints_and_the_learning_rate_are_recorded(tmp_path, capsys) -> None:
    module, data = parts()
    best = ModelCheckpoint(tmp_path / "kept", monitor="val/loss", save_top_k=2, save_last=True)
    options = {"max_steps": 4, "val_check_interval": 1, "check_val_every_n_epoch": None}
    trainer(tmp_path, callbacks=[best, LearningRateMonitor(), RichProgressBar()], **options).fit(module, data)
    assert len(list((tmp_path / "kept").glob("*.ckpt"))) == 3 and Path(best.best_model_path).is_dir()
    assert best.best_model_score == min(logged(tmp_path, "val/loss"))
    assert sorted(set(logged(tmp_path, "lr/pg1")))[-2:] == pytest.approx([1e-3 * 8 / 9, 1e-3], rel=1e-6)


def test_a_run_without_an_exception_leaves_no_checkpoint_of_one(tmp_path) -> None:
    trainer(tmp_path, callbacks=[OnExceptionCheckpoint(tmp_path)]).fit(*parts())
    assert not list(tmp_path.glob("on_exception*"))


def test_a_checkpoint_after_a_validation_has_the_weights(tmp_path) -> None:
    module, data = parts()
    validated = trainer(tmp_path)
    losses = validated.validate(module, data, verbose=False)
    validated.save_checkpoint(tmp_path / "validated.ckpt")
    again = GPTModule.load_from_checkpoint(tmp_path / "validated.ckpt", seed=0)
    assert trainer(tmp_path).validate(again, data, verbose=False) == losses


class Average(L.Callback):
    """torch's running average of the weights, and the same by hand."""

    def on_fit_start(self, trainer, pl_module) -> None:
        self.model = AveragedModel(pl_module.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.expected = {}

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        self.model.update_parameters(pl_module.model)
        for name, param in pl_module.model.named_parameters():
            self.expected.setdefault(name, param.detach().clone()).lerp_(param.detach(), 0.1)


def test_a_callback_averages_the_weights_in_a_copy_of_the_model(tmp_path) -> None:
    average, (module, data) = Average(), parts()
    trainer(tmp_path, callbacks=[average]).fit(module, data)
    assert len(average.expected) == len(list(module.parameters()))
    for name, param in average.model.module.named_parameters():
        torch.testing.assert_close(param, average.expected[name], rtol=1e-12, atol=1e-14)
    tokens = torch.arange(8)[None]
    assert not torch.equal(average.model(tokens), module.eval()(tokens))
    with pytest.raises(
        ValueError, match="^`module` must not be a copy of one whose model is built: its parameters have"
    ):
        trainer(tmp_path / "copy").fit(copy.deepcopy(module), data)


def test_each_loader_has_its_losses(tmp_path) -> None:
    module, loaders = parts()[0], [users_loader(), DataLoader(users_loader().dataset[:3], batch_size=2)]
    one = trainer(tmp_path, val_check_interval=1, max_steps=1)
    one.fit(module, loaders[0], loaders)
    names = ("val/loss", "val/perplexity")
    for number, loader in enumerate(loaders):
        [alone] = trainer(tmp_path / "alone").validate(module, loader, verbose=False)
        assert alone == {name: pytest.approx(logged(tmp_path, f"{name}/dataloader_idx_{number}")[0]) for name in names}
    both = one.test(module, loaders, verbose=False)
    assert len({name for found in both for name in found}) == 4
    assert [len(found) for found in one.predict(module, loaders)] == [3, 2]


def test_early_stopping_ends_the_run(tmp_path) -> None:
    module, data = parts()
    stop = EarlyStopping("val/loss", patience=0, min_delta=10.0)
    ended = trainer(tmp_path, callbacks=[stop], max_steps=9, val_check_interval=1, check_val_every_n_epoch=None)
    ended.fit(module, data)
    assert ended.global_step == 2


def test_the_trainers_gradient_clip_value_is_used(tmp_path) -> None:
    for name, value in (("clipped", 1e-3), ("free", 0.0)):
        module, data = parts()
        trainer(tmp_path / name, gradient_clip_val=value).fit(module, data)
        assert module.optimizer.max_grad_norm == (value or None)
    assert logged(tmp_path / "clipped", "grad_norm")[0] == logged(tmp_path / "free", "grad_norm")[0] > 1e-3


class Masters(L.Callback):
    """Keeps the masters before the first step."""

    def on_train_batch_start(self, trainer, *_) -> None:
        tensors = trainer.optimizers[0].tensors()
        self.found = {name: master.clone() for name, master in tensors.items() if name.startswith("model/")}


class Halve(L.Callback):
    """Halves every second weight in a hook."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.halve)

    @torch.no_grad()
    def halve(self, trainer, module) -> None:
        for param in module.parameters():
            param.view(-1)[::2] /= 2


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start"])
def test_the_masters_take_the_weights_that_a_callback_writes(tmp_path, hook) -> None:
    """The others keep the bits that the half type lacks, as those of a checkpoint."""
    one = fit_and_save(tmp_path / "one.ckpt", precision="bf16-true", max_steps=1)
    old = {name: master.clone() for name, master in one.optimizers[0].tensors().items() if name.startswith("model/")}
    again = trainer(tmp_path / "again", precision="bf16-true", max_steps=2, callbacks=[Halve(hook), keep := Masters()])
    again.fit(*parts(), ckpt_path=tmp_path / "one.ckpt")
    for name, master in keep.found.items():
        assert torch.equal(master.view(-1)[::2], old[name].view(-1)[::2].bfloat16().float() / 2)
        assert torch.equal(master.view(-1)[1::2], old[name].view(-1)[1::2])


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-true"])
def test_the_trainers_precision_is_used(tmp_path, precision) -> None:
    module, data = parts()
    trainer(tmp_path, precision=precision).fit(module, data)
    kind = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "16-true": torch.float16}[precision]
    assert {param.dtype for param in module.model.parameters()} == {kind}
    assert logged(tmp_path, "train/loss")[0] == pytest.approx(6.4, abs=0.2)
    assert module.optimizer.masters[0].dtype == torch.float32


def test_limits_and_epochs_count_steps(tmp_path) -> None:
    module, data = parts()
    limited = trainer(tmp_path, max_steps=-1, max_epochs=2, limit_train_batches=3, limit_val_batches=1)
    limited.fit(module, data)
    assert limited.global_step == 6 and limited.current_epoch == 2
    assert len(logged(tmp_path, "val/loss")) == 2


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_a_users_loader_gives_steps_that_micro_batches_do_not_change(tmp_path, precision) -> None:
    whole = steps(tmp_path / "whole", users_loader(), None, precision=precision)
    found = steps(tmp_path / "cut", users_loader(), 3, precision=precision)
    tolerance = 1e-6 if precision == "64-true" else 1e-2  # the logger stores fp32
    assert len(found) == 3 and found == [pytest.approx(step, rel=tolerance) for step in whole]


def test_a_limited_epoch_goes_on_past_the_end_of_the_text(tmp_path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(f"{n} times {n} is {n * n}." for n in range(1000)), encoding="utf-8")
    data = TextDataModule("gpt", path=str(tmp_path / "text.txt"), seq_length=33, global_batch_size=32, vocab_size=300)
    limits = {"max_epochs": 2, "limit_train_batches": 8, "limit_val_batches": 1}
    assert len(steps(tmp_path, data, 16, **limits)) == 16 > data.steps_per_epoch == 12
    assert len(logged(tmp_path, "val/loss")) == 2  # after both epochs


def test_a_perplexity_beyond_fp32_is_finite() -> None:
    module = GPTModule(small_config("gpt"), logs=False)
    strategy = SimpleNamespace(parallel=ParallelContext())
    module._trainer = SimpleNamespace(strategy=strategy, num_val_batches=[1])
    module._validation_sums = {0: torch.tensor([[200.0], [2.0]], dtype=torch.float64)}
    assert module._reduce_validation("val") == {"val/loss": 100.0, "val/perplexity": pytest.approx(math.exp(100))}


class MaskLabels(L.Callback):
    """Removes all targets of the validation."""

    def on_validation_batch_start(self, trainer, pl_module, batch, *args) -> None:
        batch["labels"].fill_(-100)


def test_the_validation_loss_over_no_target_is_nan(tmp_path) -> None:
    """A mean over nothing is no number: 0 would be the best loss that a `ModelCheckpoint` has seen."""
    [found] = trainer(tmp_path, callbacks=[MaskLabels()]).validate(*parts(), verbose=False)
    assert math.isnan(found["val/loss"]) and math.isnan(found["val/perplexity"])
