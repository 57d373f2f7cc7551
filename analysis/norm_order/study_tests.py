"""The cells of the second study with their outcomes, and the twelve tests of its plan (plan.md)."""

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .cells import read_cells
from .limits import GRID, observations, slope_test
from .mechanism import CANDIDATES, LOSS, early_statistics
from .run_folder import NATS, NATS_PER_TOKEN
from .significance import LEVEL, clopper_pearson, holm, mcnemar, paired_t, sign_test
from .study import CHOSEN, StudyCell, read_groups, resolve

COMPARISONS = {  # test: group, layers, the placement expected to end lower, the other
    1: ("losses", 12, "post", "pre"),
    2: ("losses", 24, "post", "pre"),
    3: ("losses", 12, "b2t", "post"),
    4: ("losses", 24, "b2t", "post"),
    5: ("losses", 12, "b2t", "pre"),
    6: ("losses", 24, "b2t", "pre"),
    11: ("race", 12, "post", "pre"),
    12: ("gpt", 12, "post", "pre"),
}
TWO_SIDED = (3, 4)  # without an expected direction
DEPTHS = {6, 12, 24}  # of test 7; 48 enters if its cells have run
HYPOTHESES = {
    1: "post-norm ends lower than pre-norm at 12 layers",
    2: "post-norm ends lower than pre-norm at 24 layers",
    3: "B2T and post-norm end at different losses at 12 layers",
    4: "B2T and post-norm end at different losses at 24 layers",
    5: "B2T ends lower than pre-norm at 12 layers",
    6: "B2T ends lower than pre-norm at 24 layers",
    7: "post-norm's rate limit falls faster with depth than pre-norm's",
    8: "a warm-up of 400 steps makes post-norm learn where it is stuck with 100",
    9: "the first 100 steps predict whether a post-norm run is stuck",
    10: "DeepNorm learns where post-norm is stuck",
    11: "post-norm ends lower than pre-norm on RACE at 12 layers",
    12: "post-norm ends lower than pre-norm for GPT at 12 layers",
}
MEASURED = ["state", "train_loss", "validation_loss", "cpu_time"]
NOT_RUN, NOT_YET = "not run", "not yet"
PROVISIONAL = (7, 9)  # computed anew with the cells of 48 layers
PAIRS, SLOPE = "share of pairs", "log2 rate per log2 depth"


def planned_cells(folder: Path) -> Iterator[tuple[str, StudyCell]]:
    """The cells of `cells.yaml` with their groups and rates; `chosen` stays where no rate can be chosen yet."""

    @functools.cache
    def rate(arm: StudyCell) -> str:
        try:
            return (resolve(arm, folder) or arm).lr
        except ValueError:  # no rate at which both seeds learned, until lower ones are added
            return CHOSEN

    for group, cell in read_groups():
        yield group, replace(cell, lr=rate(replace(cell, seed=0, data="embedded")))


def read_study(folder: Path) -> pd.DataFrame:
    """All planned cells, one row each; what is measured is missing while a cell has no record.

    Returns:
        group, id, the fields of `StudyCell` (lr is nan while it is not chosen), and the columns of `read_outcomes`,
        missing without a record.

    Raises:
        ValueError: a record's cell is not in `cells.yaml`, or has another rate than the chosen one.
    """
    planned = {cell.name: {"group": group, "id": cell.name} | vars(cell) for group, cell in planned_cells(folder)}
    found = read_outcomes(folder)
    if unknown := set(found["id"]) - set(planned):
        raise ValueError(f"records of the study must be of its cells, but {min(unknown)} is not in cells.yaml")
    cells = pd.DataFrame(planned.values())
    cells["lr"] = pd.to_numeric(cells["lr"], errors="coerce")  # nan for `chosen`
    return cells.merge(found, on="id", how="left")


def read_outcomes(folder: Path) -> pd.DataFrame:
    """What the records of a folder measured, one row each.

    Returns:
        id, state, train_loss, validation_loss, cpu_time, cpu (type), and the columns of `early_statistics`.
    """
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    names = [StudyCell(**record["config"]["cell"]).name for record in records]
    cpus = [record["environment"]["cpu"] for record in records]
    found = read_cells(records).reindex(columns=MEASURED).assign(id=names, cpu=cpus)
    early = pd.DataFrame([early_statistics(record["config"]) for record in records], index=found.index)
    return pd.concat([found, early.reindex(columns=[*CANDIDATES, LOSS])], axis=1)


def has_run(cells: pd.DataFrame) -> bool:
    """Whether there are cells and all have records."""
    return len(cells) > 0 and bool(cells["state"].notna().all())


def run_tests(cells: pd.DataFrame, limits: pd.DataFrame, rule: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The twelve tests in order, with Holm's correction; those that have not run have p = 1 in it.

    Args:
        cells, limits: results of `read_study` and `read_limits`.
        rule: result of `judge`, or None.

    Returns:
        per test: test, hypothesis, method, n, effect, low, high, unit, p, p_holm, decision, note. The decision is
        `not run`; if the test does not reject the null hypothesis `not supported`, or `too few pairs` to reject it; if
        it does `supported`, `the opposite is supported` or `within the grid's rounding`. Until all planned cells have
        run, a test that does not reject is `not yet`, because Holm's correction still counts the others with p = 1,
        and so are the `PROVISIONAL` ones.
    """
    final = has_run(cells) and not limits["added"].map(len).any()
    found = {test: compare_losses(cells, *arms) for test, arms in COMPARISONS.items()}
    found[7] = compare_limits(limits)
    found[8], found[10] = intervene(cells, "slow_start"), intervene(cells, "rescaled")
    found[9] = None if rule is None else _predicted(rule)
    uncertain = [test for test in HYPOTHESES if found[test] is None or (test in PROVISIONAL and not final)]
    adjusted = holm([1.0 if test in uncertain else found[test]["p"] for test in HYPOTHESES])
    rows = []
    for (test, hypothesis), p_holm in zip(HYPOTHESES.items(), adjusted, strict=True):
        empty = dict.fromkeys(("n", "effect", "low", "high", "p", "p_holm")) | {"method": "", "unit": "", "note": ""}
        row = {"test": test, "hypothesis": hypothesis, "decision": NOT_RUN} | empty
        if (result := found[test]) is not None:
            expected = result.pop("expected") or test in TWO_SIDED
            decision = "not supported" if p_holm > LEVEL else "supported" if expected else "the opposite is supported"
            decision = result.pop("instead", {}).get(decision, decision)
            if not final and (p_holm > LEVEL or test in PROVISIONAL):
                decision = NOT_YET
            row |= result | {"p_holm": p_holm, "decision": decision}
        rows.append(row)
    return rows


def compare_losses(cells: pd.DataFrame, group: str, layers: int, first: str, second: str) -> dict[str, Any] | None:
    """Loss of the first placement minus the second's, paired by seed: a t test, or signs if a seed did not learn.

    None while a cell has no record.
    """
    some = cells[(cells["group"] == group) & (cells["layers"] == layers) & cells["order"].isin([first, second])]
    if not has_run(some):
        return None
    by_seed = some.pivot(index="seed", columns="order", values=["state", "train_loss", "validation_loss", "cpu"])
    learned = by_seed["state"] == "learned"
    seeds = len(by_seed)
    note = ", ".join(f"{order} {learned[order].sum()} of {seeds} learned" for order in (first, second))
    if mixed := int((by_seed["cpu"][first] != by_seed["cpu"][second]).sum()):
        note += f"; {mixed} pairs of two CPU types"
    if learned.all(axis=None):
        of = {
            loss: (by_seed[loss][first] - by_seed[loss][second]).astype(float)
            for loss in ("train_loss", "validation_loss")
        }
        result = paired_t(of["train_loss"].tolist())
        note += f"; validation {of['validation_loss'].mean():+.3f}"
        unit = NATS_PER_TOKEN if group == "gpt" else NATS
        return {"method": "paired t", "n": seeds, "unit": unit, "note": note, "expected": result["effect"] < 0} | result
    losses = by_seed["train_loss"].astype(float).where(learned, float("inf"))
    lower, higher = int((losses[first] < losses[second]).sum()), int((losses[first] > losses[second]).sum())
    return {"method": "exact sign test", "note": note, "expected": lower > higher} | _of_pairs(
        lower, higher, sign_test(lower, higher)
    )


def compare_limits(limits: pd.DataFrame) -> dict[str, Any] | None:
    """Test 7; None while a limit at one of `DEPTHS` is missing or at an end of its list.

    With equal slopes, rounding down to the grid leaves a difference of the limits that is one of two neighbouring
    steps at each depth. So an effect up to the largest slope of such a difference is within the grid's rounding.
    """
    post, pre = observations(limits, "post"), observations(limits, "pre")
    depths = set(post["layers"]) & set(pre["layers"])
    if not depths >= DEPTHS:
        return None
    post, pre = (rows[rows["layers"].isin(depths)] for rows in (post, pre))
    result = slope_test(post, pre)
    x = np.log2(sorted(depths)) - np.mean(np.log2(sorted(depths)))
    rounding = float(x.clip(0).sum() / (x @ x))
    at_end = sum(int((~rows["place"].between(0, len(GRID) - 2)).sum()) for rows in (post, pre))
    note = f"{', '.join(map(str, sorted(depths)))} layers; {at_end} limits at an end of the grid; "
    note += f"p at the least favourable deepest limits {result.pop('p_unfavourable'):.2g}"
    note += f"; rounding to the grid can give {-rounding:.2g}"
    more = {"method": "one-sided t of slopes", "unit": SLOPE, "note": note, "expected": result["effect"] < 0}
    if result["effect"] >= -rounding - 1e-9:
        more["instead"] = {"supported": "within the grid's rounding"}
    return more | result


def intervene(cells: pd.DataFrame, group: str) -> dict[str, Any] | None:
    """Tests 8 and 10: pairs of equal depth and seed of which only the cell in `group`, or in `mechanism`, learned."""
    some = cells[cells["group"].isin(["mechanism", group])]
    if not has_run(some[some["group"] == group]) or not has_run(some):
        return None
    states = some.pivot(index=["layers", "seed"], columns="group", values="state")
    learned, stuck = states == "learned", states["mechanism"] == "stuck"
    gained = int((stuck & learned[group]).sum())
    lost = int((learned["mechanism"] & ~learned[group]).sum())
    note = f"{stuck.sum()} of {len(states)} stuck in mechanism, {gained} of these learned in {group}"
    least = 0.5 ** int(stuck.sum())
    more = {"method": "exact one-sided McNemar", "expected": gained > lost}
    if least > LEVEL:
        more["instead"] = {"not supported": "too few pairs"}
        note += f"; p cannot be below {least:.2g}"
    return more | {"note": note} | _of_pairs(gained, lost, mcnemar(gained, lost))


def _predicted(rule: dict[str, Any]) -> dict[str, Any]:
    note = f"accuracy {rule['accuracy']:.3f} [{rule['low']:.3f}, {rule['high']:.3f}] of {rule['n']} held-out runs, "
    note += f"majority {rule['majority_accuracy']:.3f}"
    result = _of_pairs(rule["gained"], rule["lost"], rule["p"])
    return {"method": "exact one-sided McNemar", "note": note, "expected": rule["gained"] > rule["lost"]} | result


def _of_pairs(first: int, second: int, p: float) -> dict[str, Any]:
    """Share of the pairs that differ in which the first does better, with its interval."""
    n = first + second
    low, high = clopper_pearson(first, n) if n else (None, None)
    return {"n": n, "effect": first / n if n else None, "low": low, "high": high, "unit": PAIRS, "p": p}
