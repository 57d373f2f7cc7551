"""Run the cells of the study that have no record, each condition as one `sweep=scaling`.

    python analysis/scaling_law/run.py --records outputs/scaling/cells.jsonl     # all of them; about 13 CPU hours
    python analysis/scaling_law/run.py --more --records outputs/scaling/more.jsonl    # those added later; 4 CPU hours
    python analysis/scaling_law/run.py --list

A stopped study goes on where it stopped. Where a seed's lowest loss is at an end of its condition's rates, the next
rate beyond (half or double) is run with all seeds, until none is.
"""

import argparse
import itertools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

from omegaconf import OmegaConf

from analysis.report.records import add_line, read_lines
from analysis.running import ROOT, run_python
from analysis.scaling_law.cells import describe_run
from lmscale.cli.errors import one_line_errors
from lmscale.results import path_argument, record_argument

HERE = Path(__file__).parent
CELLS, MORE_CELLS = HERE / "cells.yaml", HERE / "more.yaml"
RECORDS, MORE_RECORDS = HERE / "records" / "scaling_law.jsonl", HERE / "records" / "scaling_law_more.jsonl"
RATE, SEED = "optimizer.lr", "seed"
LOWEST, HIGHEST = 2.5e-4, 0.064  # rates beyond which none is added
NAME = "{family}_{norm_order}{qk}_{parametrization}_{num_layers}x{hidden_size}"  # of a condition without its own
ID = "{name}_{max_steps}_lr_{lr}_seed_{seed}"
DEFAULTS = {
    "model": "gpt_tiny",
    "model.norm_order": "pre",
    "model.qk_norm": False,
    "model.num_layers": 4,
    "trainer.max_steps": 300,
}
Keys = dict[str, list[Any]]  # of train.py, each with its values


def read_groups(path: Path = CELLS) -> list[dict[str, Any]]:
    """The groups of a file of cells: `name`, `keys` with the seeds, and `extend`, whether rates are added."""
    plan = OmegaConf.to_container(OmegaConf.load(path))
    seeds = [{SEED: group.get("seeds", plan["seeds"])} for group in plan["groups"]]
    return [{"extend": True} | g | {"keys": g["keys"] | own} for g, own in zip(plan["groups"], seeds, strict=True)]


def products(keys: Keys) -> list[dict[str, Any]]:
    """All combinations of the values."""
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*keys.values())]


def conditions(group: dict[str, Any]) -> list[Keys]:
    """The keys of each condition of a group: one value each, all seeds, no rate."""
    fixed = {key: values for key, values in group["keys"].items() if key not in (RATE, SEED)}
    return [{key: [value] for key, value in each.items()} | {SEED: group["keys"][SEED]} for each in products(fixed)]


def names_of(keys: Keys) -> list[str]:
    """The IDs of cells: their run folders, as `sweep=scaling` names them."""
    cells = [DEFAULTS | cell for cell in products(keys)]
    last = [{key.rpartition(".")[2]: value for key, value in cell.items()} for cell in cells]
    named = [{"family": cell["model"].partition("_")[0], "qk": "_qk" * cell["qk_norm"]} | cell for cell in last]
    return [ID.format(**({"name": NAME.format(**cell)} | cell)) for cell in named]


def lacking(group: dict[str, Any], records: Path) -> Iterator[Keys]:
    """What a group still has to run, condition by condition: its rates without a record, then those that its ends add.

    The cells that were given must have run when the next ones are asked for.
    """
    for here in conditions(group):
        rates = added = sorted(group["keys"][RATE])
        while added:
            known = read_lines(records)
            if left := [rate for rate in added if set(names_of(here | {RATE: [rate]})) - known.keys()]:
                yield here | {RATE: left}
            rate = next_rate(here, rates, records) if group["extend"] else None
            added = [] if rate is None else [rate]
            rates = sorted([*rates, *added])


def run_group(group: dict[str, Any], more: Sequence[str], outputs: Path, records: Path) -> None:
    """Run the cells of a group that have no record, one sweep per condition, and those that its ends add."""
    for keys in lacking(group, records):
        words = [f"{key}={','.join(map(str, values))}" for key, values in keys.items()]
        sweep = ("sweep=scaling", *words, *more, f"hydra.sweep.dir={outputs}")
        known = read_lines(records)
        try:
            run_python("src/train.py", *sweep, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        finally:
            for name in names_of(keys):
                if name not in known and (outputs / name / "record.json").is_file():
                    add_line(records, name, describe_run(outputs / name))


def next_rate(condition: Keys, rates: Sequence[float], records: Path) -> float | None:
    """The rate beyond an end of `rates` at which the loss of some seed is lowest; None if there is none."""
    known, ends = read_lines(records), set()
    for seed in condition[SEED]:
        names = names_of(condition | {SEED: [seed], RATE: list(rates)})
        losses = [known[name]["metrics"]["loss"]["value"] for name in names]
        ends.add(min(range(len(rates)), key=lambda i, found=losses: math.inf if found[i] is None else found[i]))
    beyond = (rates[0] / 2 if 0 in ends else None, rates[-1] * 2 if len(rates) - 1 in ends else None)
    return next((rate for rate in beyond if rate is not None and LOWEST <= rate <= HIGHEST), None)


def is_complete(group: dict[str, Any], records: Path) -> bool:
    """Whether all cells of a group have a record, those that its ends add too."""
    return next(lacking(group, records), None) is None


@one_line_errors()
def main() -> int:
    """List the cells, or run the missing ones."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("overrides", nargs="*", help="more keys of train.py, for a trial with other --records")
    parser.add_argument("--more", action="store_true", help="the cells of more.yaml")
    parser.add_argument("--list", action="store_true", help="print the planned cells and run nothing")
    parser.add_argument("--outputs", type=path_argument, default=ROOT / "outputs" / "scaling", help="run folders")
    parser.add_argument("--records", type=record_argument, help="file of the cells' records; default: the study's")
    options = parser.parse_args()
    own = MORE_RECORDS if options.more else RECORDS
    options.records = options.records or own
    named = {"name", RATE, SEED, "model.parametrization", "model.hidden_size", *DEFAULTS}
    if taken := named & {word.partition("=")[0] for word in options.overrides}:
        parser.error(f"{min(taken)} must be set in cells.yaml, because the names of the cells have it")
    if options.overrides and options.records == own:
        parser.error("--records must be another file if keys are given: the cells then differ from the study's")
    for group in read_groups(MORE_CELLS if options.more else CELLS):
        if options.list:
            known = read_lines(options.records)
            for name in names_of(group["keys"]):
                print(f"{group['name']:<12}{name:<60}{'done' if name in known else 'not run'}")
        else:
            run_group(group, options.overrides, options.outputs.resolve(), options.records)
    if not options.list:
        print(f"records: {options.records}; python analysis/scaling_law/decide.py {options.records} evaluates them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
