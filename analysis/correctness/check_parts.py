"""The parts of `check_gpus.py` that train: layouts against one rank, and a killed run against an undisturbed one."""

import contextlib
import csv
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from analysis.correctness.soak import compare, is_running, ranks_of

ROOT = Path(__file__).resolve().parents[2]
COMPARED_STEPS = 6
MODEL = {"gpu": (4, 1024, 16, 1024), "cpu": (2, 64, 8, 32)}  # of bf16: layers, hidden size, heads, tokens
NUM_STEPS, SAVE_EVERY = {"gpu": 300, "cpu": 60}, {"gpu": 100, "cpu": 10}
LIMIT_S = 600  # of one run, with its start and compilation

# Largest relative gap of a loss and of a gradient norm to one rank. fp64: sums in another order, 1e-15 a step, which
# Adam's division magnifies. bf16: the bounds of parity.py, ten and two times what was measured.
BOUNDS = {"fp64": (1e-10, 1e-9), "bf16": (1e-3, 1e-2)}


class PartFailedError(RuntimeError):
    """A part did not run to its end; one line says why."""


@dataclass(frozen=True)
class Layout:
    """A grid of ranks."""

    tp_size: int
    dp_size: int
    pp_size: int = 1
    sequence_parallel: bool = False
    zero1: bool = False

    def __str__(self) -> str:
        options = [name for name in ("sequence_parallel", "zero1") if getattr(self, name)]
        stages = f"pp {self.pp_size} x " if self.pp_size > 1 else ""
        return " ".join([f"tp {self.tp_size} x {stages}dp {self.dp_size}", *options]).replace("_", " ")

    def overrides(self) -> list[str]:
        """Of `train.py`."""
        return [
            f"parallel.tp_size={self.tp_size}",
            f"parallel.pp_size={self.pp_size}",
            f"parallel.dp_size={self.dp_size}",
            f"parallel.sequence_parallel={str(self.sequence_parallel).lower()}",
            f"parallel.zero1={str(self.zero1).lower()}",
        ]


ONE_RANK = Layout(1, 1)


def layouts_of(ranks: int) -> list[Layout]:
    """The layouts compared with one rank in fp64: as few as have every kind of parallelism, each a launch."""
    layouts = [Layout(largest_tp_size(ranks), 1), Layout(1, ranks)]
    if ranks < 4:
        return [*layouts, Layout(2, 1, sequence_parallel=True), Layout(1, 1, pp_size=2)]
    options = {"sequence_parallel": True, "zero1": True}
    layouts.append(Layout(2, ranks // 4, pp_size=2, **options))
    return layouts if ranks == 8 else [*layouts, Layout(2, ranks // 2, **options)]  # there stages have no data ranks


def largest_tp_size(ranks: int) -> int:
    """The largest power of two of the ranks, over which the 8 heads divide."""
    return 1 << (ranks.bit_length() - 1)


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
        return Layout(largest_tp_size(self.ranks), 1, sequence_parallel=True)

    def describe_model(self) -> str:
        """The bf16 model in words."""
        layers, hidden, _, length = MODEL[self.accelerator]
        return f"GPT, {layers} layers of {hidden}, {length} tokens, {self.whole_layout}"

    def add(self, line: str) -> None:
        """A line of the report without a verdict."""
        self.lines.append(f"      {line}")

    def judge(self, passes: bool, line: str) -> None:
        """A line of the report with its verdict.

        Raises:
            PartFailedError: it does not pass; `run` then writes the line.
        """
        if not passes:
            raise PartFailedError(line)
        self.lines.append(f"PASS  {line}")

    def run(self, name: str, part: Callable[..., None], *arguments: object) -> None:
        """Run one part; a failure is a line of the report, and the next part runs."""
        print(f"{name} ...", file=sys.stderr, flush=True)
        self.parts += 1
        try:
            part(self, *arguments)
        except (PartFailedError, OSError, ValueError, KeyError) as error:
            self.failed += 1
            self.lines.append(f"FAIL  {name}: {error}")


class Subprocess:
    """A command of this Python with its output in a log, in a process group of its own that `wait` leaves empty.

    Args:
        variables: of its environment, besides this process's.
    """

    def __init__(self, check: Check, name: str, arguments: list[str], **variables: str) -> None:
        self.log = check.folder / f"{name}.log"
        with open(self.log, "a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=os.environ | {"HYDRA_FULL_ERROR": "0"} | variables,
                start_new_session=True,
            )

    def wait(self, limit_s: float, expected: int = 0) -> None:
        """Wait for the end.

        Raises:
            PartFailedError: another exit code than `expected`, or still running after `limit_s`.
        """
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise PartFailedError(f"stopped after {limit_s:.0f} s; see {self.log}") from None
        finally:
            self.end()
        if code != expected:
            raise PartFailedError(f"exit code {code}: {self._last_error()}; see {self.log}")

    def end(self) -> None:
        """Kill whatever is left of the process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _last_error(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line for line in reversed(lines) if "rror" in line), "no error message")


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
        *("model=gpt_tiny", f"model.num_layers={layers}", f"model.hidden_size={hidden}"),
        *(f"model.num_attention_heads={heads}", f"model.max_position_embeddings={length}", f"data.seq_length={length}"),
        *("model.hidden_dropout=0.1", f"precision={dtype}", *kernels, "optimizer.lr=1e-3", "schedule.warmup_steps=2"),
        *("micro_batch_size=2", f"global_batch_size={batch_size}", f"trainer.max_steps={steps}"),
        *("trainer.validate_every_steps=0", "trainer.num_validation_samples=4", "trainer.progress_bar=false"),
        *(f"trainer.accelerator={check.accelerator}", "trainer.matmul_precision=highest", "logger.tensorboard=false"),
        *("parallel.timeout_minutes=5", "parallel.shared_memory=false"),
        *("checkpoint.save_every_steps=0", "checkpoint.save_last=false"),
    ]


def train(check: Check, name: str, dtype: str, layout: Layout, *overrides: str) -> Subprocess:
    """Start `train.py`; its run folder is `name`."""
    arguments = [*train_arguments(check, dtype), *layout.overrides(), f"hydra.run.dir={check.folder / name}"]
    return Subprocess(check, name, [*arguments, *overrides])


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
    name = "whole" if dtype == "bf16" else f"fp64_{layout}".replace(" ", "_")
    extra = ["trainer.profiler=torch", *saving(check)] if dtype == "bf16" else []
    train(check, name, dtype, layout, *extra).wait(LIMIT_S)
    one, other = (read_steps(check.folder / folder) for folder in (f"{dtype}_one_rank", name))
    gaps = largest_gaps(one, other)
    bounds = BOUNDS[dtype]
    case = f"{dtype}/{layout}".replace(" ", "_")
    for figure, gap in zip(("loss", "grad_norm"), gaps, strict=True):
        check.metrics[f"{case}/{figure}_gap"] = {"value": gap, "unit": "relative"}
    check.judge(
        all(gap <= bound for gap, bound in zip(gaps, bounds, strict=True)),
        f"{dtype}, {layout} against one rank over {COMPARED_STEPS} steps: losses differ by {gaps[0]:.1e} (at most "
        f"{bounds[0]:g}), gradient norms by {gaps[1]:.1e} (at most {bounds[1]:g})",
    )


def compare_replicas(check: Check) -> None:
    """Train with a run's own settings and newly tuned kernels, and compare all replicas after every step.

    The other bf16 runs are deterministic, and sequence parallel: their kernels are not tuned by timing.
    """
    layout = Layout(2, max(1, check.ranks // 2))
    own = ["deterministic=false", "trainer.check_replicas_every_steps=1", f"trainer.max_steps={COMPARED_STEPS}"]
    arguments = [*train_arguments(check, "bf16"), *layout.overrides(), f"hydra.run.dir={check.folder / 'replicas'}"]
    kernels = str(check.folder / "kernels")
    Subprocess(check, "replicas", [*arguments, *own], TORCHINDUCTOR_CACHE_DIR=kernels).wait(LIMIT_S)
    check.judge(True, f"bf16, {layout}: replicas equal to the bit after each of {COMPARED_STEPS} steps")


def read_steps(run_dir: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of the compared steps."""
    with open(run_dir / "metrics.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))[:COMPARED_STEPS]
    return [(float(row["train/loss"]), float(row["grad_norm"])) for row in rows]


def largest_gaps(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> tuple[float, float]:
    """Largest relative gap of the losses and of the norms; infinite where a number is missing or not finite."""
    gaps = [[abs(b / a - 1) for a, b in zip(*pair, strict=True)] for pair in zip(one, other, strict=False)]
    if not len(one) == len(other) == COMPARED_STEPS or not all(gap < float("inf") for pair in gaps for gap in pair):
        return float("inf"), float("inf")
    return max(gap[0] for gap in gaps), max(gap[1] for gap in gaps)


def kill_and_resume(check: Check) -> None:
    """Kill one rank of a run after its first checkpoint; the job ends by itself, resumes, and equals the whole run."""
    layout, every = check.whole_layout, SAVE_EVERY[check.accelerator]
    job = train(check, "killed", "bf16", layout, *saving(check))
    try:
        step = _wait_for_step(check.folder / "killed", job, every + 1)
        ranks = ranks_of(job.process.pid)
        if len(ranks) != layout.tp_size:
            raise PartFailedError(f"the job must run {layout.tp_size} ranks, but runs {len(ranks)}; see {job.log}")
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
        PartFailedError: the job ended first, or took longer than its limit.
    """
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            lines = (run_dir / "metrics.csv").read_text(encoding="utf-8").splitlines()
            if len(lines) > step:
                return int(lines[-1].split(",")[0])
        if job.process.poll() is not None:
            raise PartFailedError(f"the job ended before step {step}; see {job.log}")
        time.sleep(0.005)
    raise PartFailedError(f"no step {step} after {LIMIT_S} s; see {job.log}")
