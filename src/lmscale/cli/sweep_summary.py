"""What a `-m` sweep leaves: a table of its runs, best first, and a figure."""

import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import Any

import hydra
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from ..results import METRICS, RECORD, read_record, validation_set
from ..runtime.world import is_first_rank

TABLE, FIGURE = "sweep.csv", "sweep.png"
SET = "validation set"  # column of the table, if there are several


class SweepSummary(Callback):
    """A Hydra callback that prints the runs of a finished sweep, and writes sweep.csv and sweep.png into its folder.

    Args:
        metric: of the runs' records, the lowest is best: `val/loss`. Or the dotted path of a function that names it for
            the values of a task, the highest is best; `objective` precedes it. Runs of several tasks, or whose losses
            are means over different validation sets, are ranked within each.
    """

    def __init__(self, metric: str) -> None:
        self.metric = metric

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Rank the runs by their records below the sweep's folder; without records, nothing is written."""
        if not is_first_rank():
            return
        folder = Path(config.hydra.sweep.dir)
        groups: dict[tuple[str, str], list[dict[str, Any]]] = {}  # comparable runs, by metric and validation set
        for path in sorted(folder.rglob(RECORD)):
            run = path.parent.relative_to(folder).as_posix()
            try:
                record = read_record(path)
                metric = self._metric_of(record, config)
                entry = record["metrics"][metric]
                loss_over = validation_set(record) if "/" in self.metric else ""
            except (ValueError, KeyError, TypeError) as error:
                print(f"left out: {run}, whose record has no such metric or cannot be read ({error})")
                continue
            if entry["value"] is None:
                print(f"left out: {run}, whose {metric} is {entry['non_finite']}")
                continue
            row = {metric: entry["value"], "run": run} | _overrides(record) | {SET: loss_over}
            groups.setdefault((metric, loss_over), []).append(row)
        for (metric, loss_over), runs in groups.items():
            runs.sort(key=lambda run: run[metric], reverse="/" not in self.metric)
            print(f"\n{_heading(runs, metric, loss_over, groups)}")
            table = _table(runs, [metric])
            print(table.to_string(index=False, na_rep="", float_format="{:.4f}".format))
        if groups:
            self._write(folder, groups)

    def _metric_of(self, record: dict[str, Any], config: DictConfig) -> str:
        if "/" in self.metric:
            return self.metric
        return config.objective or hydra.utils.get_method(self.metric)(record["config"]["task"])

    def _write(self, folder: Path, groups: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
        """One table and one figure of all runs."""
        runs = [run for group in groups.values() for run in group]
        metrics = list(dict.fromkeys(metric for metric, _ in groups))
        _table(runs, metrics).to_csv(folder / TABLE, index=False, lineterminator="\r\n")
        print(f"table: {folder / TABLE}", flush=True)
        trained = {
            key: [run for run in runs if (folder / run["run"] / METRICS).is_file()] for key, runs in groups.items()
        }
        if any(trained.values()):
            _draw(folder, {key: runs for key, runs in trained.items() if runs})
            print(f"figure: {folder / FIGURE}", flush=True)


def _heading(runs: list[dict[str, Any]], metric: str, loss_over: str, groups: Collection[tuple[str, str]]) -> str:
    """Name the ranking metric, and the validation set if there are several, whose losses are not comparable."""
    several = sum(other == metric for other, _ in groups) > 1
    return f"{len(runs)} run{'s' * (len(runs) > 1)}, best {metric} first" + (f" ({loss_over})" if several else "")


def _overrides(record: dict[str, Any]) -> dict[str, str]:
    parts = (override.partition("=") for override in record["config"]["overrides"])
    return {key.lstrip("+"): choice for key, _, choice in parts}


def _table(runs: list[dict[str, Any]], metrics: list[str]) -> Any:
    """A pandas table of the metrics, the run and the keys in which the runs differ."""
    import pandas  # takes a second

    table = pandas.DataFrame(runs, dtype=object)
    keys = table.columns.drop([*metrics, "run"])
    return table[[*metrics, "run", *(key for key in keys if table[key].nunique(dropna=False) > 1)]]


def _draw(folder: Path, groups: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    """The training losses as recorded, one curve per run, the best one first in the legend; one panel per group."""
    import matplotlib  # with seaborn and pandas it takes seconds

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import pandas
    import seaborn
    from matplotlib.ticker import MaxNLocator

    seaborn.set_theme(style="whitegrid")
    figure, panels = plt.subplots(len(groups), figsize=(8, 5 * len(groups)), layout="constrained", squeeze=False)
    for ((metric, loss_over), runs), axes in zip(groups.items(), panels[:, 0], strict=True):
        tables, (_, _, *keys) = [], _table(runs, [metric]).columns
        for run in runs:
            label = ", ".join(f"{key}={run.get(key, '')}" for key in keys) or run["run"]
            tables.append(pandas.read_csv(folder / run["run"] / METRICS).assign(run=label, folder=run["run"]))
        palette = "colorblind" if len(runs) <= 10 else "viridis"
        marker = "o" if min(map(len, tables)) == 1 else None  # a line through one point is not visible
        rows = pandas.concat(tables, ignore_index=True)
        look = {"palette": palette, "units": "folder", "estimator": None, "marker": marker}  # runs are not averaged
        seaborn.lineplot(rows, x="step", y="train/loss", hue="run", ax=axes, **look)
        title = textwrap.fill(_heading(runs, metric, loss_over, groups), 90)
        axes.set(xlabel="optimizer step", ylabel="training loss (nats)", title=title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.legend(fontsize="x-small")
    figure.savefig(folder / FIGURE, dpi=200)
    plt.close(figure)
