"""Tiny checkpoints and finetunings for tests: jobs prepared as by the entry point, on real ranks."""

import gc
from pathlib import Path

import numpy as np
import runs
import torch
from finetuning import make_tokenizer, task_values, write_task
from ranks import run_in_turn, run_ranks

from lmscale.checkpoint import CheckpointMetadata, TensorEntry, write_offline
from lmscale.config import TransformerConfig
from lmscale.config.finetune import FinetuneConfig
from lmscale.data.tokenizer import Tokenizer
from lmscale.finetune.finetuning import finetune
from lmscale.finetune.preparing import FinetuneJob, prepare_job
from lmscale.models import build_model
from lmscale.parallel import ParallelContext


def make_checkpoint(
    folder: Path,
    tp_size: int = 1,
    state: dict | None = None,
    without: str = "-",
    initialized: tuple[str, ...] = (),
    tokenizer: Tokenizer | None = None,
    **changes,
) -> Path:
    """A random 2-layer BERT in fp64 with a tokenizer beside it; the folder that holds both.

    Args:
        without: leave out tensors whose names begin with this.
        initialized: names of tensors that an import is to have drawn.
        tokenizer: None: that of the tests.
    """
    tokenizer = tokenizer or make_tokenizer()
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 48}
    config = TransformerConfig(
        **{"family": "bert", "vocab_size": tokenizer.vocab_size, "vocab_multiple": 64, **sizes, **changes}
    )
    model = build_model(config, ParallelContext(), seed=5, dtype=torch.float64)
    tensors, entries = {}, {}
    for name, param in model.named_parameters():
        if not name.startswith(without):
            tensors[f"model/{name}"] = param.detach()
            entries[f"model/{name}"] = TensorEntry(tuple(param.shape), param.dtype, param.shard.shard_dim)
    layout = {"tp_size": tp_size, "dp_size": 1}
    run = {"name": "test", "initialized": list(initialized)}
    metadata = CheckpointMetadata(3, layout, config.to_dict(), entries, {}, {}, run, state or {})
    folder.mkdir(parents=True, exist_ok=True)
    write_offline(folder, metadata, tp_size, sorted(tensors.items()))
    (folder / "tokenizer").mkdir()
    tokenizer.inner.save(str(folder / "tokenizer" / "tokenizer.json"))
    return folder


def make_run(name: str, folder: Path, ckpt: Path, count: int = 22, run: str = "run", **changes) -> FinetuneConfig:
    """One epoch on `count` examples of a task, scored on nine others; `changes` by dotted key with `__`."""
    train, dev = write_task(folder, name, count), write_task(folder, name, 9, first=1000)
    task = task_values(name) | {"train": str(train), "validation": {"dev": str(dev)}}
    values = {
        "name": f"finetune_{name}",
        "run_dir": str(folder / run),
        "ckpt": str(ckpt),
        "task": task,
        "size": "336m",
        "tokenizer": {},
        "parallel": {"tp_size": 1, "dp_size": 1},
        "trainer": {
            "num_epochs": 1,
            "warmup_fraction": 0.1,
            "log_every_steps": 1,
            "accelerator": "cpu",
            "num_threads": 1,
            "pool_batches": 2,
            "scoring_batch_size": 4,
            "save": False,
        },
        "optimizer": {"lr": 1e-3},
        "precision": {"dtype": "fp64"},
        "micro_batch_size": 3,
        "global_batch_size": 8,
        "cache_dir": str(folder / "cache"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return FinetuneConfig.from_dict(runs.change(values, changes))


def run_finetunings(runs: list[FinetuneConfig], world_size: int) -> None:
    """Every run, one after the other, on the same `world_size` processes as torchrun would start them."""
    jobs = [prepare_job(run) for run in runs]
    assert all(job.layout.world_size == world_size for job in jobs)
    run_ranks(_finetune_all, world_size, jobs)


def run_here(run: FinetuneConfig) -> int:
    """Run once in this process; returns the exit code."""
    return finetune(prepare_job(run))


def _finetune_all(rank: int, jobs: list[FinetuneJob]) -> None:
    gc.freeze()
    assert run_in_turn(rank, finetune, jobs) == [0] * len(jobs)


def read_rows(run: FinetuneConfig) -> list[dict[str, float]]:
    """metrics.csv as numbers."""
    return runs.read_rows(run.run_dir)


def read_record(run: FinetuneConfig) -> dict:
    """The run's record."""
    return runs.read_record(run.run_dir)


def read_metrics(run: FinetuneConfig) -> dict[str, float]:
    """Values of the record's metrics."""
    return {name: entry["value"] for name, entry in read_record(run)["metrics"].items()}


def read_logits(run: FinetuneConfig, name: str = "dev") -> np.ndarray:
    """Logits of a scored set, fp32."""
    return np.load(Path(run.run_dir) / "predictions" / name / "logits.npy")
