"""A module and its data, a stock Lightning Trainer, and what it has logged."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lmscale.config import TransformerConfig
from lmscale.config.training import OptimizerConfig, ScheduleConfig
from lmscale.data.datamodule import TextDataModule
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
    options.setdefault("strategy", TensorParallelStrategy(tp_size=options.pop("tp_size", 1)))
    return L.Trainer(
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


def fit_and_save(path: Path, *given: object, **options) -> L.Trainer:
    """The trainer that has fitted a module on its data, new ones if none are given, and saved the checkpoint `path`."""
    fitted = trainer(path.parent, **options)
    fitted.fit(*(given or parts()))
    fitted.save_checkpoint(path)
    return fitted


def logged(folder: Path, column: str) -> list[float]:
    """One column of the CSV logger's file, without empty cells."""
    with open(folder / "logs" / "metrics.csv", encoding="utf-8", newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file) if row.get(column)]


def run_script(text: str, folder: Path) -> None:
    """Run a separate script, which Lightning starts again for the second rank."""
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]


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
