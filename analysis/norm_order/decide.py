"""Evaluate the norm-order studies whose cells all have a record.

    python analysis/norm_order/decide.py                       # the committed ones: writes their summaries again
    python analysis/norm_order/decide.py --records FOLDER      # those of `run.py --records FOLDER`

`norm_order.json` has the first study's differences with their intervals (`summary.py`). `norm_order_study.json` has
the outcome of the second by its plan (plan.md): the twelve tests with Holm's correction, rate limits, chosen rates,
recovery, the mechanism and what is refuted. `norm_order_long.json` has the two tests of the third. `make tables` and
`make figures` show the first two.
"""

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import pandas as pd

from analysis.norm_order.cells import LOSS, MEASURED, read_cells
from analysis.norm_order.hypotheses import (
    COMPARISONS,
    RULE_GROUPS,
    compare_losses,
    holm,
    judge,
    mechanism_cells,
    run_tests,
)
from analysis.norm_order.limits import describe_limits, place, read_limits, read_outcomes, study_cells
from analysis.norm_order.run import FILES, RECORDS, read_groups
from analysis.norm_order.run_folder import NATS
from analysis.norm_order.summary import summarize
from analysis.report.records import ONE_THREAD, read_lines
from lmscale.cli.errors import one_line_errors
from lmscale.results import new_record, path_argument, write_record

ABOVE_POST = 0.03  # nats that B2T's mean loss may be above post-norm's
RECOVERS = "recovers, by rate limits of two seeds"


def recovery(cells: pd.DataFrame, limits: pd.DataFrame, tests: list[dict[str, Any]]) -> dict[str, bool]:
    """The conditions of question 3, and whether all of a depth hold.

    At 48 layers no loss is scored, so B2T has the condition on the limit alone, and only that rate has run. The
    condition on a longer warm-up is on the limit alone, and holds trivially where 100 steps meet it.
    """
    limit = limits[limits["family"] == "bert"].set_index(["layers", "order", "warmup"])["limit"]
    found: dict[str, bool] = {}
    for layers, test in ((12, 5), (24, 6)):
        conditions = {
            "ends lower than pre-norm": tests[test - 1]["decision"] == "supported",
            "loss near post-norm's": _near(cells, layers),
            "limit at least twice post-norm's": bool(limit[layers, "b2t", 100] > limit[layers, "post", 100]),
        }
        found |= {f"b2t, {layers} layers: {name}": value for name, value in conditions.items()}
        found[f"b2t, {layers} layers: {RECOVERS}"] = all(conditions.values())
    b2t = cells[cells["group"] == "deep_b2t"]
    above = set(b2t["lr"].map(place)) == {limit[48, "post", 100] + 1}
    found["b2t, 48 layers: learns at twice post-norm's limit"] = above and bool((b2t["state"] == "learned").all())
    for layers in (12, 24):
        for warmup, name in ((400, RECOVERS), (100, "100 steps do so too")):
            met = bool(limit[layers, "post", warmup] >= limit[layers, "pre", 100])
            found[f"warm-up of 400, {layers} layers: {name}"] = met
    return found


def _near(cells: pd.DataFrame, layers: int) -> bool:
    """Whether B2T's mean loss is at most `ABOVE_POST` over post-norm's, at the seeds at which post-norm learned."""
    some = cells[(cells["group"] == "losses") & (cells["layers"] == layers)].set_index("seed")
    post = some[(some["order"] == "post") & (some["state"] == "learned")]
    b2t = some[some["order"] == "b2t"].loc[post.index]
    over = b2t["train_loss"].mean() - post["train_loss"].mean()
    return bool((b2t["state"] == "learned").all() and over <= ABOVE_POST)


def refuted(
    cells: pd.DataFrame, tests: list[dict[str, Any]], recovered: dict[str, bool], rule: dict[str, Any]
) -> dict[str, bool]:
    """What the plan says would refute us, by question."""

    def opposite(test: int) -> bool:
        """Whether post-norm ends higher, with all seeds learned."""
        row = tests[test - 1]
        return row["decision"] == "the opposite is supported" and row["method"] == "paired t"

    share = rule["constant_share"]
    return {
        "question 1": tests[6]["decision"] != "supported",
        "question 2": opposite(1) or opposite(2),
        "question 3": bool(stuck_b2t(cells)) or not recovered[f"b2t, 24 layers: {RECOVERS}"],
        "question 4": tests[8]["decision"] != "supported"
        or rule["accuracy"] <= rule["loss_accuracy"]
        or share.get("stuck", 0.0) <= share.get("learned", 1.0),
        "question 5": opposite(11) or opposite(12),
    }


def stuck_b2t(cells: pd.DataFrame) -> list[str]:
    """IDs of B2T cells that are stuck where post-norm learned: same depth, rate, warm-up, seed and data."""
    keys = ["layers", "lr", "warmup", "seed", "family", "data"]
    post = cells[(cells["order"] == "post") & (cells["state"] == "learned")]
    stuck = cells[(cells["order"] == "b2t") & (cells["state"] == "stuck")]
    return sorted(stuck.merge(post[keys], on=keys)["id"])


def describe_repeats(cells: pd.DataFrame, repeats: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Metrics of cells repeated on another CPU type, which decide nothing.

    Numbers of a cell differ between CPU types by rounding, which training amplifies. Where the arms of a test ran on
    two types, the repeats give the effect on one.

    Args:
        cells, repeats: results of `study_cells` and `read_outcomes`.

    Returns:
        repeated/cells and repeated/other_states, counts; repeated/largest_difference and repeated/mean_difference,
        repeat minus record; repeated/test N/effect, low and high. Empty without repeats.
    """
    if repeats.empty:
        return {}
    swapped, again = cells.set_index("id"), repeats.set_index("id")
    first = swapped.loc[again.index]
    difference = again["train_loss"] - first["train_loss"]
    found = {
        "cells": (len(again), "runs"),
        "other_states": (int((again["state"] != first["state"]).sum()), "runs"),
        "largest_difference": (float(difference[difference.abs().idxmax()]), NATS),
        "mean_difference": (float(difference.mean()), NATS),
    }
    swapped.loc[again.index, [*MEASURED, "cpu"]] = again[[*MEASURED, "cpu"]]
    swapped = swapped.reset_index()
    for test, (group, layers, *orders) in COMPARISONS.items():
        some = swapped[(swapped["group"] == group) & (swapped["layers"] == layers) & swapped["order"].isin(orders)]
        if some["id"].isin(again.index).any() and some["cpu"].nunique() == 1:
            result = compare_losses(swapped, group, layers, *orders)
            found |= {f"test {test}/{key}": (result[key], result["unit"]) for key in ("effect", "low", "high")}
    return {f"repeated/{name}": {"value": value, "unit": unit} for name, (value, unit) in found.items()}


def decide(cells: pd.DataFrame, repeats: pd.DataFrame) -> dict[str, Any]:
    """The record of the second study, from the results of `study_cells` and `read_outcomes`."""
    limits, rule = read_limits(cells), judge(mechanism_cells(cells))
    tests = run_tests(cells, limits, rule)
    recovered = recovery(cells, limits, tests)
    config = {
        "groups": {group: len(some) for group, some in cells.groupby("group", sort=False)},
        "tests": tests,
        **describe_limits(limits),
        "recovery": recovered,
        "stuck_b2t": stuck_b2t(cells),
        "mechanism": rule,
        "without_statistics": int(cells.loc[cells["group"].isin(RULE_GROUPS), LOSS].isna().sum()),
        "refuted": refuted(cells, tests, recovered, rule),
        "cpus": {str(cpu): int(count) for cpu, count in cells["cpu"].value_counts().sort_index().items()},
    }
    metrics = {"cells": {"value": len(cells), "unit": "runs"}}
    metrics["cpu_time"] = {"value": float(cells["cpu_time"].sum()), "unit": "s"}
    metrics |= describe_repeats(cells, repeats)
    metrics |= {
        f"test {test['test']}/{key}": {"value": test[key], "unit": test["unit"]}
        for test, key in itertools.product(tests, ("effect", "low", "high"))
        if test["effect"] is not None
    }
    seed = int(cells["seed"].iloc[0])
    return new_record("norm_order_study", "scaled_down", config, seed, metrics, **ONE_THREAD)


def compare_long(cells: pd.DataFrame) -> dict[str, Any]:
    """The record of the third study: post-norm's loss minus pre-norm's for each warm-up, with Holm's correction."""
    arms = ("long", 12, "post", "pre")
    tests = {f"warm-up of {steps}": compare_losses(some, *arms) for steps, some in cells.groupby("warmup")}
    for test, p_holm in zip(tests.values(), holm([test["p"] for test in tests.values()]), strict=True):
        test["p_holm"] = p_holm
    metrics = {name: {"value": test["effect"], "unit": test["unit"]} for name, test in tests.items()}
    metrics["cpu_time"] = {"value": float(cells["cpu_time"].sum()), "unit": "s"}
    return new_record("norm_order_long", "scaled_down", {"tests": tests}, 401, metrics, **ONE_THREAD)


@one_line_errors()
def main() -> int:
    """Write the summaries and print the tests."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--records", type=path_argument, default=RECORDS, help="folder of the records")
    options = parser.parse_args()
    summaries = []
    for study, file in FILES.items():
        recorded, planned = read_lines(options.records / file), {cell.name for _, cell in read_groups(study)}
        if missing := planned - recorded.keys():
            print(f"{study} study: {len(missing)} of {len(planned)} cells have no record in {options.records / file}")
        elif study == "first":
            summaries.append(summarize(read_cells(recorded.values())))
        elif study == "third":
            summaries.append(compare_long(study_cells(recorded.values(), study)))
        else:
            repeats = read_outcomes(read_lines(options.records / "repeated.jsonl").values())
            summaries.append(decide(study_cells(recorded.values()), repeats))
            for row in summaries[-1]["config"]["tests"]:
                p = f"p {row['p']:.2g}, Holm {row['p_holm']:.2g}"
                print(f"{row['test']:>3} {row['hypothesis']}: {row['decision']}, {p}")
    # After all are built: a changed file would make the next one's commit `dirty`.
    for record in summaries:
        path = options.records / f"{record['name']}.json"
        write_record(record, path)
        print(f"record: {path}")
    return 0 if summaries else 2


if __name__ == "__main__":
    sys.exit(main())
