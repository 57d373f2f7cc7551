"""Kill a training run repeatedly at random moments and verify that nothing is lost.

    python analysis/correctness/soak.py --kills 25

A run at tensor-parallel 2 saves every few steps in the background. This script sends kill -9 to one of its ranks (the
launcher then restarts all), to the launcher (its ranks must end by themselves) or to the whole job (the script then
restarts it with resume=auto), at a random moment or while a checkpoint is written. After each kill every complete
checkpoint must exist with valid checksums, unless newer ones replaced it. At the end losses, gradient norms and every
tensor must be bitwise equal to those of an undisturbed run. Prints a table and writes a record; exit code 1 if
anything was lost.
"""

import argparse
import contextlib
import csv
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import torch

from analysis.running import ROOT, Subprocess
from lmscale.checkpoint import Checkpoint, checkpoint_step, list_checkpoints
from lmscale.cli.errors import one_line_errors
from lmscale.results import new_record, path_argument, record_argument, report

SAVE_EVERY, KEEP_LAST = 5, 3
LIMIT_S = 3600  # of a job, once it is left alone
SETTINGS = (
    "model=gpt_tiny",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.initializer_std=0.02",
    "data.seq_length=32",
    "tokenizer.vocab_size=800",
    "micro_batch_size=2",
    "global_batch_size=4",
    "parallel.tp_size=2",
    "trainer.num_threads=1",
    "trainer.num_validation_samples=4",
    "trainer.progress_bar=false",
    "trainer.accelerator=cpu",
    "logger.tensorboard=false",
    f"checkpoint.save_every_steps={SAVE_EVERY}",
    f"checkpoint.keep_last={KEEP_LAST}",
    "checkpoint.async=true",
    "max_restarts=1000",
    "resume=auto",
)


@one_line_errors()
def main() -> int:
    """Run the soak, compare with an undisturbed run and report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--steps-per-kill", type=int, default=30, help="length of the run, in steps per kill")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=path_argument, default=None, help="default: outputs/soak/<time>")
    parser.add_argument("--record", type=record_argument, default=None, help="default: soak.json in the folder")
    options = parser.parse_args()
    if options.kills < 1 or options.steps_per_kill < 10:
        raise ValueError("`--kills` must be at least 1 and `--steps-per-kill` at least 10")
    folder = (options.folder or ROOT / "outputs" / "soak" / time.strftime("%Y-%m-%d_%H-%M-%S")).absolute()
    folder.mkdir(parents=True)
    steps = options.kills * options.steps_per_kill
    start = time.monotonic()
    soak = Soak(folder / "soaked", folder / "soaked.log", steps, random.Random(options.seed))
    try:
        for number in range(options.kills):
            print(f"kill {number + 1:>3}: {soak.kill_once()}", flush=True)
        soak.job.wait(LIMIT_S)
    finally:
        soak.job.end()
    Soak(folder / "untouched", folder / "untouched.log", steps, random.Random(0)).job.wait(LIMIT_S)
    differences = compare(folder / "soaked", folder / "untouched")
    seconds = time.monotonic() - start
    report(to_record(soak, differences, options, steps, seconds), options.record or folder / "soak.json")
    for line in soak.lost:
        print(line)
    return 1 if soak.lost or any(differences.values()) else 0


class Soak:
    """One job in its run folder, which is repeatedly started and killed.

    Args:
        log: file for the output of all starts.
    """

    def __init__(self, run_dir: Path, log: Path, steps: int, chance: random.Random) -> None:
        self.run_dir, self.log, self.chance = run_dir, log, chance
        self.overrides = (*SETTINGS, f"trainer.max_steps={steps}", f"hydra.run.dir={run_dir}")
        self.kills: Counter[str] = Counter()
        self.lost: list[str] = []
        self.num_in_save = 0
        self.job = self._start()

    def _start(self) -> Subprocess:
        return Subprocess(self.log, [str(ROOT / "src" / "train.py"), *self.overrides], OMP_NUM_THREADS="1")

    def kill_once(self) -> str:
        """Let the job progress, then kill a rank or the whole job, and check what is left on disk; returns the kill."""
        reached = self._wait_for_progress()
        in_save = self.chance.random() < 0.4
        if in_save:
            in_save = self._wait_for_save()
        else:
            time.sleep(self.chance.uniform(0.0, 2.5))
        before = {checkpoint_step(path) for path in list_checkpoints(self.run_dir / "checkpoints")}
        ranks = ranks_of(self.job.process.pid)
        target = self.chance.choice(["rank 0", "rank 1", "launcher", "job"]) if len(ranks) == 2 else "job"
        if target == "job":
            self.job.end()
        elif target == "launcher":
            self.job.process.kill()
            self.job.process.wait()
            self._wait_until_gone(ranks)
        else:
            try:
                os.kill(ranks[int(target[-1])], signal.SIGKILL)
            except ProcessLookupError:
                target = "none: the rank had just exited"
        self.kills[target] += 1
        self.num_in_save += in_save
        self._check_checkpoints(before)
        if target in ("job", "launcher"):
            self.job = self._start()
        return f"{target}{' during a save' if in_save else ''} after step {reached}"

    def _wait_for_progress(self) -> int:
        """Wait until the current start has written a row; returns the last step."""
        before, deadline = last_step(self.run_dir), time.monotonic() + 180
        while last_step(self.run_dir) <= before:
            if self.job.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the job ended or made no progress; see {self.log}")
            time.sleep(0.02)
        return last_step(self.run_dir)

    def _wait_until_gone(self, ranks: list[int]) -> None:
        deadline = time.monotonic() + 30
        while any(is_running(rank) for rank in ranks):
            if time.monotonic() > deadline:
                self.lost.append("a rank outlived its launcher")
                break
            time.sleep(0.05)

    def _wait_for_save(self) -> bool:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if any((self.run_dir / "checkpoints").glob(".step_*.unfinished")):
                return True
        return False

    def _check_checkpoints(self, before: set[int]) -> None:
        """Check that every complete checkpoint is valid and still exists, unless newer ones replaced it."""
        found = list_checkpoints(self.run_dir / "checkpoints")
        after = {checkpoint_step(path) for path in found}
        gone = {step for step in before - after if len([s for s in after if s > step]) < KEEP_LAST}
        self.lost += [f"step_{step}.ckpt is missing" for step in gone]
        for path in found:
            try:
                damage = Checkpoint.open(path).damage()
            except ValueError as error:
                damage = str(error)
            if damage and path.exists():  # a restarted job may have removed an old one meanwhile
                self.lost.append(f"{path.name}: {damage}")


def last_step(run_dir: Path) -> int:
    """Last step in metrics.csv; it may decrease, because a resumed start first removes rows."""
    try:
        lines = (run_dir / "metrics.csv").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return 0
    return int(lines[-1].split(",")[0]) if len(lines) > 1 else 0


def ranks_of(launcher: int) -> list[int]:
    """Process ids of the ranks that `train.py`, running as process `launcher`, has started, in the order of ranks."""
    ranks = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has just ended
            stat, arguments = (folder / "stat").read_text(errors="replace"), (folder / "cmdline").read_bytes()
            if int(stat.rsplit(")", 1)[1].split()[1]) == launcher and b"spawn_main" in arguments:
                ranks.append(int(folder.name))
    return sorted(ranks)


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def compare(soaked: Path, untouched: Path) -> dict[str, int]:
    """Count differing rows and tensors of the last checkpoint (bitwise), and compare the data-order digests."""
    rows, others = (_read_rows(path) for path in (soaked, untouched))
    differing = sum(row != other for row, other in zip(rows, others, strict=False)) + abs(len(rows) - len(others))
    path, other_path = (list_checkpoints(folder / "checkpoints")[-1] for folder in (soaked, untouched))
    one, other = Checkpoint.open(path), Checkpoint.open(other_path)
    digests = one.metadata.state["data_digest"] != other.metadata.state["data_digest"]
    keys = one.metadata.tensors.keys() | other.metadata.tensors.keys()
    with one.reader() as a, other.reader() as b:
        tensors = sum(not torch.equal(a.read(key), b.read(key)) for key in keys)
    return {"rows": differing, "tensors": tensors, "data-order digest": int(digests)}


def _read_rows(folder: Path) -> list[tuple[str, ...]]:
    with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
        return [(row["step"], row["train/loss"], row["grad_norm"], row["lr"]) for row in csv.DictReader(file)]


def to_record(
    soak: Soak, differences: dict[str, int], options: argparse.Namespace, steps: int, seconds: float
) -> dict[str, Any]:
    """The record of the kills and of what was lost."""
    metrics = {f"kills/{name}": {"value": count, "unit": "kills"} for name, count in soak.kills.items()}
    metrics["kills_in_mid_save"] = {"value": soak.num_in_save, "unit": "kills"}
    metrics["checkpoints_lost"] = {"value": len(soak.lost), "unit": "checkpoints"}
    metrics |= {f"differing/{name}": {"value": count, "unit": name} for name, count in differences.items()}
    metrics["time"] = {"value": seconds, "unit": "s"}
    config = {"overrides": list(SETTINGS), "kills": options.kills}
    layout = {"tp_size": 2, "dp_size": 1, "threads_per_rank": 1}
    return new_record("soak", "run", config, options.seed, metrics, device="cpu", layout=layout, steps=[0, steps])


if __name__ == "__main__":
    sys.exit(main())
