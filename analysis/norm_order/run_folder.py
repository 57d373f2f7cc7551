"""What a run of the norm-order study left in its folder: losses and gradient norms."""

import csv
import math
import statistics
from pathlib import Path
from typing import Any

NATS = "nats/masked token"
WINDOW = 25  # steps averaged into one point of a curve
NORM_WINDOW = 10  # steps averaged into one gradient norm, except at step 1


def read_rows(run_dir: Path) -> list[dict[str, float]]:
    """The rows of metrics.csv with a finite loss and gradient; a run that diverged has others after them."""
    with open(run_dir / "metrics.csv", encoding="utf-8", newline="") as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in rows if math.isfinite(row["train/lm_loss"] + row["grad_norm"])]


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
    return sorted({1, min(warmup_steps, num_steps), max(num_steps // 2, 1), num_steps})


def norms_at(rows: list[dict[str, float]], step: int) -> dict[str, float]:
    """Gradient norm per part of the model, averaged over the last `NORM_WINDOW` steps up to `step`."""
    some = rows[max(step - NORM_WINDOW, 0) : step]
    parts = [key for key in some[0] if key.startswith("grad_norm/")]
    return {key.split("/", 1)[1]: statistics.fmean(row[key] for row in some) for key in parts}
