"""The parts of `check_gpus.py` that train: layouts against one rank, and a killed run against an undisturbed one."""

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from analysis.correctness import parity
from analysis.correctness.soak import compare, is_running, last_step, ranks_of
from analysis.running import ROOT, Subprocess
from lmscale.config import Layout

COMPARED_STEPS = 6
MODEL = {"gpu": (4, 1024, 16, 1024), "cpu": (2, 64, 8, 32)}  # of bf16: layers, hidden size, heads, tokens
NUM_STEPS, SAVE_EVERY = {"gpu": 300, "cpu": 60}, {"gpu": 100, "cpu": 10}
LIMIT_S = 600  # of one run, with its start and compilation

# Largest relative gap of a loss and of a gradient norm to one rank. fp64: sums in another order, 1e-15 a step, which
# Adam's division magnifies. bf16: the bounds of parity.py, ten and two times what was measured.
BOUNDS = {"fp64": (1e-10, 1e-9), "bf16": (1e-3, 1e-2)}


ONE_RANK = Layout()


def layouts_of(ranks: int) -> list[Layout]:
    """The layouts compared with one rank in fp64: as few as have every kind of parallelism, each a launch."""
    layouts = [Layout(tp_size=largest_tp_size(ranks)), Layout(dp_size=ranks)]
    if ranks < 4:
        return [*layouts, Layout(tp_size=2, sequence_parallel=True), Layout(pp_size=2)]
    both = Layout(tp_size=2, dp_size=ranks // 2, sequence_parallel=True, zero1=True)
    layouts.append(dataclasses.replace(both, pp_size=2, dp_size=ranks // 4))
    return layouts if ranks == 8 else [*layouts, both]  # there stages have no data ranks


def largest_tp_size(ranks: int) -> int:
    """The largest power of two of the ranks, over which the 8 heads divide."""
    return 1 << (ranks.bit_length() - 1)


def name_of(layout: Layout) -> str:
    """A layout in the report: `tp 2 x pp 2 x dp 1 zero1`."""
    sizes = [f"{key[:2]} {size}" for key, size in layout.sizes.items() if key != "pp_size" or size > 1]
    options = [option for option in ("sequence_parallel", "zero1") if getattr(layout, option)]
    return " ".join([" x ".join(sizes), *options]).replace("_", " ")


@dataclass
class Check:
    """One check in progress: where its runs go, and what was found.

    Args:
        folder: of the runs and logs.
        accelerator: gpu or cpu.
        ranks: number of GPUs or processes.
    """

    folder: Path
    accelerator: str
    ranks: int
    lines: list[str] = field(default_factory=list)
    metrics: dict[str, dict] = field(default_factory=dict)
    parts: int = 0
    failed: int = 0

    @property
    def whole_layout(self) -> Layout:
        """Of the bf16 runs: tensor and sequence parallel over as many ranks as can be."""
        return Layout(tp_size=largest_tp_size(self.ranks), sequence_parallel=True)

    def describe_model(self) -> str:
        """The bf16 model in words."""
        layers, hidden, _, length = MODEL[self.accelerator]
        return f"GPT, {layers} layers of {hidden}, {length} tokens, {name_of(self.whole_layout)}"

    def add(self, line: str) -> None:
        """A line of the report without a verdict."""
        self.lines.append(f"      {line}")

    def judge(self, passes: bool, line: str) -> None:
        """A line of the report with its verdict.

        Raises:
            RuntimeError: it does not pass; `run` then writes the line.
        """
        if not passes:
            raise RuntimeError(line)
        self.lines.append(f"PASS  {line}")

    def run(self, name: str, part: Callable[..., None], *arguments: object) -> None:
        """Run one part; a failure is a line of the report, and the next part runs."""
        print(f"{name} ...", file=sys.stderr, flush=True)
        self.parts += 1
        try:
            part(self, *arguments)
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            self.failed += 1
            self.lines.append(f"FAIL  {name}: {error}")


def train_arguments(check: Check, dtype: str) -> list[str]:
    """Arguments of `train.py` for a run in `dtype`, without the layout.

    In fp64 nothing is compiled, and dropout masks depend on the sample and position alone (`attention=exact`), so that
    layouts differ only by rounding. In bf16 the kernels are those that a run on this device uses by default; attention
    has no dropout, whose masks would depend on the layout.
    """
    layers, hidden, heads, length = MODEL[check.accelerator] if dtype == "bf16" else MODEL["cpu"]
    kernels = (
        ["compile=false", "model.attention=exact", "model.attention_dropout=0.1"]
        if dtype == "fp64"
        else ["deterministic=true", "model.attention_dropout=0"]
    )
    steps = NUM_STEPS[check.accelerator] if dtype == "bf16" else COMPARED_STEPS
    batch_size = 2 * math.lcm(check.ranks, max(1, check.ranks // 2))  # for the data ranks of every layout
    return [
        str(ROOT / "src" / "train.py"),
        *("model=gpt_tiny", "model.initializer_std=0.02", f"model.num_layers={layers}", f"model.hidden_size={hidden}"),
        *(f"model.num_attention_heads={heads}", f"model.max_position_embeddings={length}", f"data.seq_length={length}"),
        *("model.hidden_dropout=0.1", f"precision={dtype}", *kernels, "optimizer.lr=1e-3", "schedule.warmup_steps=2"),
        *("micro_batch_size=2", f"global_batch_size={batch_size}", f"trainer.max_steps={steps}"),
        *("trainer.validate_every_steps=0", "trainer.num_validation_samples=4", "trainer.progress_bar=false"),
        *(f"trainer.accelerator={check.accelerator}", "trainer.matmul_precision=highest", "logger.tensorboard=false"),
        *("parallel.timeout_minutes=5", "parallel.shared_memory=false"),
        *("checkpoint.save_every_steps=0", "checkpoint.save_last=false"),
    ]


def train(check: Check, name: str, dtype: str, layout: Layout, *overrides: str, **variables: str) -> Subprocess:
    """Start `train.py`; its run folder is `name`."""
    arguments = [*train_arguments(check, dtype), f"hydra.run.dir={check.folder / name}", *overrides]
    arguments += [f"parallel.{key}={str(value).lower()}" for key, value in dataclasses.asdict(layout).items()]
    return Subprocess(check.folder / f"{name}.log", arguments, **variables)


def saving(check: Check) -> list[str]:
    """Overrides of the runs that are compared bitwise."""
    return [f"checkpoint.save_every_steps={SAVE_EVERY[check.accelerator]}", "checkpoint.save_last=true"]


def train_one_rank(check: Check) -> None:
    """Train one rank in each type, both at once."""
    stop = f"trainer.stop_after_steps={COMPARED_STEPS}"
    runs = [train(check, f"{dtype}_one_rank", dtype, ONE_RANK, stop) for dtype in BOUNDS]
    try:
        for run in runs:
            run.wait(LIMIT_S)
    finally:
        for run in runs:
            run.end()


def compare_layouts(check: Check, dtype: str, layout: Layout) -> None:
    """Train a layout, and compare the losses and gradient norms of every step with those of one rank.

    The bf16 run of several ranks goes on to its end, is profiled, and saves checkpoints: it is the undisturbed run.
    """
    case = f"{dtype}/{name_of(layout)}".replace(" ", "_")
    name = "whole" if dtype == "bf16" else case.replace("/", "_")
    extra = ["trainer.profiler=torch", *saving(check)] if dtype == "bf16" else []
    train(check, name, dtype, layout, *extra).wait(LIMIT_S)
    loss, norm = largest_gaps(*(parity.read_steps(check.folder / run) for run in (f"{dtype}_one_rank", name)))
    check.metrics[f"{case}/loss_gap"] = {"value": loss, "unit": "relative"}
    check.metrics[f"{case}/grad_norm_gap"] = {"value": norm, "unit": "relative"}
    bounds = BOUNDS[dtype]
    check.judge(
        loss <= bounds[0] and norm <= bounds[1],
        f"{dtype}, {name_of(layout)} against one rank over {COMPARED_STEPS} steps: losses differ by {loss:.1e} (at "
        f"most {bounds[0]:g}), gradient norms by {norm:.1e} (at most {bounds[1]:g})",
    )


def compare_replicas(check: Check) -> None:
    """Train with a run's own settings and newly tuned kernels, and compare all replicas after every step.

    The other bf16 runs are deterministic, and sequence parallel: their kernels are not tuned by timing.
    """
    layout = Layout(tp_size=2, dp_size=max(1, check.ranks // 2))
    own = ["deterministic=false", "trainer.check_replicas_every_steps=1", f"trainer.max_steps={COMPARED_STEPS}"]
    kernels = str(check.folder / "kernels")
    train(check, "replicas", "bf16", layout, *own, TORCHINDUCTOR_CACHE_DIR=kernels).wait(LIMIT_S)
    check.judge(True, f"bf16, {name_of(layout)}: replicas equal to the bit after each of {COMPARED_STEPS} steps")


def largest_gaps(one: list[dict[str, float]], other: list[dict[str, float]]) -> list[float]:
    """Largest relative gap of the losses and of the norms; infinite where a number is missing or not finite."""
    one, other = one[:COMPARED_STEPS], other[:COMPARED_STEPS]
    if not len(one) == len(other) == COMPARED_STEPS:
        return [math.inf, math.inf]
    return [parity.compare(one, other, name)[COMPARED_STEPS] for name in parity.BOUNDS]


def kill_and_resume(check: Check) -> None:
    """Kill one rank of a run after its first checkpoint; the job ends by itself, resumes, and equals the whole run."""
    layout, every = check.whole_layout, SAVE_EVERY[check.accelerator]
    job = train(check, "killed", "bf16", layout, *saving(check))
    try:
        step = _wait_for_step(check.folder / "killed", job, every + 1)
        ranks = ranks_of(job.process.pid)
        if len(ranks) != layout.tp_size:
            raise RuntimeError(f"the job must run {layout.tp_size} ranks, but runs {len(ranks)}; see {job.log}")
        os.kill(ranks[-1], signal.SIGKILL)
        started = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(60)
        seconds = time.monotonic() - started
        left = [rank for rank in ranks if is_running(rank)]
        passes = job.process.returncode == 1 and not left
        check.judge(
            passes,
            f"kill -9 of rank {layout.tp_size - 1} after step {step}: the job ended after {seconds:.0f} s, exit code "
            f"{job.process.returncode}, {len(left)} ranks left",
        )
    finally:
        job.end()
    train(check, "killed", "bf16", layout, *saving(check), "resume=auto").wait(LIMIT_S)
    differing = compare(check.folder / "killed", check.folder / "whole")
    found = ", ".join(f"{count} {name}" for name, count in differing.items())
    steps = NUM_STEPS[check.accelerator]
    check.judge(
        not any(differing.values()),
        f"resumed and trained to step {steps}: bitwise different from the undisturbed run are {found}",
    )


def _wait_for_step(run_dir: Path, job: Subprocess, step: int) -> int:
    """Wait until a run has done `step` steps; returns the last one in its metrics.

    Raises:
        RuntimeError: the job ended first, or took longer than its limit.
    """
    deadline = time.monotonic() + LIMIT_S
    while (reached := last_step(run_dir)) < step:
        if job.process.poll() is not None:
            raise RuntimeError(f"the job ended before step {step}; see {job.log}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"no step {step} after {LIMIT_S} s; see {job.log}")
        time.sleep(0.005)
    return reached
