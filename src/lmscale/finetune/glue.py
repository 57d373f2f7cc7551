"""GLUE: its table from the records of finetunings, and its submission."""

import statistics
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..config.finetune import GLUE
from ..shared_files import replacing
from ..text.tables import tsv_rows
from .protocol import Setting, read_runs, score_of, settings_of

HEADER = "index\tprediction"
# Metrics whose mean is GLUE's score of a task; `accuracy` for the others.
METRICS = {"cola": ["matthews"], "mrpc": ["accuracy", "f1"], "qqp": ["accuracy", "f1"], "stsb": ["pearson", "spearman"]}
METRICS |= {"mnli": ["accuracy_matched", "accuracy_mismatched"]}
# Rows of the published development and test sets.
DEV_ROWS = {
    **{"cola": {"dev": 1_043}, "sst2": {"dev": 872}, "mrpc": {"dev": 408}, "stsb": {"dev": 1_500}},
    **{"qqp": {"dev": 40_430}, "mnli": {"matched": 9_815, "mismatched": 9_832}, "qnli": {"dev": 5_463}},
    **{"rte": {"dev": 277}, "wnli": {"dev": 71}},
}
TEST_ROWS = {
    **{"CoLA": 1_063, "SST-2": 1_821, "MRPC": 1_725, "STS-B": 1_379, "QQP": 390_965, "MNLI-m": 9_796},
    **{"MNLI-mm": 9_847, "QNLI": 5_463, "RTE": 3_000, "WNLI": 146, "AX": 1_104},
}
TEST_SETS = {"MNLI-m": "test_matched", "MNLI-mm": "test_mismatched", "AX": "ax"}  # `test` of every other file


def submission_file(task: str, set_name: str) -> str:
    """The file of a set's predictions; GLUE calls its diagnostic set AX."""
    if task != "mnli":
        return f"{GLUE.get(task, task)}.tsv"
    if set_name == "ax" or "diagnostic" in set_name:
        return "AX.tsv"
    return "MNLI-mm.tsv" if "mismatched" in set_name else "MNLI-m.tsv"


@dataclass(frozen=True)
class TaskScore:
    """The best setting of one task.

    Args:
        metrics: by name, the median over the seeds.
        score: GLUE's score, a run's mean over its metrics; the median over the seeds.
        num_examples: number of scored development examples.
        labels: classes that a submission may contain; None: numbers from 0 to 5.
        num_settings: number of settings, of which this one has the best median.
    """

    metrics: dict[str, float]
    score: float
    num_examples: int
    labels: list[str] | None
    setting: Setting
    num_settings: int


def read_scores(folder: Path) -> dict[str, TaskScore]:
    """The score of each task of GLUE that has runs below a folder, by the task's name, in GLUE's order.

    Raises:
        ValueError: there is no run; or a run lacks a metric, or has one setting and seed in common with another.
    """
    found, runs_of = {}, read_runs(folder)
    if not set(GLUE) & set(runs_of):
        raise ValueError(f"{folder} must have finetunings on tasks of GLUE below it, but has {', '.join(runs_of)}")
    for task in (task for task in GLUE if task in runs_of):
        runs = runs_of[task]
        settings = settings_of(runs)
        best, config = settings[0], runs[settings[0].median_run]["config"]
        sets = {name: scored for name, scored in config.get("sets", {}).items() if name in DEV_ROWS[task]}
        names = [f"{task}/{name}" for name in METRICS.get(task, ["accuracy"])]
        if f"{names[0]}_dev" in runs[best.median_run]["metrics"]:  # without it they are of all validation sets
            names = [f"{name}_dev" for name in names]
        lacking = [name for name in names if name not in runs[best.median_run]["metrics"]]
        if lacking:
            raise ValueError(
                f"{best.median_run} must have the metrics {', '.join(names)}, but lacks {', '.join(lacking)}"
            )
        of_runs = [[score_of(runs[run], name) for name in names] for run in best.scores]
        medians = [statistics.median(values) for values in zip(*of_runs, strict=True)]
        found[task] = TaskScore(
            metrics=dict(zip(names, medians, strict=True)),
            score=statistics.median(map(statistics.mean, of_runs)),
            num_examples=sum(scored["examples"] for scored in sets.values()),
            labels=config["task"].get("labels"),
            setting=best,
            num_settings=len(settings),
        )
    return found


def write_submission(scores: dict[str, TaskScore], target: Path) -> dict[str, str]:
    """Zip the median runs' predictions of GLUE's test sets; without any, write nothing.

    Returns:
        the reason for each missing file, by name.

    Raises:
        ValueError: the zip cannot be written.
    """
    files, problems = {}, {}
    for name, rows in TEST_ROWS.items():
        task = "mnli" if name in TEST_SETS else next(task for task, its_name in GLUE.items() if its_name == name)
        if task not in scores:
            problems[f"{name}.tsv"] = f"there is no run of task={task}"
            continue
        run = scores[task].setting.median_run
        path = run / "predictions" / TEST_SETS.get(name, "test") / f"{name}.tsv"
        if not path.is_file():
            problems[path.name] = f"{run} has not predicted it (task.submit=true)"
            continue
        try:
            _check_predictions(path, rows, scores[task].labels)
            files[path.name] = path
        except ValueError as error:
            problems[path.name] = str(error)
    if files:
        try:
            with replacing(target) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, path in files.items():
                    archive.write(path, name)
        except OSError as error:
            rule = "must be written to a folder with free space"
            raise ValueError(f"the submission {rule}, but {target}: {error.strerror or error}") from None
    return problems


def _check_predictions(path: Path, num_rows: int, labels: list[str] | None) -> None:
    """Check that GLUE would accept a file.

    Raises:
        ValueError: it would not.
    """
    header, rows = tsv_rows(path)
    if "\t".join(map(str, header)) != HEADER:
        raise ValueError(f"{path} line 1 must be index and prediction, but is {', '.join(map(str, header))}")
    found = 0
    for where, cells in rows:
        if cells[0] != str(found):
            raise ValueError(f"{path} {where} must have the index {found}, but has {cells[0]!r}")
        if len(cells) != 2 or not _is_valid(cells[1], labels):
            rule = f"one of {', '.join(labels)}" if labels else "a number from 0 to 5"
            raise ValueError(f"{path} {where} must have {rule}, but has {', '.join(cells[1:])}")
        found += 1
    if found != num_rows:
        raise ValueError(f"{path} must have {num_rows:,} rows, as GLUE's test set, but has {found:,}")


def _is_valid(prediction: str, labels: list[str] | None) -> bool:
    if labels is not None:
        return prediction in labels
    try:
        return 0 <= float(prediction) <= 5
    except ValueError:
        return False
