"""The grid of the parity check: one tiny run, trained at every layout on the ranks of this host."""

import contextlib
import csv
import dataclasses
import itertools
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from lmscale.checkpoint import CheckpointReader, list_checkpoints
from lmscale.config import Layout
from lmscale.config.pretrain import RunConfig
from lmscale.launcher import world_from_outside
from lmscale.training.pretrain import pretrain
from lmscale.training.resolve import ResolvedRun, resolve
from lmscale.training.runtime.launch import launch

ONE_PROCESS = Layout(tp_size=1, dp_size=1)
LR = 1e-3  # after one step of warm-up; a step of Adam changes a weight by at most about this much
SEED = 1234
ARCHITECTURES = ("gpt", "bert")
DTYPES = ("fp64", "fp32", "bf16")
# Kind of dropout -> keys of `model=`. The sizes are small and, where possible, mutually different.
DROPOUTS = {
    "none": {},
    "hidden": {"hidden_dropout": 0.2},
    "attention_exact": {"attention_dropout": 0.2, "attention": "exact"},
    "attention_sdpa": {"attention_dropout": 0.2, "attention": "sdpa"},
}
PATIENCE = timedelta(seconds=120)  # timeout of a collective; a run takes a second
MUTANTS = ("seed", "lr")
# The mutant `lr` uses a learning rate that is too high by this fraction.
MUTANT_LR_EXCESS = {"fp64": 1e-8, "fp32": 1e-3, "bf16": 0.5}


@dataclass(frozen=True)
class Case:
    """One run on which all layouts must agree; `name` is its folder and the prefix of its metrics."""

    architecture: str
    dtype: str
    dropout: str

    @property
    def name(self) -> str:
        """`gpt/fp64/none`"""
        return f"{self.architecture}/{self.dtype}/{self.dropout}"


@dataclass(frozen=True)
class Result:
    """Result of a finished run: losses (nats per token) and gradient norms by step, full tensors by checkpoint key."""

    losses: dict[str, float]
    grad_norms: dict[str, float]
    tensors: dict[str, Tensor]


def make_layouts(tp_sizes: list[int], dp_sizes: list[int], max_world_size: int) -> list[Layout]:
    """All layouts tp x dp of 2 to `max_world_size` ranks; one process is the reference.

    Raises:
        ValueError: a size below 1, or no layout is left.
    """
    pairs = itertools.product(sorted(set(dp_sizes)), sorted(set(tp_sizes)))
    layouts = [Layout(tp_size=tp_size, dp_size=dp_size) for dp_size, tp_size in pairs]
    kept = [layout for layout in layouts if 1 < layout.world_size <= max_world_size]
    if not kept:
        raise ValueError(f"the grid must have a layout of 2 to `--max-world` ({max_world_size}) ranks, but has none")
    return kept


def layout_name(layout: Layout) -> str:
    """`tp2_dp1`"""
    return f"tp{layout.tp_size}_dp{layout.dp_size}"


def make_run(case: Case, layout: Layout, num_steps: int, root: Path, lr: float = LR) -> RunConfig:
    """The run of a case at a layout: 2 layers, 4 heads, 8 sequences per step in micro-batches of 4.

    One process accumulates two micro-batches per step and two data ranks process one each, which compares data
    parallelism with gradient accumulation. `matmul_precision: highest` keeps fp32 products in fp32; the default lets a
    CPU with bf16 units round their inputs to bf16.

    Raises:
        ValueError: see `RunConfig`; `tp_size` must divide the 4 heads.
    """
    model = {
        "family": case.architecture,
        "num_layers": 2,
        "hidden_size": 24,
        "num_attention_heads": 4,
        "vocab_size": None,
        "max_position_embeddings": 33,
        "vocab_multiple": 64,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    values = {
        "name": f"parity_{case.name.replace('/', '_')}_{layout_name(layout)}",
        "run_dir": str(root / case.name / layout_name(layout)),
        "model": model | DROPOUTS[case.dropout],
        "data": {"kind": "embedded", "seq_length": 33},
        "tokenizer": {"kind": "trained", "vocab_size": 600},
        "parallel": dataclasses.asdict(layout),
        "optimizer": {"lr": lr},
        "schedule": {"decay": "constant", "warmup_steps": 1, "decay_steps": num_steps},
        "trainer": {
            "max_steps": num_steps,
            "accelerator": "cpu",
            "num_threads": 1,
            "num_validation_samples": 7,
            "matmul_precision": "highest",
            "check_replicas_every_steps": 0,  # the replica check would stop a mutant before the comparison
            "progress_bar": False,
        },
        "precision": {"dtype": case.dtype},
        "checkpoint": {},
        "logger": {"tensorboard": False},
        "micro_batch_size": 4,
        "global_batch_size": 8,
        "seed": SEED,
    }
    return RunConfig.from_dict(values)


def prepare_all(
    cases: list[Case], layouts: list[Layout], num_steps: int, root: Path, mutant: str | None
) -> dict[Layout, list[ResolvedRun]]:
    """Check every run before the first one starts; with the mutant `lr`, layouts use a learning rate that is too high.

    Raises:
        ValueError: see `lmscale.training.resolve.resolve`.
    """
    jobs = {}
    for layout in (ONE_PROCESS, *layouts):
        excess = MUTANT_LR_EXCESS if mutant == "lr" and layout != ONE_PROCESS else dict.fromkeys(DTYPES, 0.0)
        runs = [make_run(case, layout, num_steps, root, LR * (1 + excess[case.dtype])) for case in cases]
        jobs[layout] = [resolve(run) for run in runs]
    return jobs


def train_all(jobs: dict[Layout, list[ResolvedRun]], mutant: str | None) -> None:
    """Train the runs layout by layout, with one start of the ranks per layout; progress goes to stderr.

    Raises:
        SystemExit: a rank failed or a signal was received; see `lmscale.training.runtime.launch.launch`.
    """
    for layout, layout_jobs in jobs.items():
        start = time.time()
        launch(_train_on_this_rank, (layout_jobs, mutant == "seed" and layout != ONE_PROCESS), layout.world_size)
        seconds = time.time() - start
        print(f"{layout_name(layout)}: {len(layout_jobs)} runs in {seconds:.0f} s", file=sys.stderr, flush=True)


@contextlib.contextmanager
def run_folders(keep: Path | None) -> Iterator[Path]:
    """The folder of the runs: `keep`, or a temporary folder, which is removed even if a signal ends the check."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="lmscale_parity_") as folder:
        yield Path(folder)


@record
def _train_on_this_rank(work: tuple[list[ResolvedRun], bool]) -> int:
    """Train every run; returns the exit code of the first that failed, else 0."""
    jobs, last_replica_is_wrong = work
    world = world_from_outside()
    rank, world_size = (0, 1) if world is None else (world.rank, world.size)
    for job in jobs:
        folder = Path(job.run.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if world is not None:
            # The agent's store keeps the keys of the first run, so each run uses a file store instead.
            store = dist.FileStore(str(folder / "rendezvous"), world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=PATIENCE)
        # All tensor ranks of it: otherwise they would score different tokens, which the group refuses.
        if last_replica_is_wrong and rank // job.layout.tp_size == job.layout.dp_size - 1:
            job = dataclasses.replace(job, run=dataclasses.replace(job.run, seed=SEED + 1))
        with (
            open(folder / f"rank_{rank}.log", "w", encoding="utf-8") as log,
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),  # the error of a failed rank still reaches the terminal: `launch` shows it
        ):
            code = pretrain(job)
        if code:
            return code
    return 0


def read_result(run_dir: Path) -> Result:
    """Losses (training of each step, validation before and after), gradient norms and tensors of a finished run."""
    with open(run_dir / "metrics.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    metrics = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))["metrics"]
    losses = {f"step {row['step']}": float(row["train/loss"]) for row in rows}
    for name in ("val_start/loss", "val/loss"):
        losses[name] = float(metrics[name].get("non_finite") or metrics[name]["value"])
    grad_norms = {f"step {row['step']}": float(row["grad_norm"]) for row in rows}
    return Result(losses, grad_norms, _read_tensors(run_dir / "checkpoints"))


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Full logical tensors of the newest checkpoint: `model/<parameter>`, `exp_avg/<parameter>`, ..."""
    with CheckpointReader(list_checkpoints(folder)[-1]) as reader:
        return {key: reader.read(key) for key in reader.metadata.tensors}
