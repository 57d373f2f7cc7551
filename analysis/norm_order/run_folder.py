"""What a run of the norm-order study left in its folder: losses and gradient norms."""

import csv
import hashlib
import json
import math
import statistics
from pathlib import Path
from typing import Any

NATS, NATS_PER_TOKEN = "nats/masked token", "nats/token"  # of BERT and of GPT
WINDOW = 25  # steps averaged into one point of a curve
NORM_WINDOW = 10  # steps averaged into one gradient norm, except at step 1


def read_rows(run_dir: Path) -> list[dict[str, float]]:
    """The rows of metrics.csv with a finite loss and gradient; a run that diverged has others after them."""
    with open(run_dir / "metrics.csv", encoding="utf-8", newline="") as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    for row in rows:
        if "train/lm_loss" not in row:  # GPT has one term
            row["train/lm_loss"] = row["train/loss"]
    return [row for row in rows if math.isfinite(row["train/lm_loss"] + row["grad_norm"])]


def digest(rows: list[dict[str, float]]) -> str:
    """sha256 of the loss and the gradient norm of every step, equal only if all are equal in every bit."""
    text = repr([(row["train/lm_loss"], row["grad_norm"]) for row in rows])
    return hashlib.sha256(text.encode()).hexdigest()


def read_statistics(run_dir: Path) -> dict[str, dict[str, list[float | None]]]:
    """Statistics of the sublayers by step, name and `attention` or `mlp`, one number per layer, to six digits.

    A number that is not finite is None.

    Returns:
        `{"10": {"variance_ratio/mlp": [...], ...}, ...}`; empty if the run recorded none.
    """
    path, found = run_dir / "layer_statistics.jsonl", {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        at_step = json.loads(line)
        columns = found.setdefault(str(at_step["step"]), {})
        for entry in at_step["sublayers"]:
            for name in entry.keys() - {"layer", "sublayer"}:
                value = entry[name]
                shown = float(f"{value:.6g}") if math.isfinite(value) else None
                columns.setdefault(f"{name}/{entry['sublayer']}", []).append(shown)
    return {step: dict(sorted(columns.items())) for step, columns in found.items()}


def describe_losses(
    rows: list[dict[str, float]], diverged: bool, warmup_steps: int
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Metrics and curves of a run that logged every step, as `cells.py` reads them.

    Returns:
        metrics of the record; window, curve, validation and gradient_norms of its configuration.
    """
    losses = [row["train/lm_loss"] for row in rows] or [math.nan]
    curve = [statistics.fmean(losses[i : i + WINDOW]) for i in range(0, len(losses) - WINDOW + 1, WINDOW)]
    metrics = {
        "train_loss": {"value": statistics.fmean(losses[-2 * WINDOW :]), "unit": NATS},
        "lowest_loss": {"value": min(curve or losses), "unit": NATS},
        "non_finite": {"value": int(diverged), "unit": "runs"},
        "steps": {"value": len(rows), "unit": "steps"},
    }
    steps = steps_of_norms(len(rows), warmup_steps)
    config = {
        "window": WINDOW,
        "curve": curve,
        "validation": [[int(row["step"]), row["val/lm_loss"]] for row in rows if "val/lm_loss" in row],
        "gradient_norms": {str(step): norms_at(rows, step) for step in steps if rows},
    }
    return metrics, config


def steps_of_norms(num_steps: int, warmup_steps: int) -> list[int]:
    """Steps with recorded norms: the first, the end of the warm-up, the middle and the last."""
    return sorted({1, min(max(warmup_steps, 1), num_steps), max(num_steps // 2, 1), num_steps})


def norms_at(rows: list[dict[str, float]], step: int) -> dict[str, float]:
    """Gradient norm per part of the model, averaged over the last `NORM_WINDOW` steps up to `step`."""
    some = rows[max(step - NORM_WINDOW, 0) : step]
    parts = [key for key in some[0] if key.startswith("grad_norm/")]
    return {key.split("/", 1)[1]: statistics.fmean(row[key] for row in some) for key in parts}
