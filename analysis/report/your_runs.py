"""Any pretraining run folders as a table and curves, as in `notebooks/06_your_runs.ipynb`; run as a script, a figure.

Losses over different validation sets are not comparable: each set is ranked and drawn by itself.

python analysis/report/your_runs.py outputs/gpt_tiny/RUN multirun/SWEEP --output curves.png
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.report.records import ANALYSIS
from analysis.report.style import house_style, label_ends, page_figure, prepare_figure
from lmscale.cli.errors import one_line_errors
from lmscale.results import existing_path, path_argument, read_record, validation_set

ROOT = ANALYSIS.parent
NEWEST = 8  # runs shown by default
LONGEST = 32  # letters of a label made of overrides
RANKED = ["validation set", "run"]  # index of the table
_TABLE = {"val/loss": "validation loss", "train/loss": "training loss"}
_TABLE |= {"tokens_per_s": "tokens/s, last row", "train_time": "training, s"}
_CURVE = {"step": "step", "train/loss": "train", "val/loss": "val", "tokens_per_s": "tokens_per_s"}


@dataclass(frozen=True)
class Run:
    """What the table and the figure show of a pretraining run; `read_run` has checked it.

    Args:
        folder: of the run.
        validation_set: name of the text of its validation loss.
        overrides: of its command, without those of Hydra itself.
        row: of the table; a metric that is absent or not finite is nan.
        curve: columns step, train, val and tokens_per_s as recorded; the validation before the first step is of the
            record.
    """

    folder: Path
    validation_set: str
    overrides: list[str]
    row: dict[str, Any]
    curve: pd.DataFrame


def find_runs(folders: Sequence[str | Path] = (), root: Path = ROOT) -> tuple[list[Run], list[str]]:
    """The pretraining runs at or below `folders`; without any, the newest ones of `outputs/` and `multirun/` in `root`.

    Returns:
        the runs, and a line for each other folder with a record or metrics that says why it is left out.

    Raises:
        ValueError: one of `folders` holds no run.
    """
    runs, left_out, known = [], [], set()
    for folder in map(Path, folders) if folders else (root / "outputs", root / "multirun"):
        held = sorted({path.parent for name in ("record.json", "metrics.csv") for path in folder.rglob(name)})
        if folders and not held:
            raise ValueError(
                f"a run folder must have record.json or metrics.csv, but {folder} and the folders in it have none"
            )
        for run in held:
            if run.resolve() in known:
                continue
            known.add(run.resolve())
            try:
                runs.append(read_run(run))
            except ValueError as error:
                left_out.append(f"left out: {_shorten(run)}: {error}")
    if not folders:
        runs = sorted(runs, key=lambda run: (run.folder / "record.json").stat().st_mtime, reverse=True)[:NEWEST]
    return runs, left_out


def read_run(folder: Path) -> Run:
    """Read a run folder, and check everything that is shown of it.

    Raises:
        ValueError: a file is missing or damaged, or the run is of another kind.
    """
    if not (folder / "record.json").exists():
        raise ValueError("it has not finished: it has no record.json; resume=auto continues a pretraining")
    if not (folder / "metrics.csv").exists():
        raise ValueError("it has no metrics.csv")
    record = read_record(folder / "record.json")
    of_pretraining = (("metrics", "val/loss"), ("config", "corpus"))
    if all(isinstance(record.get(part), dict) and name not in record[part] for part, name in of_pretraining):
        raise ValueError(f"it is not a pretraining run ({record.get('name')})")
    file = "record.json"
    try:
        metrics = record["metrics"]
        row = {shown: _value(metrics, name) for name, shown in _TABLE.items()}
        row |= {"unit": f"{metrics['val/loss']['unit']:s}", "folder": _shorten(folder)}  # `:s` refuses other types
        overrides = [word for word in record["config"]["overrides"] if not word.startswith("hydra.")]
        name, start = validation_set(record), _value(metrics, "val_start/loss")  # a resumed run has no start
        last_step = metrics["steps"]["value"]
        file = "metrics.csv"
        curve = _read_curve(folder / file, last_step)
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"its {file} is damaged ({type(error).__name__}: {reason})") from None
    before = pd.DataFrame([] if math.isnan(start) else [{"step": 0, "val": start}], columns=curve.columns)
    return Run(folder, name, overrides, row, pd.concat([before, curve], ignore_index=True))


def _value(metrics: dict[str, Any], name: str) -> float:
    value = metrics[name]["value"] if name in metrics else None
    return math.nan if value is None else float(value)


def _read_curve(path: Path, last_step: int) -> pd.DataFrame:
    rows = pd.read_csv(path)
    if not rows.index.equals(pd.RangeIndex(len(rows))):  # pandas has taken the first fields as an index
        raise ValueError("its rows have more fields than its header")
    if rows["step"].isna().any() or rows["train/loss"].isna().all():
        raise ValueError("it must have the step of every row and a training loss")
    if not rows["step"].is_monotonic_increasing or not rows["step"].is_unique:
        raise ValueError("its steps must increase")
    if not path.read_bytes().endswith(b"\n"):
        raise ValueError("its last row is cut off")
    if rows["step"].iloc[-1] != last_step:
        raise ValueError(f"it must end at step {last_step}, the run's last, but ends at {rows['step'].iloc[-1]}")
    return rows.reindex(columns=list(_CURVE)).rename(columns=_CURVE).astype(float)


def tabulate(runs: Sequence[Run]) -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
    """The table of runs, best first within each validation set, and the curve of each by its label.

    A label has the overrides that differ between the runs, or if they are long or do not tell two apart the folder.
    """
    shared = set.intersection(*(set(run.overrides) for run in runs))
    labels = [", ".join(word for word in run.overrides if word not in shared) for run in runs]
    labels = [
        label if 0 < len(label) <= LONGEST and labels.count(label) == 1 else _short_path(run, runs)
        for label, run in zip(labels, runs, strict=True)
    ]
    table = pd.DataFrame([run.row for run in runs])
    table.index = pd.MultiIndex.from_arrays([[run.validation_set for run in runs], labels], names=RANKED)
    return _rank(table), {label: run.curve for label, run in zip(labels, runs, strict=True)}


def _short_path(run: Run, runs: Sequence[Run]) -> str:
    """The last parts of a run's folder, as many as no other run's ends in."""
    folders, parts = [each.folder.resolve().parts for each in runs], run.folder.resolve().parts
    ends = ("/".join(parts[-n:]) for n in range(1, len(parts) + 1) if sum(f[-n:] == parts[-n:] for f in folders) == 1)
    return next(ends)


def _rank(table: pd.DataFrame) -> pd.DataFrame:
    return table.sort_values([RANKED[0], "validation loss"])


def _shorten(folder: Path) -> str:
    return str(folder.resolve().relative_to(ROOT)) if folder.resolve().is_relative_to(ROOT) else str(folder)


def demo_runs() -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
    """The same of the committed record of `make demo`."""
    record = json.loads((ANALYSIS / "demo" / "records" / "demo.json").read_text(encoding="utf-8"))
    titles, curves = record["config"]["titles"], record["config"]["curves"]
    after = [record["metrics"][f"{model}/after"] for model in titles]
    table = pd.DataFrame({"validation loss": [m["value"] for m in after], "unit": [m["unit"] for m in after]})
    names = [title.rpartition(", ")[::-2] for title in titles.values()]  # what is predicted, the model
    table.index = pd.MultiIndex.from_tuples(names, names=RANKED)
    return _rank(table), {label: pd.DataFrame(curves[model]) for model, (_, label) in zip(titles, names, strict=True)}


def draw_runs(table: pd.DataFrame, curves: dict[str, pd.DataFrame]) -> Figure:
    """Draw the recorded training and validation losses, and the throughput, of each run; the best is the darkest.

    Each validation set has its own row of panels; runs of one step have no panel of throughput. Validations are not
    joined: nothing is known between them.
    """
    groups = [(name, rows.droplevel(0)) for name, rows in table.groupby(level=0, sort=False)]
    best = [f"{rows['validation loss'].iloc[0]:.3f} {rows['unit'].iloc[0]}, {rows.index[0]}" for _, rows in groups]
    with house_style():
        figure = page_figure("Lowest validation loss: " + "; ".join(best), 0.6 + 3 * len(groups))
        grid = figure.add_gridspec(len(groups), 2, width_ratios=(2, 1))
        for number, (name, rows) in enumerate(groups):
            has_speed = any(curves[label]["tokens_per_s"].count() > 1 for label in rows.index)
            loss = figure.add_subplot(grid[number, 0] if has_speed else grid[number, :])
            speed = figure.add_subplot(grid[number, 1]) if has_speed else None
            ends = {}
            for i, label in enumerate(rows.index):
                curve, color = curves[label], colormaps["viridis"](0.5 * i / max(len(rows) - 1, 1))
                loss.plot(curve["step"], curve["train"], color=color, linewidth=0.8, alpha=0.6)
                scored = curve.dropna(subset=["val"])
                loss.plot(scored["step"], scored["val"], color=color, marker="o", markersize=4, linestyle="none")
                if has_speed:
                    speed.plot(curve["step"], curve["tokens_per_s"], color=color, linewidth=0.8)
                last = scored if len(scored) else curve.assign(val=curve["train"])
                ends[label] = (*last[["step", "val"]].iloc[-1], color)
            loss.set(xlabel="optimizer step", ylabel=f"loss, {rows['unit'].iloc[0]}")
            loss.set_title(f"{name}\nline: training; points: validation", loc="left")
            if has_speed:
                speed.set(xlabel="optimizer step", title="tokens per second", ylim=(0, None))
            for axis in filter(None, (loss, speed)):
                axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            label_ends(loss, ends, gap=0.07)
    return figure


@one_line_errors()
def main() -> int:
    """Print the table of the runs and draw their curves."""
    parser = argparse.ArgumentParser(description="Training and validation loss of run folders, and their throughput.")
    parser.add_argument(
        "runs", nargs="*", type=existing_path, help=f"run folders or folders of runs; none: the {NEWEST} newest"
    )
    parser.add_argument("--output", type=path_argument, default=ROOT / "outputs" / "figures" / "your_runs.png")
    options = parser.parse_args()
    prepare_figure("--output", options.output)
    runs, left_out = find_runs(options.runs)
    print("\n".join(left_out), end="\n" if left_out else "")
    if not runs:
        raise ValueError(f"`runs` must have a pretraining run, but {options.runs or ROOT} has none")
    table, curves = tabulate(runs)
    draw_runs(table, curves).savefig(options.output)
    for name, rows in table.groupby(level=0, sort=False):
        print(f"{name}\n{rows.droplevel(0).to_string(float_format='{:,.3f}'.format)}")
    print(f"figure: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
