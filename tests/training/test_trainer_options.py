"""A stock Trainer does with our module and data what it does with a plain module and a plain DataLoader."""

from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from stock import fit_and_save, logged, trainer
from torch.utils.data import DataLoader

from lmscale.config import TransformerConfig
from lmscale.config.training import OptimizerConfig
from lmscale.data.datamodule import TextDataModule
from lmscale.training.module import GPTModule

SIZES = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 16}
STEPS, NUM_VALIDATION = 17, 4  # steps of an epoch; sequences


class Plain(L.LightningModule):
    """One linear layer, with the schedule stepped by Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.layer(batch).square().mean())

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)}


def plain(folder: Path, **options) -> tuple[L.LightningModule, dict, L.Trainer]:
    """A plain module, loaders of as many batches as `ours` has, and a Trainer without our strategy."""
    rows = torch.arange(8.0 * STEPS)[:, None].expand(-1, 4) / 100
    loaders = DataLoader(rows, batch_size=8, shuffle=True), DataLoader(rows[:NUM_VALIDATION], batch_size=2)
    data = dict(zip(("train_dataloaders", "val_dataloaders"), loaders, strict=True))
    return Plain(), data, trainer(folder, strategy="auto", precision="32-true", **options)


def ours(folder: Path, **options) -> tuple[GPTModule, dict, L.Trainer]:
    """A module, text of `STEPS` steps, and a Trainer."""
    module, data = parts(folder)
    return module, data, trainer(folder, **options)


def parts(folder: Path, kind: type[GPTModule] = GPTModule, **options) -> tuple[GPTModule, dict]:
    """A module, and text of `STEPS` steps."""
    folder.mkdir(exist_ok=True)
    text = folder / "text.txt"
    text.write_text("\n\n".join(f"{n} and {n} make {2 * n}." for n in range(230)), encoding="utf-8")
    sizes = {"seq_length": 16, "global_batch_size": 8, "vocab_size": 300, "num_validation_samples": NUM_VALIDATION}
    data = TextDataModule("gpt", path=str(text), **sizes)
    config = TransformerConfig("gpt", vocab_size=data.vocab_size, **SIZES)
    return kind(config, micro_batch_size=2, **options), {"datamodule": data}


class Course(L.Callback):
    """What a training did: the steps at which it validated, the samples of its steps, the loss seen after each."""

    def __init__(self) -> None:
        self.validated, self.samples, self.losses = [], [], []
        self.batches = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if isinstance(batch, list):
            self.samples.append([number for each in batch for number in each["sample_indices"].tolist()])
        trainer.should_stop = trainer.global_step == 20
        self.losses.append((trainer.callback_metrics["train/loss"].item(), outputs["loss"].item()))

    def on_validation_batch_end(self, *_) -> None:
        self.batches += 1

    def on_validation_end(self, trainer, pl_module) -> None:
        self.validated.append((trainer.global_step, trainer.sanity_checking, self.batches))


OPTIONS = {
    "max_steps within an epoch": {"max_steps": 5},
    "a fraction of the epoch": {"max_steps": 9, "val_check_interval": 0.5},
    "a limited epoch": {"max_steps": 7, "limit_train_batches": 0.25, "val_check_interval": 0.5},
    "overfit": {"max_epochs": 3, "overfit_batches": 2},
    "overfit a fraction": {"max_epochs": 2, "overfit_batches": 0.5},
    "no limit": {"max_epochs": -1},
    "every second epoch": {"max_epochs": 3, "limit_train_batches": 2, "check_val_every_n_epoch": 2},
    "a whole epoch, and a limited validation": {"max_epochs": 1, "limit_val_batches": 0.5},
    "reloading": {"max_epochs": 2, "limit_train_batches": 2, "reload_dataloaders_every_n_epochs": 1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_gives_the_steps_and_validations_of_a_plain_module(tmp_path, name) -> None:
    found = []
    for make in (plain, ours):
        folder, course = tmp_path / make.__name__, Course()
        module, data, used = make(folder, **{"max_steps": -1, "callbacks": [course]} | OPTIONS[name])
        used.fit(module, **data)
        counts = used.global_step, used.current_epoch, used.num_training_batches
        found.append((counts, course.validated, logged(folder, "step")))
    assert found[0] == found[1]


def test_overfitting_sees_the_same_steps_in_every_epoch_and_after_a_resume(tmp_path) -> None:
    def samples(name: str, start: Path | None = None, **options) -> list[list[int]]:
        course, (module, data) = Course(), parts(tmp_path)
        kept = ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        options = {"max_steps": -1, "overfit_batches": 3} | options
        trainer(tmp_path / name, callbacks=[course, kept], **options).fit(module, **data, ckpt_path=start)
        return course.samples

    whole = samples("whole", max_epochs=3)
    assert whole == 3 * whole[:3] and len({tuple(step) for step in whole}) == 3
    assert samples("resumed", tmp_path / "whole" / "step=4.ckpt", max_epochs=3) == whole[4:]


@pytest.mark.parametrize("limit", [5, 7])
def test_a_run_that_max_steps_ended_goes_on_to_the_last_epoch(tmp_path, limit) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", filename="{step}", every_n_train_steps=5, save_top_k=-1)
    module, data = parts(tmp_path)
    trainer(tmp_path, callbacks=[kept], max_steps=limit, max_epochs=2).fit(module, **data)
    module, data = parts(tmp_path)
    resumed = trainer(tmp_path / "resumed", max_steps=-1, max_epochs=2)
    resumed.fit(module, **data, ckpt_path=tmp_path / "kept" / "step=5.ckpt")
    assert resumed.global_step == 2 * STEPS
    assert logged(tmp_path / "resumed", "step")[0] == 5


class WithHooks(GPTModule):
    """Overrides hooks as Lightning's pages show, without `super()`."""

    def setup(self, stage: str) -> None:
        pass

    def on_validation_epoch_start(self) -> None:
        pass

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        pass

    def on_train_batch_end(self, *_) -> None:
        pass

    def on_before_batch_transfer(self, batch: dict, dataloader_idx: int) -> dict:
        return batch

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure) -> None:
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize("kind", [GPTModule, WithHooks])
def test_the_loss_of_a_step_is_known_when_it_ends_whatever_hooks_are_overridden(tmp_path, kind) -> None:
    course, (module, data) = Course(), parts(tmp_path, kind, optimizer=OptimizerConfig(1e-2))
    kept = ModelCheckpoint(tmp_path, "{step}", monitor="train/loss", every_n_train_steps=1, save_top_k=-1)
    trainer(tmp_path, callbacks=[course, kept, LearningRateMonitor()]).fit(module, **data)
    seen, returned = zip(*course.losses, strict=True)
    assert seen == pytest.approx(returned) and len(set(seen)) == 3 and module.completed_steps == 3
    assert logged(tmp_path, "train/loss") == pytest.approx(seen) and len(logged(tmp_path, "grad_norm")) == 3
    scores = {Path(path).stem: float(score) for path, score in kept.best_k_models.items()}
    assert scores == {f"step={number}": pytest.approx(loss) for number, loss in enumerate(seen, 1)}


def test_a_resumed_module_knows_its_step_whatever_hooks_are_overridden(tmp_path) -> None:
    module, data = parts(tmp_path, WithHooks)
    fit_and_save(tmp_path / "two.ckpt", module, *data.values(), max_steps=2)
    module, data = parts(tmp_path, WithHooks)
    resumed = trainer(tmp_path / "resumed", val_check_interval=1)
    resumed.fit(module, **data, ckpt_path=tmp_path / "two.ckpt")
    assert module.completed_steps == resumed.global_step == 3
    assert len(logged(tmp_path / "resumed", "val/loss")) == 1


class WithoutSuper(GPTModule):
    """Computes no gradients."""

    def training_step(self, batch: list, batch_idx: int) -> None:
        return None


def test_a_training_step_that_computes_nothing_is_refused(tmp_path) -> None:
    module, data = parts(tmp_path, WithoutSuper)
    with pytest.raises(ValueError, match=r"^`training_step` must call `super\(\).training_step`, which computes"):
        trainer(tmp_path).fit(module, **data)


def test_a_module_loads_from_a_checkpoint_and_computes_logits(tmp_path) -> None:
    module, data = parts(tmp_path)
    first = fit_and_save(tmp_path / "two.ckpt", module, *data.values(), max_steps=2)
    loaded, tokens = GPTModule.load_from_checkpoint(tmp_path / "two.ckpt"), torch.arange(8)[None]
    with pytest.raises(ValueError, match="^the model must be built before it is called, which Trainer's fit"):
        loaded(tokens)
    [expected] = first.validate(module, **data, verbose=False)
    assert trainer(tmp_path).validate(loaded, **data, verbose=False) == [expected]
    assert loaded.config == module.config and loaded.completed_steps == 0
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens), module.eval()(tokens))


BATCHES = {
    "a tuple": ((torch.arange(8), torch.arange(8)), "a batch of .* with tokens, labels, but is a list"),
    "no tokens": ({"labels": torch.arange(8)}, "a batch of .* with tokens, labels, but is a dict with labels"),
    "fractions": ({"tokens": torch.zeros(8), "labels": torch.arange(8)}, "`tokens` must be .* but is torch.float64 "),
    "a list": ({"tokens": [1, 2], "labels": [1, 2]}, "`tokens` must be an int64 .* but is a list"),
    "other lengths": ({"tokens": torch.arange(8), "labels": torch.arange(7)}, r"`labels` must .* torch.int64 \[1, 7\]"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_another_batch_is_refused_in_one_line(tmp_path, name) -> None:
    batch, message = BATCHES[name]
    module, _ = parts(tmp_path)
    with pytest.raises(ValueError, match=f"^{message}") as error:
        trainer(tmp_path).fit(module, DataLoader([batch]))
    assert "\n" not in str(error.value)


def test_lr_find_tries_the_rates_of_a_plain_module(tmp_path) -> None:
    found = []
    for make in (plain, ours):
        module, data, used = make(tmp_path / make.__name__)
        limits = {"num_training": 20, "min_lr": 1e-5, "max_lr": 1.0, "early_stop_threshold": None}
        found.append(Tuner(used).lr_find(module, **data, **limits, update_attr=False).results["lr"])
    assert found[1] == pytest.approx(found[0]) and len(found[0]) == 20
