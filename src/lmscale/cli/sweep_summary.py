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
            a task, the highest is best; `objective` precedes it. Runs of several tasks are ranked within each.
    """

    def __init__(self, metric: str) -> None:
        self.metric = metric

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Read the records below the sweep's folder; a sweep without any leaves nothing."""
        folder = Path(config.hydra.sweep.dir)
        groups: dict[str, list[dict[str, Any]]] = {}  # runs by the metric that ranks them
        for path in sorted(folder.rglob("record.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            metric, run = self._metric_of(record, config), path.parent.relative_to(folder).as_posix()
            if (value := record["metrics"].get(metric, {}).get("value")) is not None:
                groups.setdefault(metric, []).append({metric: value, "run": run} | _overrides(record))
        for metric, runs in groups.items():
            runs.sort(key=lambda run: run[metric], reverse="/" not in self.metric)
            print(f"\n{len(runs)} runs, best {metric} first")
            print("\n".join(_aligned(runs, _columns(runs, [metric]))))
        if groups:
            self._write(folder, groups)

    def _metric_of(self, record: dict[str, Any], config: DictConfig) -> str:
        if "/" in self.metric:
            return self.metric
        return config.objective or hydra.utils.get_method(self.metric)(record["config"]["task"]["name"])

    def _write(self, folder: Path, groups: dict[str, list[dict[str, Any]]]) -> None:
        """One table and one figure of all runs."""
        with open(folder / TABLE, "w", encoding="utf-8", newline="") as file:
            runs = [run for group in groups.values() for run in group]
            table = csv.DictWriter(file, _columns(runs, list(groups)), extrasaction="ignore")
            table.writeheader()
            table.writerows(runs)
        print(f"table: {folder / TABLE}", flush=True)
        trained = {
            metric: [run for run in runs if (folder / run["run"] / "metrics.csv").is_file()]
            for metric, runs in groups.items()
        }
        if any(trained.values()):
            _draw(folder, {metric: runs for metric, runs in trained.items() if runs})
            print(f"figure: {folder / FIGURE}", flush=True)


def _overrides(record: dict[str, Any]) -> dict[str, str]:
    parts = (override.partition("=") for override in record["config"]["overrides"])
    return {key.lstrip("+"): choice for key, _, choice in parts}


def _columns(runs: list[dict[str, Any]], metrics: list[str]) -> list[str]:
    """The metrics, the run and the keys in which the runs differ."""
    keys = dict.fromkeys(key for run in runs for key in run if key not in (*metrics, "run"))
    return [*metrics, "run", *(key for key in keys if len({str(run.get(key)) for run in runs}) > 1)]


def _aligned(runs: list[dict[str, Any]], columns: list[str]) -> list[str]:
    rows = [columns, *([_shown(run.get(key, "")) for key in columns] for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _draw(folder: Path, groups: dict[str, list[dict[str, Any]]]) -> None:
    """The training losses, one curve per run, the best one first in the legend; one panel per metric."""
    import matplotlib  # with seaborn and pandas it takes seconds

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import pandas
    import seaborn

    seaborn.set_theme(style="whitegrid")
    figure, panels = plt.subplots(len(groups), figsize=(8, 5 * len(groups)), layout="constrained", squeeze=False)
    for (metric, runs), axes in zip(groups.items(), panels[:, 0], strict=True):
        tables, (_, _, *keys) = [], _columns(runs, [metric])
        for run in runs:
            label = ", ".join(f"{key}={run.get(key, '')}" for key in keys) or run["run"]
            tables.append(pandas.read_csv(folder / run["run"] / "metrics.csv").assign(run=label))
        palette = "colorblind" if len(runs) <= 10 else "viridis"
        rows = pandas.concat(tables, ignore_index=True)
        single = len(rows) == len(runs)  # a line through one point is not visible
        look = {"palette": palette, "errorbar": None, "marker": "o" if single else None}
        seaborn.lineplot(rows, x="step", y="train/loss", hue="run", ax=axes, **look)
        title = f"{len(runs)} runs, best {metric} first"
        axes.set(xlabel="optimizer step", ylabel="training loss (nats)", title=title)
        axes.legend(fontsize="x-small")
    figure.savefig(folder / FIGURE, dpi=200)
    plt.close(figure)
