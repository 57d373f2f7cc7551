"""Output files of a run per scored set: predictions in the benchmark's format, and inputs of an ensemble."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..config.finetune import TaskConfig
from ..config.from_dict import build, to_plain
from .features import Features, load_features, save_features
from .glue import HEADER, submission_file
from .scoring import Predictions

LOGITS, TASK, FEATURES = "logits.npy", "task.json", "features"


@dataclass(frozen=True)
class SetOutputs:
    """Logits of one set with its task and features."""

    task: TaskConfig
    features: Features
    logits: list[np.ndarray]


def write_outputs(
    folder: Path,
    task: TaskConfig,
    sets: dict[str, Features],
    predictions: dict[str, Predictions],
    logits: dict[str, list[np.ndarray]],
) -> None:
    """Write `folder/<set>/`: predictions, `logits.npy` (fp32 [n, classes], for spans [2, t]), and the features."""
    for name, features in sets.items():
        place = folder / name
        write_predictions(place, task, name, predictions[name])
        joined = np.concatenate(logits[name], axis=1) if features.offsets is not None else np.stack(logits[name])
        np.save(place / LOGITS, joined)
        (place / TASK).write_text(json.dumps(to_plain(task), indent=1), encoding="utf-8")
        (place / FEATURES).mkdir(exist_ok=True)
        save_features(features, place / FEATURES)


def write_predictions(folder: Path, task: TaskConfig, set_name: str, predictions: Predictions) -> None:
    """Write a set's predictions in the benchmark's submission format.

    GLUE: `RTE.tsv` or `MNLI-m.tsv` with index and prediction, and likewise for a user table. SQuAD: `predictions.json`
    of id and text, for 2.0 also `null_odds.json`. RACE, which has no such format: `predictions.json` of id and letter.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if task.columns is not None:
        rows = [HEADER, *(f"{key}\t{value}" for key, value in predictions.answers.items())]
        (folder / submission_file(task.name, set_name)).write_text("\n".join(rows) + "\n", encoding="utf-8")
    else:
        answers = json.dumps(predictions.answers, indent=1, ensure_ascii=False)
        (folder / "predictions.json").write_text(answers, encoding="utf-8")
    if predictions.null_odds is not None:
        # JSON has no infinity, which means that there is no other answer.
        odds = {key: value if math.isfinite(value) else 1e9 for key, value in predictions.null_odds.items()}
        (folder / "null_odds.json").write_text(json.dumps(odds, indent=1), encoding="utf-8")


def read_outputs(folder: Path) -> SetOutputs:
    """Read the outputs of one set.

    Raises:
        ValueError: the folder has no outputs, or they are incomplete.
    """
    try:
        task = build(TaskConfig, json.loads((folder / TASK).read_text(encoding="utf-8")), "task.")
        features = load_features(folder / FEATURES)
        joined = np.load(folder / LOGITS)
    except (OSError, EOFError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} must hold the outputs of a finetuning, but fails with {error}") from None
    expected = (2, len(features.tokens)) if features.offsets is not None else (len(features),)
    if joined.shape[: len(expected)] != expected:
        raise ValueError(f"{folder / LOGITS} must be of shape {expected}, but is of {joined.shape[: len(expected)]}")
    if features.offsets is not None:
        return SetOutputs(task, features, np.split(joined, features.starts[1:-1], axis=1))
    return SetOutputs(task, features, list(joined))
