"""Figure 7 as a controlled experiment: run the cells of `sweep=norm_order`, then summarize them.

    python analysis/norm_order/run.py --jobs 2              # every cell without a record, then the summary; hours
    python analysis/norm_order/run.py --stages 12 --seeds 1

At 12 layers the design is full factorial: norm order x scaled initialization of residual layers x learning rate. At 6
and 24 layers each of the four arms uses its best learning rate at 12 layers, and at 48 layers the same with one seed.
At 24 layers, seeds that do not learn are repeated at the lower rates. A cell is one run of `src/train.py` on one
thread, trained on the documentation that ships with Python. Its record is written to `records/norm_order/`, and cells
that have a record are skipped. The summary is `records/norm_order.json`; `make tables` and `make figures` show it.
"""

import argparse
import ctypes
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

from omegaconf import OmegaConf

from analysis.norm_order.cells import ARM, choose_rates, read_cells
from analysis.norm_order.references import family_of_run, reference_losses
from analysis.norm_order.run_folder import (
    NATS,
    NATS_PER_TOKEN,
    describe_losses,
    digest,
    read_rows,
    read_statistics,
)
from analysis.norm_order.summary import summarize
from lmscale.results import new_record, write_record

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "analysis" / "norm_order" / "records"
SWEEP = OmegaConf.load(ROOT / "conf" / "train" / "sweep" / "norm_order.yaml")
TRAINED = OmegaConf.to_container(
    OmegaConf.masked_copy(
        SWEEP, ["model", "tokenizer", "micro_batch_size", "global_batch_size", "schedule", "trainer"]
    ),
    resolve=False,
)
FACTORIAL = int(SWEEP.model.num_layers)
SEEDS = range(1, 4)
STAGES = {FACTORIAL: 3, 6: 3, 24: 3, 48: 1}  # layers: seeds; the first stage chooses the rates
RETRIED = 24  # layers at which runs that do not learn are repeated at lower rates, to separate depth from learning rate
DIVERGED = 3  # exit code of a run without finite gradients
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


@dataclass(frozen=True)
class Cell:
    """One run. `lr` is text, as the sweep spells it."""

    layers: int
    order: str
    scaled: bool
    lr: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its record and run folder."""
        return f"{self.layers}_{self.order}_{'scaled' if self.scaled else 'unscaled'}_{self.lr}_{self.seed}"

    def overrides(self) -> tuple[str, ...]:
        """Overrides of `src/train.py`."""
        return (
            "sweep=norm_order",
            "hydra.mode=RUN",
            f"model.num_layers={self.layers}",
            f"model.norm_order={self.order}",
            f"model.scale_residual_init={str(self.scaled).lower()}",
            f"optimizer.lr={self.lr}",
            f"seed={self.seed}",
        )


def swept(key: str) -> list[str]:
    """Values of a key in the sweep."""
    return SWEEP.hydra.sweeper.params[key].split(",")


def cells_of_stage(layers: int, seeds: Iterable[int], records: Path) -> list[Cell]:
    """Cells at one depth, seed by seed.

    Raises:
        ValueError: the factorial, which determines the learning rates, is incomplete.
    """
    arms = list(itertools.product(swept("model.norm_order"), (True, False)))
    if layers == FACTORIAL:
        rates = {arm: swept("optimizer.lr") for arm in arms}
    else:
        needed = cells_of_stage(FACTORIAL, SEEDS, records)
        missing = [cell.name for cell in needed if not (records / f"{cell.name}.json").is_file()]
        if missing:
            raise ValueError(f"the cells at {FACTORIAL} layers must all have records first, but {missing[0]} has none")
        chosen = choose_rates(read_cells(read_folder(records)), FACTORIAL)
        rates = {arm: [lr for lr in swept("optimizer.lr") if float(lr) == chosen[arm]] for arm in arms}
    kept = [seed for seed in seeds if seed <= STAGES[layers]]
    return [Cell(layers, *arm, lr, seed) for seed in kept for arm in arms for lr in rates[arm]]


def cells_to_retry(seeds: Iterable[int], records: Path) -> list[Cell]:
    """Cells at `RETRIED` layers and lower rates, for seeds that did not learn at the rate chosen for their arm."""
    cells = read_cells(read_folder(records))
    chosen, retries = choose_rates(cells, FACTORIAL), []
    for (order, scaled), group in cells[cells["layers"] == RETRIED].groupby(ARM):
        lower = [lr for lr in swept("optimizer.lr") if float(lr) < chosen[order, scaled]]
        failed = group[(group["lr"] == chosen[order, scaled]) & (group["state"] != "learned")]
        retries += [
            Cell(RETRIED, order, bool(scaled), lr, int(seed))
            for lr in lower
            for seed in failed["seed"]
            if seed in seeds
        ]
    return retries


def read_folder(records: Path) -> list[dict[str, Any]]:
    """Read the records of cells, sorted by name.

    Raises:
        ValueError: a file is not the record of a cell of this sweep.
    """
    found = []
    for path in sorted(records.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            same = all(record["config"]["sweep"][key] == wanted for key, wanted in TRAINED.items())
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"`--records` must hold cells of this study, but {path} is not one") from error
        if not same:
            raise ValueError(f"`--records` must hold cells of this sweep, but {path} belongs to another")
        found.append(record)
    return found


def run_cell(cell: Cell, more: Sequence[str], outputs: Path, records: Path) -> None:
    """Train one cell and write its record, unless it has one. An incomplete run folder is deleted first."""
    target, run_dir = records / f"{cell.name}.json", outputs / cell.name
    if target.is_file():
        return
    print(f"--- {cell.name}", flush=True)
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [sys.executable, str(ROOT / "src" / "train.py"), *cell.overrides(), *more, f"hydra.run.dir={run_dir}"]
    with open(outputs / f"{cell.name}.log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with_parent,
        )
        _, status, usage = os.wait4(process.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    process.returncode = code  # so that Popen does not wait for it again
    if code not in (0, DIVERGED):
        raise RuntimeError(f"{cell.name} ended with code {code}; see {log.name}")
    write_record(describe_cell(cell, more, run_dir, code == DIVERGED, usage), target)


def _end_with_parent() -> None:
    """Let Linux kill the run with this script: the next start deletes the folder that it would go on writing to."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def describe_cell(
    cell: Cell, more: Sequence[str], run_dir: Path, diverged: bool, usage: resource.struct_rusage
) -> dict[str, Any]:
    """Build a cell's record from its run folder: metrics, loss curve and gradient norms per layer."""
    rows, values = read_rows(run_dir), json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    metrics, curves = describe_losses(rows, diverged, values["schedule"]["warmup_steps"])
    metrics["cpu_time"] = {"value": usage.ru_utime + usage.ru_stime, "unit": "s"}
    config: dict[str, Any] = {
        "overrides": [*cell.overrides(), *more],
        "sweep": OmegaConf.to_container(SWEEP, resolve=False),
    }
    if not diverged:
        run = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
        validation = run["metrics"].get("val/lm_loss") or run["metrics"]["val/loss"]  # GPT has one term
        metrics["validation_loss"] = validation | {"unit": NATS}
        metrics |= {k: {"value": loss, "unit": NATS} for k, loss in reference_losses(values).items()}
        config["corpus"] = {part: run["config"]["corpus"][part] for part in ("train", "validation")}
    if family_of_run(values) == "gpt":
        for metric in metrics.values():
            metric["unit"] = NATS_PER_TOKEN if metric["unit"] == NATS else metric["unit"]
    config |= {"cell": vars(cell), "losses_sha256": digest(rows), "statistics": read_statistics(run_dir)} | curves
    layout = {"tp_size": 1, "dp_size": 1, "threads_per_rank": 1}
    record = new_record("norm_order_cell", "scaled_down", config, cell.seed, metrics, device="cpu", layout=layout)
    if not diverged:  # this process may not have torch
        record["environment"]["cpu_details"] = run["environment"]["cpu_details"]
    return record


def main() -> int:
    """Run the missing cells stage by stage, then summarize."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("overrides", nargs="*", help="more keys of train.py, for a trial with other --records")
    parser.add_argument("--stages", nargs="*", type=int, choices=STAGES, default=list(STAGES), help="depths")
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=list(SEEDS))
    parser.add_argument("--jobs", type=int, default=1, help="number of concurrent cells, one thread each")
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs" / "norm_order", help="run folders")
    parser.add_argument(
        "--records",
        type=Path,
        default=RECORDS / "norm_order",
        help="folder of the cells; the summary is written beside it",
    )
    options = parser.parse_args()
    outputs, records = options.outputs.resolve(), options.records.resolve()
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, but is {options.jobs}")
    if options.overrides and records == RECORDS / "norm_order":
        parser.error("--records must be another folder if overrides are given: the cells then differ from the study's")
    outputs.mkdir(parents=True, exist_ok=True)

    def run(cells: list[Cell]) -> None:
        missing = [cell for cell in cells if not (records / f"{cell.name}.json").is_file()]
        if missing:  # about 20 CPU seconds per layer each
            print(f"training the {len(missing)} of {len(cells)} cells at {cells[0].layers} layers that have no record")
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda cell: run_cell(cell, options.overrides, outputs, records), cells))

    try:
        for layers in options.stages:
            run(cells_of_stage(layers, options.seeds, records))
            if layers == RETRIED:
                run(cells_to_retry(options.seeds, records))
        summary = summarize(read_cells(read_folder(records)), FACTORIAL)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    path = records.with_suffix(".json")
    write_record(summary, path)
    print(f"record: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
