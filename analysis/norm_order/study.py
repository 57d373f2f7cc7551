"""The second norm-order study (plan.md): run the cells of `cells.yaml` that have no record yet, or repeat some.

    python analysis/norm_order/study.py --list         # every cell: `done`, or the CPU seconds to expect
    python analysis/norm_order/study.py --jobs 2       # all without a record, two at a time
    python analysis/norm_order/study.py --next 4       # only the next four
    python analysis/norm_order/study.py --only ID ...  # repeat cells and compare all numbers of their records

A cell is one run of `src/train.py` on one thread. It may be killed at any time: without a record it starts afresh.
Cells run only from a clean checkout, whose commit is in the record. `lr: [chosen]` waits for the group `selection` (of
GPT: `gpt_selection`) and for the cells that the grid's rule adds to it, which `outcome.py` prints.
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

from omegaconf import OmegaConf

import lmscale
from analysis.norm_order.cells import read_cells
from analysis.norm_order.limits import read_limits
from analysis.norm_order.run import ROOT, run_cell

CELLS = Path(__file__).with_name("cells.yaml")
RECORDS = ROOT / "analysis" / "norm_order" / "records" / "study"
PACKAGE = Path(lmscale.__file__).resolve().parent
CHOSEN = "chosen"
CPU_SECONDS = {6: 137, 12: 256, 24: 465, 48: 927}  # of a cell in fp32, measured in the first study
RACE = ("data=local", "data.path='${oc.env:LMSCALE_DATA}/race/race_train.jsonl.gz'", "data.text_field=article")
DATA = {"embedded": (), "race": (*RACE, "trainer.num_validation_samples=2048")}
FAMILIES = {"bert": (), "gpt": ("model=gpt_tiny",)}


@dataclass(frozen=True)
class StudyCell:
    """One run; `lr` is the text of its number (0.0015), or `chosen`. All have the paper's scaled initialization."""

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
        """Its ID, and the name of its record and run folder."""
        plain = {"family": "bert", "data": "embedded", "precision": "fp32"}
        more = [getattr(self, key) for key, usual in plain.items() if getattr(self, key) != usual]
        return "_".join([str(self.layers), self.order, self.lr, f"w{self.warmup}", f"s{self.seed}", *more])

    def overrides(self) -> tuple[str, ...]:
        """Overrides of `src/train.py`, with attention, compilation, threads and precision fixed."""
        steps = OmegaConf.load(CELLS).statistics
        return (
            *("sweep=norm_order", "hydra.mode=RUN", *FAMILIES[self.family], *DATA[self.data]),
            *(f"model.num_layers={self.layers}", f"model.norm_order={self.order}", f"optimizer.lr={self.lr}"),
            *(f"seed={self.seed}", f"schedule.warmup_steps={self.warmup}", f"precision={self.precision}"),
            *("model.scale_residual_init=true", "model.attention=exact", "compile=false", "trainer.num_threads=1"),
            f"logger.layer_statistics={[int(step) for step in steps]}".replace(" ", ""),
        )


def read_groups(path: Path = CELLS) -> Iterator[tuple[str, StudyCell]]:
    """The cells of the file with their group's name, in order."""
    for group in OmegaConf.to_container(OmegaConf.load(path))["groups"]:
        lists = {key: [str(v) if key == "lr" else v for v in values] for key, values in group["cells"].items()}
        for values in itertools.product(*lists.values()):
            yield group["name"], StudyCell(**dict(zip(lists, values, strict=True)))


def resolve(cell: StudyCell, records: Path) -> StudyCell | None:
    """The cell with its chosen rate, or None while a cell that decides it has no record or the grid's rule adds one.

    Raises:
        ValueError: no rate of the selection has only seeds that learned, and the grid has no further rates.
    """
    if cell.lr != CHOSEN:
        return cell
    source = "gpt_selection" if cell.family == "gpt" else "selection"
    deciding = [c for name, c in read_groups() if (name, c.order, c.layers) == (source, cell.order, cell.layers)]
    paths = [records / f"{c.name}.json" for c in deciding]
    if not all(path.is_file() for path in paths):
        return None
    found = read_cells(json.loads(path.read_text(encoding="utf-8")) for path in paths)
    arm = {"group": source, "family": cell.family, "warmup": cell.warmup}
    if read_limits(found.assign(**arm))["added"].map(len).any():
        return None
    learned = found.groupby("lr").filter(lambda rows: (rows["state"] == "learned").all())
    if learned.empty:
        raise ValueError(f"a rate of {source} must have only seeds that learned, but none has for {cell.name}")
    best = learned.groupby("lr")["train_loss"].mean().idxmin()
    return StudyCell(**asdict(cell) | {"lr": next(c.lr for c in deciding if float(c.lr) == best)})


def all_cells(records: Path) -> list[tuple[str, StudyCell]]:
    """The cells of the study with their rates; those whose rate is not known yet keep `chosen`."""
    return [(name, resolve(cell, records) or cell) for name, cell in read_groups()]


def next_cell(records: Path, running: Collection[StudyCell] = ()) -> StudyCell | None:
    """The first cell without a record whose rate is known, except those that are running."""
    missing = (cell for _, cell in all_cells(records) if not (records / f"{cell.name}.json").is_file())
    return next((cell for cell in missing if cell.lr != CHOSEN and cell not in running), None)


def run_missing(jobs: int, most: int | None, overrides: list[str], outputs: Path, records: Path) -> None:
    """Run up to `most` cells without a record in order, `jobs` at a time; a finished one may decide others' rates.

    Raises:
        RuntimeError: a run ended with an error. The cells that run beside it end first.
    """
    running: dict[Future[None], StudyCell] = {}
    num_started = 0
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            while len(running) < jobs and num_started != most:
                if (cell := next_cell(records, running.values())) is None:
                    break
                running[pool.submit(run_cell, cell, overrides, outputs, records)] = cell
                num_started += 1
            if not running:
                return
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                del running[ended]
                ended.result()


def require_clean() -> None:
    """Refuse a checkout with changed tracked files, and a `lmscale` of another one, whose commit records would name.

    Raises:
        ValueError: there are some, or it is.
    """
    if PACKAGE != ROOT / "src" / "lmscale":
        raise ValueError(f"`lmscale` must be that of {ROOT} (PYTHONPATH=src), but is {PACKAGE}")
    command = ["git", "status", "--porcelain", "--untracked-files=no"]
    changed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    if changed:
        raise ValueError(f"the checkout must be clean, but has changes: {changed.strip()}")


def differing(record: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of the measured values that differ between two records of a cell; CPU time is not compared."""
    names = [
        f"metrics/{n}" for n in record["metrics"] if n != "cpu_time" and record["metrics"][n] != other["metrics"][n]
    ]
    parts = ("losses_sha256", "curve", "validation", "gradient_norms", "statistics", "overrides", "corpus")
    return names + [part for part in parts if record["config"].get(part) != other["config"].get(part)]


def cpu_of(environment: dict[str, Any]) -> str:
    """The CPU of a record, with its numbers and torch's instruction set where the record has them."""
    details = environment.get("cpu_details", {})
    numbers = ", ".join(
        f"{key} {details[key]}" for key in ("family", "model", "stepping", "amx_bf16", "capability") if key in details
    )
    return environment["cpu"] + (f" ({numbers})" if numbers else "")


def repeat(names: list[str], records: Path, outputs: Path, more: list[str]) -> int:
    """Run cells again and compare; returns the number that differ. The new records stay in `outputs`/repeated.

    Numbers need not be the same to the bit on CPUs of different models; results.md says what makes them so.

    Raises:
        ValueError: a name is not that of a cell with a record.
    """
    cells, num_differing = {cell.name: cell for _, cell in all_cells(records)}, 0
    for name in names:
        if name not in cells or not (records / f"{name}.json").is_file():
            raise ValueError(f"`--only` must name cells with a record, but is {name}; see --list")
    folder = outputs / "repeated"
    folder.mkdir(exist_ok=True)
    for name in names:
        target = folder / f"{name}.json"
        target.unlink(missing_ok=True)
        run_cell(cells[name], more, folder, folder)
        again, recorded = (json.loads(p.read_text(encoding="utf-8")) for p in (target, records / f"{name}.json"))
        found = differing(recorded, again)
        num_differing += bool(found)
        losses = [
            f"{record['metrics']['train_loss']['value']} on {cpu_of(record['environment'])}"
            for record in (again, recorded)
        ]
        differs = f"differs in {', '.join(found)}; training loss {losses[0]}, recorded {losses[1]}"
        print(f"{name}: {differs if found else 'equal, bit by bit'}", flush=True)
    return num_differing


def main() -> int:
    """List, run or repeat cells."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("overrides", nargs="*", help="more keys of train.py, for a trial with other --records")
    parser.add_argument("--list", action="store_true", help="print the cells and run nothing")
    parser.add_argument("--next", type=int, metavar="N", help="run only the next N cells without a record")
    parser.add_argument("--jobs", type=int, default=1, help="number of concurrent cells, one thread each")
    parser.add_argument("--only", nargs="+", metavar="ID", help="repeat these cells and compare")
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs" / "norm_order_study", help="run folders")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records, one per cell")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, but is {options.jobs}")
    outputs, records = options.outputs.resolve(), options.records.resolve()
    if options.overrides and records == RECORDS:
        parser.error("--records must be another folder if overrides are given: the cells then differ from the study's")
    try:
        cells = all_cells(records)
        if options.list:
            for group, cell in cells:
                state = "done" if (records / f"{cell.name}.json").is_file() else f"{CPU_SECONDS[cell.layers]} s"
                print(f"{group:<16}{cell.name:<44}{state}")
            return 0
        require_clean()
        outputs.mkdir(parents=True, exist_ok=True)
        if options.only:
            return int(repeat(options.only, records, outputs, options.overrides) > 0)
        run_missing(options.jobs, options.next, options.overrides, outputs, records)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
