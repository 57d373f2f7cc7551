"""Ensembles of finetuned models: mean probabilities for classes and choices, mean outputs for numbers and spans."""

from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import softmax

from .outputs import SetOutputs, read_outputs, write_predictions
from .scoring import predict_sets
from .tasks import HeadKind, benchmark_of

_DECODING_KEYS = ("max_answer_length", "num_best", "null_threshold", "labels", "value_range")


def ensemble(runs: list[Path], out: Path) -> tuple[dict[str, float], list[str]]:
    """Combine the outputs of runs for each set, score them, and write the predictions.

    For classification and choice, the members' probabilities are averaged. For spans, their logits are averaged per
    token in the same windows, so an answer can win that is no member's best; SQuAD 2.0's threshold is tuned again.

    Args:
        runs: run folders of one task.
        out: folder for `<set>/` with the predictions.

    Returns:
        metrics by name, as for a single run, and warnings.

    Raises:
        ValueError: there are fewer than two runs or one is given twice; tasks, sets, ids, labels, questions, windows,
            decoding settings or validation sets differ; or a folder is damaged.

    Source: section 5.3 (ensembles of five); Megatron-LM v1.0's `ensemble_classifier.py` also averages probabilities;
        nothing was published for spans.
    """
    if len(runs) < 2 or len({run.resolve() for run in runs}) < len(runs):
        raise ValueError(f"an ensemble must have at least two runs, each once, but has {', '.join(map(str, runs))}")
    names = [_sets_of(run) for run in runs]
    for run, found in zip(runs, names, strict=True):
        if found != names[0]:
            raise ValueError(
                f"{run} must have the sets of {runs[0]}, {', '.join(names[0])}, but has {', '.join(found)}"
            )
    members = {name: [read_outputs(run / "predictions" / name) for run in runs] for name in names[0]}
    for name, outputs in members.items():
        for run, member in zip(runs, outputs, strict=True):
            _check_member(member, outputs[0], f"{run}, set {name},", runs[0])
    task = next(iter(members.values()))[0].task
    sets = {name: outputs[0].features for name, outputs in members.items()}
    logits = {name: _combine(outputs) for name, outputs in members.items()}
    chosen_on = [name for name in task.chosen_on() if name in sets]
    predictions, metrics = predict_sets(task, sets, logits, chosen_on)
    for name, prediction in predictions.items():
        write_predictions(out / name, task, name, prediction)
    return metrics, [alarm for prediction in predictions.values() for alarm in prediction.alarms]


def _sets_of(run: Path) -> list[str]:
    folder = run / "predictions"
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if not names:
        raise ValueError(f"{run} must be the folder of a completed finetuning, but has no predictions")
    return names


def _check_member(member: SetOutputs, first: SetOutputs, who: str, first_run: Path) -> None:
    """Check that a member has scored the same items in the same order as the first one."""
    facts = _facts(first)
    for what, of_one in _facts(member).items():
        if of_one != facts[what]:
            is_short = len(f"{facts[what]}{of_one}") < 200
            values = f", {facts[what]}, but has {of_one}" if is_short else ", but has others"
            raise ValueError(f"{who} must have the {what} of {first_run}{values}")


def _facts(outputs: SetOutputs) -> dict[str, Any]:
    """What must be equal in all members, by its name in messages."""
    task, features = outputs.task, outputs.features
    arrays = (features.labels, features.offsets, features.window_starts)
    return {
        "task": task.name,
        "validation sets": task.chosen_on(),
        **{f"`task.{key}`": getattr(task, key) for key in _DECODING_KEYS},
        "number of ids": len(features.ids),
        "ids": features.ids,
        "questions": features.facts,  # of SQuAD the whole file, of RACE the levels
        "labels and windows (task.max_seq_length, task.doc_stride, tokenizer)": [
            None if array is None else (array.shape, array.tobytes()) for array in arrays
        ],
    }


def _combine(members: list[SetOutputs]) -> list[np.ndarray]:
    """Return the ensemble's logits per item."""
    of_items = list(zip(*(member.logits for member in members), strict=True))
    if benchmark_of(members[0].task).head in (HeadKind.SPAN, HeadKind.REGRESSION):
        return [np.mean(np.stack(rows).astype(np.float64), axis=0) for rows in of_items]
    return [np.log(softmax(np.stack(rows).astype(np.float64), axis=1).mean(axis=0)) for rows in of_items]
