"""Figure 7 as a controlled experiment: run the cells of `cells.yaml` that have no record, or repeat some.

    python analysis/norm_order/run.py --records outputs/norm_order/records      # the first study again; hours
    python analysis/norm_order/run.py --study second --records FOLDER --jobs 2  # the second (plan.md), two at a time
    python analysis/norm_order/run.py --study third --records FOLDER --jobs 2   # four times the steps; 5 CPU hours
    python analysis/norm_order/run.py --study second --list                     # the IDs of its cells, and which ran
    python analysis/norm_order/run.py --study second --only ID ...              # repeat committed cells and compare

A cell is one run of `src/train.py` on one thread. It may be killed at any time: without a record it starts afresh. The
records of a study are lines of one file in the folder `--records`, which `decide.py` evaluates.
"""

import argparse
import itertools
import json
import resource
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

from omegaconf import OmegaConf

from analysis import running
from analysis.norm_order.run_folder import (
    NATS,
    NATS_PER_TOKEN,
    describe_losses,
    digest,
    family_of_run,
    read_rows,
    read_statistics,
    reference_losses,
)
from analysis.report.records import ONE_THREAD, add_line, read_lines
from lmscale.cli.errors import one_line_errors
from lmscale.results import new_record, path_argument, record_path, write_record

CELLS, RECORDS = Path(__file__).with_name("cells.yaml"), Path(__file__).with_name("records")
SWEEP = OmegaConf.load(running.ROOT / "conf" / "train" / "sweep" / "norm_order.yaml")
FILES = {"first": "norm_order.jsonl", "second": "study.jsonl", "third": "long.jsonl"}
USUAL = {"family": "bert", "data": "embedded", "precision": "fp32"}  # what a cell's ID leaves out
RACE = ("data=local", "data.path='${oc.env:LMSCALE_DATA}/race/race_train.jsonl.gz'", "data.text_field=article")
DATA = {"embedded": (), "race": (*RACE, "trainer.num_validation_samples=2048")}
FAMILIES = {"bert": (), "gpt": ("model=gpt_tiny",)}
DIVERGED = 3  # exit code of a run without finite gradients
# Of a record's configuration; the first study's has no hash and no statistics.
COMPARED = ("losses_sha256", "curve", "validation", "gradient_norms", "statistics", "corpus")


@dataclass(frozen=True)
class Cell:
    """One run; `lr` is the text of its number, as in 0.0015."""

    layers: int
    order: str
    lr: str
    seed: int
    warmup: int = 100
    family: str = "bert"
    data: str = "embedded"
    precision: str = "fp32"
    scaled: bool = True

    @property
    def name(self) -> str:
        """ID of its record, and name of its run folder."""
        more = [getattr(self, key) for key, usual in USUAL.items() if getattr(self, key) != usual]
        more += [] if self.scaled else ["unscaled"]
        return "_".join([str(self.layers), self.order, self.lr, f"w{self.warmup}", f"s{self.seed}", *more])

    def overrides(self) -> tuple[str, ...]:
        """Overrides of `src/train.py`, without those of its study."""
        return (
            *("sweep=norm_order", "hydra.mode=RUN", *FAMILIES[self.family], *DATA[self.data]),
            *(f"model.num_layers={self.layers}", f"model.norm_order={self.order}", f"optimizer.lr={self.lr}"),
            *(f"seed={self.seed}", f"schedule.warmup_steps={self.warmup}", f"precision={self.precision}"),
            f"model.scale_residual_init={str(self.scaled).lower()}",
        )


def read_groups(study: str) -> Iterator[tuple[str, Cell]]:
    """The cells of a study with their group's name, in order."""
    for group in OmegaConf.to_container(OmegaConf.load(CELLS))[study]["groups"]:
        lists = {key: [str(v) if key == "lr" else v for v in values] for key, values in group["cells"].items()}
        for values in itertools.product(*lists.values()):
            yield group["name"], Cell(**dict(zip(lists, values, strict=True)))


def run_cell(cell: Cell, more: Sequence[str], outputs: Path) -> dict[str, Any]:
    """Train one cell and build its record. An incomplete run folder is deleted first.

    Args:
        more: further overrides.

    Raises:
        ValueError: the run ended with an error.
    """
    run_dir = outputs / cell.name
    print(f"--- {cell.name}", flush=True)
    shutil.rmtree(run_dir, ignore_errors=True)
    arguments = ["src/train.py", *cell.overrides(), *more, f"hydra.run.dir={run_dir}"]
    code, usage = running.run_cell(arguments, outputs / f"{cell.name}.log", codes=(0, DIVERGED))
    return describe_cell(cell, more, run_dir, code == DIVERGED, usage)


def describe_cell(
    cell: Cell, more: Sequence[str], run_dir: Path, diverged: bool, usage: resource.struct_rusage
) -> dict[str, Any]:
    """Build a cell's record from its run folder: metrics, loss curve and gradient norms per layer."""
    rows, values = read_rows(run_dir), json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    unit = NATS_PER_TOKEN if family_of_run(values) == "gpt" else NATS
    metrics, curves = describe_losses(rows, diverged, values["schedule"]["warmup_steps"], unit)
    metrics["cpu_time"] = {"value": usage.ru_utime + usage.ru_stime, "unit": "s"}
    config = {"overrides": [*cell.overrides(), *more], "sweep": OmegaConf.to_container(SWEEP, resolve=False)}
    if not diverged:
        run = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
        validation = run["metrics"].get("val/lm_loss") or run["metrics"]["val/loss"]  # GPT has one term
        metrics["validation_loss"] = validation | {"unit": unit}
        metrics |= {k: {"value": loss, "unit": unit} for k, loss in reference_losses(values).items()}
        config["corpus"] = {part: run["config"]["corpus"][part] for part in ("train", "validation")}
    config |= {"cell": vars(cell), "losses_sha256": digest(rows), "statistics": read_statistics(run_dir)} | curves
    record = new_record("norm_order_cell", "scaled_down", config, cell.seed, metrics, **ONE_THREAD)
    if not diverged:  # this process may not have torch
        record["environment"]["cpu_details"] = run["environment"]["cpu_details"]
    return record


def run_missing(cells: Sequence[Cell], more: Sequence[str], jobs: int, outputs: Path, path: Path) -> None:
    """Run cells in order, `jobs` at a time, and append their records.

    Raises:
        ValueError: see `running.run_chains`.
    """
    chains = [[cell] for cell in cells]
    running.run_chains(chains, lambda cell: add_line(path, cell.name, run_cell(cell, more, outputs)), jobs)


def repeat(cells: Sequence[Cell], more: Sequence[str], recorded: dict[str, Any], outputs: Path) -> int:
    """Run cells again and compare; returns the number that differ. New records are `outputs`/ID.json.

    Numbers need not be the same to the bit on CPUs of different models; notebook 04 says what makes them so.
    """
    num_differing = 0
    for cell in cells:
        again, known = run_cell(cell, more, outputs), recorded[cell.name]
        write_record(again, outputs / f"{cell.name}.json")
        found = [p for p in COMPARED if p in known["config"] and known["config"][p] != again["config"].get(p)]
        num_differing += bool(found)
        losses = [f"{r['metrics']['train_loss']['value']} on {r['environment']['cpu']}" for r in (again, known)]
        differs = f"differs in {', '.join(found)}; training loss {losses[0]}, recorded {losses[1]}"
        print(f"{cell.name}: {differs if found else 'equal, bit by bit'}", flush=True)
    return num_differing


@one_line_errors()
def main() -> int:
    """List, run or repeat cells."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("overrides", nargs="*", help="more keys of train.py, for a trial with other --records")
    parser.add_argument("--study", choices=FILES, default="first")
    parser.add_argument("--list", action="store_true", help="print the cells and run nothing")
    parser.add_argument("--jobs", type=running.positive, default=1, help="number of concurrent cells, one thread each")
    parser.add_argument("--only", nargs="+", metavar="ID", help="repeat these cells and compare")
    parser.add_argument(
        "--outputs", type=path_argument, default=running.ROOT / "outputs" / "norm_order", help="run folders"
    )
    parser.add_argument("--records", type=path_argument, default=RECORDS, help="folder of the records")
    options = parser.parse_args()
    outputs, path = options.outputs.resolve(), options.records.resolve() / FILES[options.study]
    if options.overrides and path.parent == RECORDS:
        parser.error("--records must be another folder if overrides are given: the cells then differ from the study's")
    more = [*OmegaConf.load(CELLS)[options.study].overrides, *options.overrides]
    cells, recorded = {cell.name: cell for _, cell in read_groups(options.study)}, read_lines(path)
    if options.list:
        print(*(f"{name:<44}{'done' if name in recorded else 'not run'}" for name in cells), sep="\n")
        return 0
    if unknown := set(options.only or ()) - (cells.keys() & recorded.keys()):
        raise ValueError(f"`--only` must name cells with a record, but is {min(unknown)}; see --list")
    outputs.mkdir(parents=True, exist_ok=True)
    record_path(path)  # makes its folder
    if options.only:
        return int(repeat([cells[name] for name in options.only], more, recorded, outputs) > 0)
    missing = [cell for name, cell in cells.items() if name not in recorded]
    run_missing(missing, more, options.jobs, outputs, path)
    print(f"records: {path}; python analysis/norm_order/decide.py --records {options.records} evaluates them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
