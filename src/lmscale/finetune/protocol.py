"""The paper's protocol over many runs: the best setting of a search, and the median over seeds."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.finetune import TASKS
from ..config.from_dict import flatten
from ..results import RECORD, read_record
from .tasks import objective_of

# Keys that may differ between runs of one setting (seed and layout), or that follow from the seed or the path.
_NOT_A_SETTING = {
    *("seed", "parallel", "micro_batch_size", "run_dir", "overrides", "cache_dir", "sets", "objective", "digest"),
}


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in their seed and their layout.

    Args:
        differing: keys in which the settings of a folder differ, with this setting's values.
        scores: development score by run folder.
    """

    differing: dict[str, Any]
    scores: dict[Path, float]

    @property
    def median(self) -> float:
        """Median development score."""
        return statistics.median(self.scores.values())

    @property
    def median_run(self) -> Path:
        """The run with the median score; for an even number of runs, the lower of the two middle ones."""
        return sorted(self.scores, key=lambda run: (self.scores[run], str(run)))[(len(self.scores) - 1) // 2]


def read_settings(folder: str | Path, metric: str | None = None) -> list[Setting]:
    """Read the settings of all finetunings below a folder, ordered by descending median.

    Args:
        metric: metric to compare; None uses the task's objective (accuracy, or F1 for SQuAD).

    Raises:
        ValueError: there are no records, they are of several tasks, a metric is missing, or two runs have one seed.
    """
    runs = {path.parent: read_record(path) for path in sorted(Path(folder).rglob(RECORD))}
    runs = {run: record for run, record in runs.items() if _task_of(record)}
    if not runs:
        raise ValueError(f"{folder} must have records of finetunings below it, but has none")
    tasks = sorted({_task_of(record) for record in runs.values()})
    if len(tasks) > 1:
        raise ValueError(f"the runs of {folder} must be of one task, but are of {', '.join(tasks)}")
    name = metric or objective_of(tasks[0])
    flat = {
        run: flatten({key: value for key, value in record["config"].items() if key not in _NOT_A_SETTING})
        for run, record in runs.items()
    }
    keys = {key for values in flat.values() for key in values}
    differing = sorted(key for key in keys if len({repr(values.get(key)) for values in flat.values()}) > 1)
    found: dict[str, Setting] = {}
    seeds: dict[tuple[str, int], Path] = {}
    for run, record in runs.items():
        if record.get("metrics", {}).get(name, {}).get("value") is None or "seed" not in record:
            found_names = ", ".join([*record.get("metrics", {}), *(["no seed"] if "seed" not in record else [])])
            raise ValueError(f"{run / RECORD} must have the metric {name} and a seed, but has {found_names}")
        values = {key: flat[run].get(key) for key in differing}
        twin = seeds.setdefault((repr(values), record["seed"]), run)
        if twin != run:
            raise ValueError(f"runs of one setting must differ in their seed, but those of {twin} and {run} are equal")
        setting = found.setdefault(repr(values), Setting(values, {}))
        setting.scores[run] = record["metrics"][name]["value"]
    return sorted(found.values(), key=lambda setting: -setting.median)


def _task_of(record: dict[str, Any]) -> str | None:
    """Return the benchmark of a finetuning's record; None for other records."""
    config = record.get("config")
    task = config.get("task") if isinstance(config, dict) else None
    is_ours = isinstance(task, dict) and (task.get("name") in TASKS or task.get("columns"))
    return task["name"] if is_ours else None
