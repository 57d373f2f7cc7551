"""Cells of the second study that were repeated on another CPU type: how much their losses differ.

Numbers of a cell differ between CPU types by rounding, which training amplifies. Where the arms of a test ran on two
types, the repeats give the effect on one. They are described and decide nothing.
"""

from typing import Any

import pandas as pd

from .run_folder import NATS
from .study_tests import COMPARISONS, MEASURED, compare_losses


def describe_repeats(cells: pd.DataFrame, repeats: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Metrics of the repeats, and the effects of the tests whose pairs have one CPU type only with them.

    Args:
        cells: result of `read_study`.
        repeats: result of `read_outcomes`, of cells with a record on another CPU type.

    Returns:
        repeated/cells and repeated/other_states, counts; repeated/largest_difference and repeated/mean_difference,
        repeat minus record; repeated/test N/effect, low and high. Empty without repeats.

    Raises:
        ValueError: a repeated cell has no record, or one of the same CPU type.
    """
    if repeats.empty:
        return {}
    recorded = cells.dropna(subset=["state"]).set_index("id")
    again = repeats.set_index("id")
    for name, cpu in again["cpu"].items():
        if name not in recorded.index or recorded.loc[name, "cpu"] == cpu:
            raise ValueError(f"a repeated cell must have a record of another CPU type, but {name} has none")
    first = recorded.loc[again.index]
    difference = again["train_loss"] - first["train_loss"]
    found = {
        "cells": (len(again), "runs"),
        "other_states": (int((again["state"] != first["state"]).sum()), "runs"),
        "largest_difference": (float(difference[difference.abs().idxmax()]), NATS),
        "mean_difference": (float(difference.mean()), NATS),
    }
    swapped = cells.set_index("id")
    swapped.loc[again.index, [*MEASURED, "cpu"]] = again[[*MEASURED, "cpu"]]
    swapped = swapped.reset_index()
    for test, (group, layers, *orders) in COMPARISONS.items():
        some = swapped[(swapped["group"] == group) & (swapped["layers"] == layers) & swapped["order"].isin(orders)]
        if some["id"].isin(again.index).any() and some["cpu"].nunique(dropna=False) == 1:
            result = compare_losses(swapped, group, layers, *orders)
            for key in ("effect", "low", "high") if result is not None else ():
                found[f"test {test}/{key}"] = (result[key], result["unit"])
    return {f"repeated/{name}": {"value": value, "unit": unit} for name, (value, unit) in found.items()}
