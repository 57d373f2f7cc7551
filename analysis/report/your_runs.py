"""Any run folders as a table and curves, as in `notebooks/06_your_runs.ipynb`; run as a script, a figure.

python analysis/report/your_runs.py outputs/gpt_tiny/RUN multirun/SWEEP --output curves.png
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import pandas as pd
import seaborn as sns
from matplotlib import colormaps
from matplotlib.figure import Figure

from analysis.report.records import ANALYSIS
from analysis.report.style import house_style, label_ends, page_figure
from lmscale.results import load_records

ROOT = ANALYSIS.parent
NEWEST = 8  # runs shown by default
LONGEST = 32  # letters of a label made of overrides
SMOOTH = 20  # rows of a mean of the training loss and the throughput
_TABLE = {"val/loss": "validation loss", "train/loss": "training loss", "tokens_per_s": "tokens/s", "train_time": "s"}


def find_runs(folders: Sequence[str | Path] = (), root: Path = ROOT) -> list[Path]:
    """The run folders at or below `folders`; without any, the newest ones of `outputs/` and `multirun/` in `root`.

    Raises:
        ValueError: one of `folders` holds no finished run.
    """
    if not folders:
        newest = _runs_below(root / "outputs") + _runs_below(root / "multirun")
        return sorted(newest, key=lambda run: (run / "record.json").stat().st_mtime, reverse=True)[:NEWEST]
    found = {Path(folder): _runs_below(Path(folder)) for folder in folders}
    for folder, runs in found.items():
        if not runs:
            raise ValueError(f"`folders` must hold run folders with record.json and metrics.csv, but {folder} has none")
    return [run for runs in found.values() for run in runs]


def _runs_below(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.rglob("record.json") if (path.parent / "metrics.csv").exists())


def read_runs(runs: Sequence[Path]) -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
    """The table of runs, best first, and the curves of each by its label.

    A label has the overrides that differ between the runs, or the folder's name if they are long. Curves have the
    columns step, train, val, tokens_per_s; the validation before the first step is of the record.
    """
    records = pd.concat([load_records(run) for run in runs], keys=range(len(runs))).droplevel(1)
    overrides = [[word for word in words if not word.startswith("hydra.")] for words in records["config.overrides"]]
    shared = set.intersection(*map(set, overrides))
    labels = [", ".join(word for word in words if word not in shared) for words in overrides]
    labels = [label if 0 < len(label) <= LONGEST else run.name for label, run in zip(labels, runs, strict=True)]
    labels = [label if labels.count(label) == 1 else f"{label} ({i + 1})" for i, label in enumerate(labels)]
    columns = {name: shown for name, shown in _TABLE.items() if name in records}
    table = records[list(columns)].rename(columns=columns).assign(folder=[_shorten(run) for run in runs])
    table.index = pd.Index(labels, name="run")
    starts = records.get("val_start/loss", [math.nan] * len(runs))  # a resumed run has none
    curves = {label: _curve(run, start) for label, run, start in zip(labels, runs, starts, strict=True)}
    return table.sort_values("validation loss"), curves


def _curve(run: Path, start: float) -> pd.DataFrame:
    named = {"train/loss": "train", "val/loss": "val"}
    rows = pd.read_csv(run / "metrics.csv").rename(columns=named)[["step", "train", "val", "tokens_per_s"]]
    before = pd.DataFrame([] if math.isnan(start) else [{"step": 0, "val": start}])
    return pd.concat([before, rows], ignore_index=True)[rows.columns]


def _shorten(run: Path) -> str:
    return str(run.resolve().relative_to(ROOT)) if run.resolve().is_relative_to(ROOT) else str(run)


def demo_runs() -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
    """The same of the committed record of `make demo`."""
    record = json.loads((ANALYSIS / "demo" / "records" / "demo.json").read_text(encoding="utf-8"))
    titles, curves = record["config"]["titles"], record["config"]["curves"]
    losses = {title: record["metrics"][f"{model}/after"]["value"] for model, title in titles.items()}
    table = pd.DataFrame({"validation loss": losses}).rename_axis("run").sort_values("validation loss")
    return table, {titles[model]: pd.DataFrame(points) for model, points in curves.items()}


def draw_runs(table: pd.DataFrame, curves: dict[str, pd.DataFrame]) -> Figure:
    """Draw training (thin) and validation loss (points), and the throughput, of each run; the best is the darkest."""
    best = table.index[0]
    title = f"Lowest validation loss: {table['validation loss'].iloc[0]:.3f} nats, {best}"
    colors = {label: colormaps["viridis"](0.5 * i / max(len(table) - 1, 1)) for i, label in enumerate(table.index)}
    with house_style():
        figure = page_figure(title, 3.6)
        loss, speed = figure.subplots(1, 2, width_ratios=(2, 1))
        for label, color in colors.items():
            curve = curves[label]
            loss.plot(curve["step"], curve["train"].rolling(SMOOTH, 1).mean(), color=color, linewidth=0.8, alpha=0.5)
            scored = curve.dropna(subset=["val"])
            loss.plot(scored["step"], scored["val"], color=color, marker="o", markersize=4)
            speed.plot(curve["step"], curve["tokens_per_s"].rolling(SMOOTH, 1).median(), color=color, linewidth=1)
        loss.set(xlabel="optimizer step", ylabel="loss, nats")
        loss.set_title(f"thin: training, mean of {SMOOTH} rows; points: validation")
        speed.set(xlabel="optimizer step", title="tokens per second", ylim=(0, None))
        last = {label: curves[label].dropna(subset=["val"]).iloc[-1] for label in colors}
        label_ends(loss, {label: (row["step"], row["val"], colors[label]) for label, row in last.items()}, gap=0.07)
        sns.despine(figure)
    return figure


def main() -> int:
    """Print the table of the runs and draw their curves."""
    parser = argparse.ArgumentParser(description="Training and validation loss of run folders, and their throughput.")
    parser.add_argument("runs", nargs="*", help=f"run folders or folders of runs; none: the {NEWEST} newest")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "figures" / "your_runs.png")
    options = parser.parse_args()
    known = sorted(Figure().canvas.get_supported_filetypes())
    try:
        runs = find_runs(options.runs)
        if not runs:
            raise ValueError(f"`runs` must be given where {ROOT} has no run in outputs/ or multirun/, but are not")
        if options.output.suffix[1:] not in known:
            raise ValueError(f"`--output` must end in one of {', '.join(known)}, but is {options.output}")
        table, curves = read_runs(runs)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        draw_runs(table, curves).savefig(options.output)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{table.to_string(float_format='{:,.3f}'.format)}\nfigure: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
