"""Modules, optimizers and schedules of a user's own under a stock Trainer, and the scripts of the library guide."""

import functools
import re
from pathlib import Path
from typing import Any

import lightning as L
import nbformat
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from nbclient import NotebookClient
from ranks import run_in_turn, run_ranks
from runs import REPOSITORY
from stock import fit_and_save, parts, run_script, trainer
from torch.utils.data import DataLoader, Dataset

from lmscale.checkpoint import CheckpointError
from lmscale.training.module import GPTModule
from lmscale.training.strategy import TensorParallelStrategy


class PlainModule(L.LightningModule):
    """A module that is not ours: under our strategy nothing would average its gradients over the data ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_plain_module(rank: int, tp_size: int) -> str:
    """The error of a plain module on several ranks."""

    def run(job: None) -> str:
        strategy = TensorParallelStrategy(tp_size=tp_size)
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        several = L.Trainer(strategy=strategy, devices=2, accelerator="cpu", max_steps=2, **options)
        try:
            several.fit(PlainModule(), DataLoader(torch.randn(8, 4)))
        except ValueError as error:
            return str(error)
        return "fitted"

    return run_in_turn(rank, run, [None])[0]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_plain_module_is_refused_on_every_rank_before_anything_starts(tp_size) -> None:
    message = (
        "`module` must be a TrainingModule under TensorParallelStrategy (for any other LightningModule take "
        '`strategy="ddp"`), but is a PlainModule'
    )
    assert run_ranks(fit_plain_module, 2, tp_size) == [message] * 2


class OwnOptimizer(GPTModule):
    """Replaces the optimizer, which the training step needs."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NoOptimizer(GPTModule):
    """None, which Lightning allows."""

    def configure_optimizers(self) -> None:
        return None


class ManualOptimization(GPTModule):
    """Wants to call the optimizer by itself."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OwnOptimizer, r"^`configure_optimizers` must return the optimizer of .* but returns SGD$"),
        (NoOptimizer, r"^`configure_optimizers` must .* but returns \w+$"),
        (ManualOptimization, r"^`automatic_optimization` of ManualOptimization must be True, but is False$"),
    ],
)
def test_another_optimization_is_refused_in_one_line(tmp_path, kind, message) -> None:
    module, data = parts()
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path).fit(kind(module.config), data)


class OwnSchedule(GPTModule):
    """Our optimizer without a schedule."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return super().configure_optimizers()["optimizer"]


def test_our_optimizer_without_its_schedule_trains(tmp_path) -> None:
    module, data = parts()
    trainer(tmp_path).fit(module := OwnSchedule(module.config), data)
    assert module.completed_steps == 3


class TorchSchedule(GPTModule):
    """Our optimizer with a schedule of torch's."""

    def __init__(self, *args, make, **options) -> None:
        super().__init__(*args, **options)
        self.make = make

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = super().configure_optimizers()["optimizer"]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.make(optimizer), "interval": "step"}}


SCHEDULES = {
    "from the last rate": functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
    "with momentum": functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1e-2, total_steps=6),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_torch_goes_on_from_the_rates_of_the_checkpoint(tmp_path, name) -> None:
    module, data = parts()
    whole, first, resumed = (TorchSchedule(module.config, make=SCHEDULES[name]) for _ in range(3))
    trainer(tmp_path / "whole", max_steps=4).fit(whole, data)
    fit_and_save(tmp_path / "two.ckpt", first, parts()[1], max_steps=2)
    trainer(tmp_path / "resumed", max_steps=4).fit(resumed, parts()[1], ckpt_path=tmp_path / "two.ckpt")
    assert resumed.step_lr == whole.step_lr
    assert all(map(torch.equal, resumed.parameters(), whole.parameters()))


def test_a_schedule_of_torch_starts_from_the_rates_of_the_parametrization(tmp_path) -> None:
    module, data = parts(parametrization="mup", base_hidden_size=12)
    scheduled = TorchSchedule(module.config, make=SCHEDULES["from the last rate"])
    trainer(tmp_path, max_steps=1).fit(scheduled, data)
    rates = {group["rate_factor"]: group["lr"] for group in scheduled.optimizer.param_groups}
    assert rates == {factor: pytest.approx(0.5e-3 * factor) for factor in rates} and len(rates) > 1


class SetRate(L.Callback):
    """Sets the rate by itself."""

    def on_train_batch_start(self, trainer, pl_module, *_) -> None:
        for group in pl_module.optimizer.param_groups:
            group["lr"] = 0.125


def test_a_rate_that_the_schedule_would_replace_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"^`lr` of .* must stay the schedule's 0.001 between steps .* but is 0.125$"):
        trainer(tmp_path, callbacks=[SetRate()]).fit(*parts())
    module, data = parts()
    trainer(tmp_path, callbacks=[SetRate()]).fit(module := OwnSchedule(module.config), data)
    assert module.step_lr == 0.125


GUIDE = (REPOSITORY / "docs" / "guides" / "library.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.S)


@pytest.mark.slow
@pytest.mark.parametrize("code", BLOCKS, ids=["ten lines", "options of the Trainer", "own module"])
def test_a_block_runs_as_a_script(code: str, tmp_path: Path) -> None:
    run_script(code, tmp_path)
    assert list(tmp_path.rglob("*.ckpt"))


@pytest.mark.slow
def test_the_first_block_has_ten_lines_and_runs_in_a_notebook(tmp_path: Path) -> None:
    lines = [line for line in BLOCKS[0].splitlines() if line and not line.startswith("if __name__")]
    assert len(lines) <= 10
    code = BLOCKS[0].replace("tp_size=2", "tp_size=1").replace("devices=2", "devices=1")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code + "\nmodule.completed_steps")])
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    (shown,) = [output for output in notebook.cells[0].outputs if output.output_type == "execute_result"]
    assert shown["data"]["text/plain"] == "8"


def own_module(*changes: tuple[str, str]) -> dict[str, Any]:
    """The names of the guide's last block with other words in it."""
    names: dict[str, Any] = {"__name__": "guide"}
    exec(functools.reduce(lambda code, change: code.replace(*change), changes, BLOCKS[2]), names)
    return names


def fit_own_module(rank: int, folder: str) -> dict[str, list[float]]:
    """Three steps of the guide's module on two tensor ranks, as fit on ranks that exist; this rank's bias of the last
    layer, which both hold."""

    def run(job: None) -> list[float]:
        module = own_module()["fit"](folder, tp_size=2, devices=2, max_steps=3)
        return module.model[2].bias.tolist()

    return run_in_turn(rank, run, [None])[0]


def test_a_module_of_our_layers_equals_one_process_and_resumes_at_another_tp_size(tmp_path) -> None:
    """With clipping, which is by the norm of the whole model."""
    fit = own_module()["fit"]
    whole = fit(tmp_path / "whole", tp_size=1, devices=1, max_steps=6)
    three = fit(tmp_path / "three", tp_size=1, devices=1, max_steps=3)
    biases = run_ranks(fit_own_module, 2, str(tmp_path / "cut"))
    assert biases[0] == biases[1] == pytest.approx(three.model[2].bias.tolist(), rel=1e-12)
    resumed = fit(tmp_path / "on", tp_size=1, devices=1, max_steps=6, ckpt_path=tmp_path / "cut" / "last.ckpt")
    for name, param in whole.model.named_parameters():
        torch.testing.assert_close(resumed.model.get_parameter(name), param, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("        initialize_parameters(", "        (lambda *_: None)("), "^`build` must initialize every parameter"),
        (
            ("nn.GELU()", "nn.Linear(32, 32)"),
            "^parameters must be those of lmscale.* but 1.weight is not",
        ),
    ],
)
def test_a_module_that_would_train_on_anything_is_refused(change, message, tmp_path) -> None:
    with pytest.raises(ValueError, match=message):
        own_module(change)["fit"](tmp_path, tp_size=1, devices=1, max_steps=1)


def test_the_trainers_precision_must_be_that_of_the_module(tmp_path) -> None:
    rows = DataLoader([{"x": torch.zeros(8), "y": torch.zeros(2)}])
    with pytest.raises(ValueError, match=r"^`precision` must be the module's \(fp64\) or left out, but is bf16-true$"):
        trainer(tmp_path, precision="bf16-true").fit(own_module()["Regression"](), rows)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (("(8, 32,", "(8, 16,"), r"0.bias is \(16,\) here and \(32,\) there"),
        (("nn.Sequential(up, nn.GELU(), down)", "nn.Sequential(up)"), r"2.bias is None here and \(2,\) there"),
    ],
)
def test_a_checkpoint_of_other_layers_is_refused(tmp_path, change, found) -> None:
    """The first half of its rows would fit: they are those of one of two tensor ranks."""
    own_module()["fit"](tmp_path, tp_size=1, devices=1, max_steps=1)
    fit = own_module(change, ("(32, 2,", "(16, 2,"))["fit"]
    with pytest.raises(CheckpointError, match=f"^checkpoint last.ckpt is of another model: the shape of {found}$"):
        fit(tmp_path, tp_size=1, devices=1, max_steps=2, ckpt_path=tmp_path / "last.ckpt")


def test_a_module_of_our_layers_loads_from_a_checkpoint_with_what_it_was_made_of(tmp_path) -> None:
    class Named(own_module()["Regression"]):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.save_hyperparameters()

    rows = DataLoader([{"x": torch.ones(8).double(), "y": torch.zeros(2).double()}])
    module = Named("a")
    fit_and_save(tmp_path / "one.ckpt", module, rows, max_steps=1, precision="32-true")
    for name, options in (("a", {}), ("b", {"name": "b"})):
        loaded = Named.load_from_checkpoint(tmp_path / "one.ckpt", **options)
        trainer(tmp_path, max_steps=0, precision="32-true").fit(loaded, rows)
        assert loaded.hparams.name == name
        assert all(map(torch.equal, loaded.parameters(), module.parameters()))


class Noise(Dataset):
    """Random rows, from torch's generator or from one that differs between the ranks."""

    def __init__(self, own: torch.Generator | None) -> None:
        self.own = own

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(8, dtype=torch.float64, generator=self.own)
        return {"x": x, "y": x[:2].sin()}


def fit_on_noise(rank: int) -> tuple[list[float], str]:
    """Sums of the batches that a rank sees in two epochs of shuffled random rows, and the error of rows of its own."""

    def run(own: torch.Generator | None) -> list[float] | str:
        seen: list[float] = []
        record = LambdaCallback(
            on_train_batch_start=lambda trainer, module, batch, index: seen.append(batch["x"].sum())
        )
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "callbacks": [record]}
        options |= {"strategy": TensorParallelStrategy(tp_size=2), "devices": 2, "accelerator": "cpu", "max_epochs": 2}
        loader = DataLoader(Noise(own), batch_size=2, shuffle=True)
        try:
            L.Trainer(use_distributed_sampler=False, **options).fit(own_module()["Regression"](), loader)
        except ValueError as error:
            return str(error)
        return [float(each) for each in seen]

    return tuple(run_in_turn(rank, run, [None, torch.Generator().manual_seed(rank)]))


def test_tensor_ranks_see_the_same_random_samples_or_are_refused() -> None:
    (seen, error), others = run_ranks(fit_on_noise, 2)
    assert others == (seen, error) and len(set(seen)) == 8
    assert error.startswith("batches of the DataLoader must be equal on the ranks of a tensor group (draw ")
