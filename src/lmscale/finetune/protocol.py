"""The paper's protocol over many runs: the best setting of a search, and the median over seeds."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.finetune import objective_of
from ..config.from_dict import flatten
from ..results import RECORD, read_record

# Keys that may differ between runs of one setting (seed and layout), or that follow from the seed or the path.
_NOT_A_SETTING = {
    *("seed", "parallel", "micro_batch_size", "run_dir", "overrides", "cache_dir", "sets", "objective", "digest"),
}
# Beginnings of dotted keys on which the development score does not depend.
_WITHOUT_EFFECT = (
    "task.test",
    "task.submit",
    "trainer.save",
    "trainer.score_every_epoch",
    "trainer.scoring_batch_size",
)
_WITHOUT_EFFECT += ("trainer.log_every_steps", "trainer.accelerator", "trainer.num_threads")


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in their seed, their layout, and keys on which the score does not depend.

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


def read_runs(folder: str | Path) -> dict[str, dict[Path, dict[str, Any]]]:
    """Read the records of all finetunings below a folder: by task, the record of each run folder.

    Raises:
        ValueError: there are none, or one cannot be read.
    """
    found: dict[str, dict[Path, dict[str, Any]]] = {}
    for path in sorted(Path(folder).rglob(RECORD)):
        record = read_record(path)
        task = _task_of(record)
        if task is not None:
            _check_numbers(path, record)
            found.setdefault(task["name"], {})[path.parent] = record
    if not found:
        raise ValueError(f"{folder} must have records of finetunings below it, but has none")
    return found


def read_settings(folder: str | Path, metric: str | None = None) -> list[Setting]:
    """Read the settings of all finetunings below a folder, of one task; see `settings_of`."""
    runs = read_runs(folder)
    if len(runs) > 1:
        raise ValueError(f"the runs of {folder} must be of one task, but are of {', '.join(sorted(runs))}")
    return settings_of(next(iter(runs.values())), metric)


def settings_of(runs: dict[Path, dict[str, Any]], metric: str | None = None) -> list[Setting]:
    """Group the runs of a task by their settings, ordered by descending median.

    Args:
        metric: metric to compare, -inf where it is undefined; None uses the task's objective.

    Raises:
        ValueError: a metric is missing, or two runs of a setting have one seed.
    """
    flat = {
        run: flatten({key: value for key, value in record["config"].items() if key not in _NOT_A_SETTING})
        for run, record in runs.items()
    }
    keys = {key for values in flat.values() for key in values if not key.startswith(_WITHOUT_EFFECT)}
    differing = sorted(key for key in keys if len({repr(values.get(key)) for values in flat.values()}) > 1)
    found: dict[str, Setting] = {}
    seeds: dict[tuple[str, int], Path] = {}
    for run, record in runs.items():
        name = metric or objective_of(record["config"]["task"])
        if name not in record.get("metrics", {}) or "seed" not in record:
            found_names = ", ".join([*record.get("metrics", {}), *(["no seed"] if "seed" not in record else [])])
            raise ValueError(f"{run / RECORD} must have the metric {name} and a seed, but has {found_names}")
        values = {key: flat[run].get(key) for key in differing}
        twin = seeds.setdefault((repr(values), record["seed"]), run)
        if twin != run:
            raise ValueError(f"runs of one setting must differ in their seed, but those of {twin} and {run} are equal")
        setting = found.setdefault(repr(values), Setting(values, {}))
        setting.scores[run] = score_of(record, name)
    return sorted(found.values(), key=lambda setting: -setting.median)


def score_of(record: dict[str, Any], metric: str) -> float:
    """A metric of a record; -inf where it is undefined, the lowest in a median."""
    value = record["metrics"][metric]["value"]
    return -math.inf if value is None else value


def shown(score: float) -> str:
    """A score of a table, or that it is undefined."""
    return f"{score:.2f}" if math.isfinite(score) else "undefined"


def _check_numbers(path: Path, record: dict[str, Any]) -> None:
    try:
        numbers = [entry["value"] for entry in record.get("metrics", {}).values()]
        numbers += [entry["examples"] for entry in record["config"].get("sets", {}).values()]
        wrong = [number for number in numbers if not isinstance(number, int | float | None)]
    except (AttributeError, LookupError, TypeError):
        wrong = ["none"]
    if wrong:
        raise ValueError(f"{path} must have numbers as metrics and sizes of sets, but has {wrong[0]}")


def _task_of(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return the task of a finetuning's record; None for other records."""
    config = record.get("config")
    task = config.get("task") if isinstance(config, dict) else None
    return task if isinstance(task, dict) and isinstance(task.get("name"), str) and "validation" in task else None
