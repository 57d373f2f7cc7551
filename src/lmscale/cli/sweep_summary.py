"""What a `-m` sweep leaves: a table of its runs, best first, and a figure."""

import csv
import json
from pathlib import Path
from typing import Any

import hydra
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

TABLE, FIGURE = "sweep.csv", "sweep.png"


class SweepSummary(Callback):
    """A Hydra callback that prints the runs of a finished sweep, and writes sweep.csv and sweep.png into its folder.

    Args:
        metric: of the runs' records, the lowest is best: `val/loss`. Or the dotted path of a function that names it for
            a task, the highest is best; `objective` precedes it.
    """

    def __init__(self, metric: str) -> None:
        self.metric = metric

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Read the records below the sweep's folder; a sweep without any leaves nothing."""
        folder, metric, sign = Path(config.hydra.sweep.dir), self.metric, 1
        if "/" not in metric:
            metric, sign = config.objective or hydra.utils.get_method(metric)(config.task.name), -1
        runs = [run for path in sorted(folder.rglob("record.json")) if (run := _read(path, folder, metric)) is not None]
        if not runs:
            return
        runs.sort(key=lambda run: sign * run[metric])
        constant = {key for key in runs[0] if len({str(run.get(key)) for run in runs}) == 1} - {metric, "run"}
        columns = [key for key in dict.fromkeys(key for run in runs for key in run) if key not in constant]
        print(f"\n{len(runs)} runs, best {metric} first")
        print("\n".join(_aligned(runs, columns)))
        with open(folder / TABLE, "w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, columns, extrasaction="ignore")
            table.writeheader()
            table.writerows(runs)
        print(f"table: {folder / TABLE}", flush=True)
        trained = [run for run in runs if (folder / run["run"] / "metrics.csv").is_file()]
        if trained:
            _draw(folder, trained, columns[2:])
            print(f"figure: {folder / FIGURE}", flush=True)


def _read(path: Path, folder: Path, metric: str) -> dict[str, Any] | None:
    """The metric, the folder and the overrides of one run; None if its record lacks the metric."""
    record = json.loads(path.read_text(encoding="utf-8"))
    value = record["metrics"].get(metric, {}).get("value")
    if value is None:
        return None
    overrides = (override.partition("=") for override in record["config"]["overrides"])
    found = {metric: value, "run": path.parent.relative_to(folder).as_posix()}
    return found | {key.lstrip("+"): choice for key, _, choice in overrides}


def _aligned(runs: list[dict[str, Any]], columns: list[str]) -> list[str]:
    rows = [columns, *([_shown(run.get(key, "")) for key in columns] for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _draw(folder: Path, runs: list[dict[str, Any]], keys: list[str]) -> None:
    """The training losses, one curve per run, the best one first in the legend."""
    import matplotlib  # with seaborn and pandas it takes seconds

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import pandas
    import seaborn

    tables = []
    for run in runs:
        label = ", ".join(f"{key}={run.get(key, '')}" for key in keys) or run["run"]
        tables.append(pandas.read_csv(folder / run["run"] / "metrics.csv").assign(run=label))
    seaborn.set_theme(style="whitegrid")
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    palette = "colorblind" if len(runs) <= 10 else "viridis"
    rows = pandas.concat(tables, ignore_index=True)
    seaborn.lineplot(rows, x="step", y="train/loss", hue="run", palette=palette, errorbar=None, ax=axes)
    axes.set(xlabel="optimizer step", ylabel="training loss (nats)", title=f"{len(runs)} runs, the best one first")
    axes.legend(fontsize="x-small")
    figure.savefig(folder / FIGURE, dpi=200)
    plt.close(figure)
