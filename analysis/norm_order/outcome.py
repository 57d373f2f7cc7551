"""The outcome of the second study (plan.md) from the records that exist, at any stage.

    python analysis/norm_order/outcome.py    # writes records/norm_order_study.json; prints the tests, and runs to add

The record has the twelve tests with Holm's decisions, limits, chosen rates, recovery, the mechanism and what is
refuted. What needs a cell without a record is `not run`, or null.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import pandas as pd

from analysis.norm_order.limits import CONDITION, GRID, cells_to_add, exponent, observations, place, rate, read_limits
from analysis.norm_order.mechanism import LOSS, RULE_GROUPS, judge, mechanism_cells
from analysis.norm_order.repeated import describe_repeats
from analysis.norm_order.study import RECORDS
from analysis.norm_order.study_tests import NOT_RUN, NOT_YET, has_run, read_outcomes, read_study, run_tests
from lmscale.results import new_record, write_record

ABOVE_POST = 0.03  # nats that B2T's mean loss may be above post-norm's
PLACEMENTS = ("pre", "post", "b2t")
OPEN = (NOT_RUN, NOT_YET)  # decisions that may still change


def recovery(cells: pd.DataFrame, limits: pd.DataFrame, tests: list[dict[str, Any]]) -> dict[str, bool | None]:
    """The conditions of question 3, and whether all of a depth hold; None while one has not run.

    At 48 layers no loss is scored, so B2T has the condition on the limit alone, and only that rate has run. The
    condition on a longer warm-up is on the limit alone, and holds trivially where 100 steps meet it.
    """
    found: dict[str, bool | None] = {}
    for layers, test in ((12, 5), (24, 6)):
        name = f"b2t, {layers} layers"
        decision = tests[test - 1]["decision"]
        conditions = {
            "ends lower than pre-norm": None if decision in OPEN else decision == "supported",
            "loss near post-norm's": _near(cells, layers),
            "limit at least twice post-norm's": _limit_above(limits, layers, ("b2t", 100), ("post", 100), 1),
        }
        found |= {f"{name}: {condition}": value for condition, value in conditions.items()}
        found[f"{name}: recovers"] = _all(conditions.values())
    found["b2t, 48 layers: learns at twice post-norm's limit"] = _learns_above(cells, limits)
    for layers in (12, 24):
        for warmup, name in ((400, "recovers"), (100, "100 steps do so too")):
            above = _limit_above(limits, layers, ("post", warmup), ("pre", 100), 0)
            found[f"warm-up of 400, {layers} layers: {name}"] = above
    return found


def _near(cells: pd.DataFrame, layers: int) -> bool | None:
    """Whether B2T's mean loss is at most `ABOVE_POST` over post-norm's, at the seeds at which post-norm learned."""
    some = cells[(cells["group"] == "losses") & (cells["layers"] == layers)].set_index("seed")
    post, b2t = (some[some["order"] == order] for order in ("post", "b2t"))
    if not (has_run(post) and has_run(b2t)):
        return None
    post = post[post["state"] == "learned"]
    b2t = b2t.loc[post.index]
    over = b2t["train_loss"].mean() - post["train_loss"].mean()
    return bool((b2t["state"] == "learned").all() and over <= ABOVE_POST)


def _learns_above(cells: pd.DataFrame, limits: pd.DataFrame) -> bool | None:
    """Whether B2T learned at 48 layers with both seeds at the first rate above post-norm's limit."""
    post = observations(limits, "post")
    post = post[post["layers"] == 48]
    b2t = cells[cells["group"] == "deep_b2t"]
    if post.empty or not has_run(b2t) or set(b2t["lr"].map(place)) != {post["place"].min() + 1}:
        return None
    return bool((b2t["state"] == "learned").all())


def _limit_above(
    limits: pd.DataFrame, layers: int, one: tuple[str, int], other: tuple[str, int], steps: int
) -> bool | None:
    """Whether the first limit is at least `steps` steps of the grid above the other."""
    found = []
    for order, warmup in (one, other):
        keys = (limits["layers"] == layers) & (limits["order"] == order) & (limits["warmup"] == warmup)
        rows = limits[keys & (limits["family"] == "bert") & (limits["added"].map(len) == 0)]
        if rows.empty:
            return None
        found.append(rows["limit"].item())
    if max(found) < 0 or found[1] == len(GRID) - 1:
        return None  # beyond an end of the grid
    return bool(found[0] >= found[1] + steps)


def _all(values: Iterable[bool | None]) -> bool | None:
    """True if all are, False if one is, otherwise None."""
    values = list(values)
    return False if False in values else None if None in values else True


def _any(values: Iterable[bool | None]) -> bool | None:
    """True if one is, False if all are, otherwise None."""
    values = list(values)
    return True if True in values else None if None in values else False


def refuted(
    cells: pd.DataFrame, tests: list[dict[str, Any]], recovered: dict[str, bool | None], rule: dict[str, Any] | None
) -> dict[str, bool | None]:
    """What the plan says would refute us, by question; None while it cannot be told."""
    decisions = {row["test"]: row["decision"] for row in tests}

    def opposite(test: int) -> bool | None:
        """Whether post-norm ends higher, with all seeds learned."""
        higher = decisions[test] == "the opposite is supported" and tests[test - 1]["method"] == "paired t"
        return None if decisions[test] in OPEN else higher

    recovers = recovered["b2t, 24 layers: recovers"]
    tried = has_run(cells[cells["order"].isin(["post", "b2t"])])
    mechanism = None
    if rule is not None and decisions[9] not in OPEN:
        share = rule["constant_share"]
        mechanism = (
            decisions[9] != "supported"
            or rule["accuracy"] <= rule["loss_accuracy"]
            or share.get("stuck", 0.0) <= share.get("learned", 1.0)
        )
    return {
        "question 1": None if decisions[7] in OPEN else decisions[7] != "supported",
        "question 2": _any([opposite(1), opposite(2)]),
        "question 3": _any(
            [bool(stuck_b2t(cells)) or (False if tried else None), None if recovers is None else not recovers]
        ),
        "question 4": mechanism,
        "question 5": _any([opposite(11), opposite(12)]),
    }


def stuck_b2t(cells: pd.DataFrame) -> list[str]:
    """IDs of B2T cells that are stuck where post-norm learned: same depth, rate, warm-up, seed and data."""
    keys = ["layers", "lr", "warmup", "seed", "family", "data"]
    post = cells[(cells["order"] == "post") & (cells["state"] == "learned")]
    stuck = cells[(cells["order"] == "b2t") & (cells["state"] == "stuck")]
    return sorted(stuck.merge(post[keys], on=keys)["id"])


def study_mechanism(cells: pd.DataFrame, limits: pd.DataFrame) -> tuple[dict[str, Any] | None, int]:
    """The outcome of question 4's rule, and how many cells have no statistics.

    None until all cells of its groups have run, with those that the grid's rule adds; `deep` is not waited for.
    """
    post = cells[cells["group"].isin(RULE_GROUPS) & (cells["order"] == "post")]
    awaited = set(RULE_GROUPS) - {"deep"}
    added = limits[limits["group"].isin(awaited) & (limits["order"] == "post")]["added"].map(len).any()
    complete = has_run(post[post["group"].isin(awaited)]) and not added
    without = int((post["state"].notna() & post[LOSS].isna()).sum())
    return judge(mechanism_cells(cells)) if complete else None, without


def summarize(cells: pd.DataFrame, repeats: pd.DataFrame | None = None) -> dict[str, Any]:
    """Build the record of the study's outcome.

    Args:
        cells: result of `read_study`.
        repeats: result of `read_outcomes` for cells repeated on another CPU type.
    """
    limits = read_limits(cells)
    rule, left_out = study_mechanism(cells, limits)
    tests = run_tests(cells, limits, rule)
    recovered = recovery(cells, limits, tests)
    fits = {order: observations(limits, order) for order in PLACEMENTS}
    groups = {
        group: {"recorded": int(some["state"].notna().sum()), "planned": len(some)}
        for group, some in cells.groupby("group", sort=False)
    }
    config = {
        "groups": groups,
        "stage": _stage(groups),
        "tests": tests,
        "limits": [_limit(row) for row in limits.to_dict("records") if row["family"] == "bert"],
        "rates": [
            dict(zip(CONDITION, (row[key] for key in CONDITION), strict=True)) | {"lr": rate(row["best"])}
            for row in limits[limits["best"].notna()].to_dict("records")
        ],
        "exponents": {
            order: exponent(rows) | {"layers": sorted({int(n) for n in rows["layers"]})}
            for order, rows in fits.items()
            if rows["layers"].nunique() >= 3
        },
        "recovery": recovered,
        "stuck_b2t": stuck_b2t(cells),
        "mechanism": rule,
        "without_statistics": left_out,
        "refuted": refuted(cells, tests, recovered, rule),
        "cells_to_add": list(cells_to_add(limits)),
        "cpus": {str(cpu): int(count) for cpu, count in cells["cpu"].value_counts().sort_index().items()},
    }
    metrics = {"cells": {"value": int(cells["state"].notna().sum()), "unit": "runs"}}
    metrics["cells_planned"] = {"value": len(cells), "unit": "runs"}
    metrics["cpu_time"] = {"value": float(cells["cpu_time"].sum()), "unit": "s"}
    metrics |= {} if repeats is None else describe_repeats(cells, repeats)
    metrics |= {
        f"test {test['test']}/{key}": {"value": test[key], "unit": test["unit"]}
        for test, key in itertools.product(tests, ("effect", "low", "high"))
        if test["effect"] is not None
    }
    layout = {"tp_size": 1, "dp_size": 1, "threads_per_rank": 1}
    seed = int(cells["seed"].iloc[0])
    return new_record("norm_order_study", "scaled_down", config, seed, metrics, device="cpu", layout=layout)


def _stage(groups: dict[str, dict[str, int]]) -> str:
    recorded, planned = (sum(group[key] for group in groups.values()) for key in ("recorded", "planned"))
    if not recorded:
        return "no run is recorded"
    missing = [name for name, group in groups.items() if group["recorded"] < group["planned"]]
    return f"{recorded} of {planned} runs are recorded" + (f"; incomplete: {', '.join(missing)}" if missing else "")


def _limit(row: dict[str, Any]) -> dict[str, Any]:
    """A limit in rates, of a seed that learned at none `below` the lowest; `final` if the grid's rule adds no rate."""
    seeds = {str(seed): rate(at) for seed, at in row["seeds"].items()}
    found = {key: row[key] for key in CONDITION[1:]} | {"limit": rate(max(row["limit"], 0)), "seeds": seeds}
    bound = {len(GRID) - 1: "at least", -1: "below"}.get(row["limit"], "")  # where the grid ends
    tried = {"lowest": rate(row["lowest"]), "highest": rate(row["highest"])}
    return found | {"bound": bound, "final": not row["added"]} | tried


def main() -> int:
    """Write the record and print the tests."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--records", type=Path, default=RECORDS, help="folder of the runs; repeated ones are in `repeated` beside it"
    )
    parser.add_argument("--record", type=Path, default=RECORDS.parent / "norm_order_study.json", help="to write")
    options = parser.parse_args()
    try:
        record = summarize(read_study(options.records), read_outcomes(options.records.parent / "repeated"))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_record(record, options.record)
    config = record["config"]
    print(f"{config['stage']}\nrecord: {options.record}")
    for row in config["tests"]:
        p = "" if row["p"] is None else f", p {row['p']:.2g}, Holm {row['p_holm']:.2g}"
        print(f"{row['test']:>3} {row['hypothesis']}: {row['decision']}{p}")
    if config["cells_to_add"]:
        print("\nThe grid's rule adds, each after the group of its name in cells.yaml:")
        print("\n".join(config["cells_to_add"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
