"""A stock Lightning Trainer with our strategy, module and data works as Lightning and our library guide document it."""

import csv
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import nbformat
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from nbclient import NotebookClient
from ranks import make_context, run_ranks
from runs import REPOSITORY, read_rows, run_jobs, tiny_run
from sharding import small_config
from torch.utils.data import DataLoader

from lmscale.checkpoint import CheckpointError, CheckpointReader
from lmscale.config import TransformerConfig
from lmscale.config.training import OptimizerConfig, ScheduleConfig
from lmscale.data.datamodule import TextDataModule
from lmscale.parallel import ParallelContext
from lmscale.training.module import BERTModule, GPTModule
from lmscale.training.strategy import TensorParallelStrategy

SIZES = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "max_position_embeddings": 33}
SIZES |= {"vocab_multiple": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0}


def parts(architecture: str = "gpt", **changes) -> tuple[L.LightningModule, TextDataModule]:
    """A module and its data, of the size of `tiny_run`."""
    data = TextDataModule(architecture, seq_length=33, global_batch_size=8, vocab_size=600, num_validation_samples=7)
    config = TransformerConfig(architecture, vocab_size=data.vocab_size, **SIZES | changes)
    kind = GPTModule if architecture == "gpt" else BERTModule
    return kind(config, OptimizerConfig(lr=1e-3), ScheduleConfig("linear", 1, 10), micro_batch_size=4), data


def trainer(folder: Path, **options) -> L.Trainer:
    """One process, three steps, one row of metrics per step."""
    options = {"max_steps": 3, "precision": "64-true", "callbacks": []} | options
    strategy = TensorParallelStrategy(tp_size=options.pop("tp_size", 1))
    return L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        logger=CSVLogger(folder, name="", version="logs"),
        log_every_n_steps=1,
        enable_progress_bar=any(isinstance(c, RichProgressBar) for c in options["callbacks"]),
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **options,
    )


def logged(folder: Path, column: str) -> list[float]:
    """One column of the CSV logger's file, without empty cells."""
    with open(folder / "logs" / "metrics.csv", encoding="utf-8", newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file) if row.get(column)]


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
from test_stock_trainer import *
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


def run_script(text: str, folder: Path) -> None:
    """Run a separate script, which Lightning starts again for the second rank."""
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]


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


def test_best_and_last_checkpoints_and_the_learning_rate_are_recorded(tmp_path, capsys) -> None:
    module, data = parts()
    best = ModelCheckpoint(tmp_path / "kept", monitor="val/loss", save_top_k=2, save_last=True)
    options = {"max_steps": 4, "val_check_interval": 1, "check_val_every_n_epoch": None}
    trainer(tmp_path, callbacks=[best, LearningRateMonitor(), RichProgressBar()], **options).fit(module, data)
    assert len(list((tmp_path / "kept").glob("*.ckpt"))) == 3 and Path(best.best_model_path).is_dir()
    assert best.best_model_score == min(logged(tmp_path, "val/loss"))
    assert sorted(set(logged(tmp_path, "lr/pg1")))[-2:] == pytest.approx([1e-3 * 8 / 9, 1e-3], rel=1e-6)


def test_early_stopping_ends_the_run(tmp_path) -> None:
    module, data = parts()
    stop = EarlyStopping("val/loss", patience=0, min_delta=10.0)
    ended = trainer(tmp_path, callbacks=[stop], max_steps=9, val_check_interval=1, check_val_every_n_epoch=None)
    ended.fit(module, data)
    assert ended.global_step == 2


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


def test_a_checkpoint_of_the_training_script_resumes(tmp_path) -> None:
    run_jobs([tiny_run("gpt", tmp_path / "run", checkpoint__save_every_steps=2, checkpoint__keep_last=None)], 1)
    module, data = parts()
    path = tmp_path / "run" / "checkpoints" / "step_2.ckpt"
    module.weights_from = str(path.with_name("step_3.ckpt"))  # a model that began from another goes on from this one
    trainer(tmp_path, gradient_clip_val=1.0).fit(module, data, ckpt_path=path)
    with CheckpointReader(tmp_path / "run" / "checkpoints" / "step_3.ckpt") as reader:
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
    one = trainer(tmp_path, max_steps=1)
    one.fit(*parts())
    one.save_checkpoint(tmp_path / "one.ckpt")
    module, data = parts(**changes)
    with pytest.raises(CheckpointError, match=f"^checkpoint one.ckpt is of another model: .*{message}"):
        trainer(tmp_path).fit(module, data, ckpt_path=tmp_path / "one.ckpt")


def test_the_trainers_gradient_clip_value_is_used(tmp_path) -> None:
    for name, value in (("clipped", 1e-3), ("free", 0.0)):
        module, data = parts()
        trainer(tmp_path / name, gradient_clip_val=value).fit(module, data)
        assert module.optimizer.max_grad_norm == (value or None)
    assert logged(tmp_path / "clipped", "grad_norm")[0] == logged(tmp_path / "free", "grad_norm")[0] > 1e-3


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-true"])
def test_the_trainers_precision_is_used(tmp_path, precision) -> None:
    module, data = parts()
    trainer(tmp_path, precision=precision).fit(module, data)
    kind = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "16-true": torch.float16}[precision]
    assert {param.dtype for param in module.model.parameters()} == {kind}
    assert logged(tmp_path, "train/loss")[0] == pytest.approx(6.4, abs=0.2)
    assert module.optimizer.masters[0].dtype == torch.float32
    assert data.steps_per_epoch == 3  # `max_steps` ends before the text does


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


def test_limits_and_epochs_count_steps(tmp_path) -> None:
    module, data = parts()
    limited = trainer(tmp_path, max_steps=-1, max_epochs=2, limit_train_batches=3, limit_val_batches=1)
    limited.fit(module, data)
    assert limited.global_step == 6 and limited.current_epoch == 2
    assert len(logged(tmp_path, "val/loss")) == 2


def users_loader() -> DataLoader:
    """Steps of eight, eight and two samples, all different."""
    tokens = torch.arange(18 * 33).reshape(18, 33) * 7 % 500
    return DataLoader([{"tokens": row[:-1], "labels": row[1:]} for row in tokens], batch_size=8)


def steps(folder: Path, data, micro_batch_size: int | None, **options) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step; the weights stay, so they show what the step was a mean of."""
    config = TransformerConfig("gpt", vocab_size=600, **SIZES)
    module = GPTModule(config, OptimizerConfig(lr=0.0, max_grad_norm=None), micro_batch_size=micro_batch_size)
    trainer(folder, **{"max_steps": -1, "max_epochs": 1, "limit_val_batches": 0} | options).fit(module, data)
    return list(zip(logged(folder, "train/loss"), logged(folder, "grad_norm"), strict=True))


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


REFUSED = {
    "no end": ({"max_steps": -1, "max_epochs": -1}, "`max_steps` or `max_epochs` must be set, but both are -1"),
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
    "size": ({"tp_size": 2}, "`tp_size` must divide the 1 ranks, but is 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_conflicting_options_raise_one_line(tmp_path, name) -> None:
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as error:
        trainer(tmp_path, **options).fit(*parts())
    assert "\n" not in str(error.value)


def test_another_precision_is_refused_once_the_model_is_built() -> None:
    module, _ = parts()
    strategy = SimpleNamespace(parallel=None)
    module._trainer = SimpleNamespace(
        strategy=strategy, precision="64-true", gradient_clip_algorithm=None, callbacks=[], accumulate_grad_batches=1
    )
    module.setup("fit")
    module.model = torch.nn.Identity()
    module.setup("fit")
    module._trainer.precision = "32-true"
    with pytest.raises(ValueError, match="`precision` must stay fp64 for this module, but is fp32"):
        module.setup("fit")


def test_a_run_with_another_step_size_is_refused_instead_of_running_out_of_data(tmp_path) -> None:
    module, data = parts()
    last = ModelCheckpoint(tmp_path / "kept", save_last=True)
    trainer(tmp_path, callbacks=[last], max_steps=2).fit(module, data)
    module, data = parts()
    data.global_batch_size = 4
    resumed = trainer(tmp_path / "resumed", max_steps=4)
    with pytest.raises(ValueError, match="`global_batch_size` must stay 8, as in the checkpoint, but is 4"):
        resumed.fit(module, data, ckpt_path=tmp_path / "kept" / "last.ckpt")


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


def test_several_ranks_in_a_notebook_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True)
    with pytest.raises(ValueError, match="^`devices` must be 1 in a notebook or an interactive session.*but is 2$"):
        L.Trainer(strategy=TensorParallelStrategy(tp_size=2), devices=2, accelerator="cpu")
    L.Trainer(strategy=TensorParallelStrategy(), devices=1, accelerator="cpu", logger=False)


def test_a_perplexity_beyond_fp32_is_finite() -> None:
    module = GPTModule(small_config("gpt"), logs=False)
    module._trainer = SimpleNamespace(strategy=SimpleNamespace(parallel=ParallelContext()))
    module._validation_sums = torch.tensor([[200.0], [2.0]], dtype=torch.float64)
    assert module._reduce_validation("val") == {"val/loss": 100.0, "val/perplexity": pytest.approx(math.exp(100))}


class MaskLabels(L.Callback):
    """Removes all targets of the validation."""

    def on_validation_batch_start(self, trainer, pl_module, batch, *args) -> None:
        batch["labels"].fill_(-100)


def test_the_validation_loss_over_no_target_is_nan(tmp_path) -> None:
    """A mean over nothing is no number: 0 would be the best loss that a `ModelCheckpoint` has seen."""
    [found] = trainer(tmp_path, callbacks=[MaskLabels()]).validate(*parts(), verbose=False)
    assert math.isnan(found["val/loss"]) and math.isnan(found["val/perplexity"])


GUIDE = (REPOSITORY / "docs" / "guides" / "library.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.S)


@pytest.mark.slow
@pytest.mark.parametrize("code", BLOCKS, ids=["ten lines", "options of the Trainer"])
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
