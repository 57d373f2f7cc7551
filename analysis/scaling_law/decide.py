"""What scaling sweeps show: how the best rate moves with the size, how the loss rises beside it, and laws of the loss.

    python analysis/scaling_law/decide.py                     # the study: also decides its tests, writes its summary
    python analysis/scaling_law/decide.py multirun/scaling --figure rates.png    # your own runs, from their folders

Runs of one call may differ in the model's size, parametrization and placement, in tokens, rate and seed, and in nothing
else. The summary of the study is `scaling_law.json` beside its records; `plan.md` has its tests.
"""

import argparse
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import numpy as np
import pandas as pd
from scipy import stats

from analysis.norm_order.hypotheses import LEVEL, holm
from analysis.report.records import ONE_THREAD, metrics_table
from analysis.report.style import prepare_figure
from analysis.scaling_law import law, run
from analysis.scaling_law.cells import ARM, LEARNED, SIZE, mean_losses, read_runs, tabulate
from analysis.scaling_law.figure import check_one_panel, draw_rates
from analysis.scaling_law.transfer import CONDITION, best_rates, pooled, references, shifts, transfer
from lmscale.cli.errors import one_line_errors
from lmscale.results import existing_path, new_record, path_argument, write_record

NUM_RESAMPLES = 1000
# Conditions of tests 7 and 8: the base with ten seeds, and a width; 32 layers with three.
MORE = [("standard", 4, 64), ("standard, std 0.04", 4, 256), ("completep", 32, 64), ("standard", 32, 64)]
WITHIN = 1.0  # octaves: a best rate that moves less stays
UNITS = dict.fromkeys(("shift", "least", "most", "low", "high", "sensitivity_below", "sensitivity_above"), "octaves")
UNITS |= dict.fromkeys(("penalty", "gain", "sensitivity_mean", "sensitivity_low", "sensitivity_high"), "nats")


def laws(cells: pd.DataFrame, num_resamples: int) -> pd.DataFrame:
    """The laws of every arm with enough sizes and numbers of tokens, by three ways of counting the size.

    Each size and number of tokens counts at its best rate, and not at all if several rates have run and the best is
    at an end of them.

    Returns:
        one row per arm and count: alpha, beta, exponent (of the best N in compute), each with low and high;
        irreducible; lack_of_fit and its p; sizes, runs.
    """
    rows = {}
    for arm, group in cells.groupby(ARM):
        runs = pd.concat([at_best_rate(some) for _, some in group.groupby([*SIZE, "tokens"])])
        counts = {
            "parameters": runs["parameters"],
            "without embeddings": runs["without_embeddings"],
            "FLOPs / 6 tokens": runs["flops"] / (6 * runs["tokens"]),
        }
        for count, size in counts.items():
            data = size, runs["tokens"], runs["loss"]
            try:
                found = law.fit_surface(*data)
            except ValueError:
                continue
            names, values = ("alpha", "beta", "exponent"), (found.alpha, found.beta, found.compute_exponent)
            ratio, p = law.lack_of_fit(found, *data)
            row = dict(zip(names, values, strict=True))
            for name, (low, high) in zip(names, law.intervals(found, *data, num_resamples), strict=True):
                row |= {f"{name}_low": low, f"{name}_high": high}
            row |= {"irreducible": found.irreducible, "lack_of_fit": ratio, "p": p}
            rows[*arm, count] = row | {"sizes": size.nunique(), "runs": len(runs)}
    index = pd.MultiIndex.from_tuples(rows, names=[*ARM, "count"]) if rows else None
    return pd.DataFrame(list(rows.values()), index=index)


def at_best_rate(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs at the rate of the lowest mean loss; none if that is not finite, or of several rates is at an end."""
    means = mean_losses(runs)
    best = means.idxmin()
    at_end = len(means) > 1 and best in (means.index[0], means.index[-1])
    return runs[(runs["lr"] == best) & math.isfinite(means[best]) & (not at_end)]


def sensitivity(cells: pd.DataFrame) -> pd.DataFrame:
    """How much the loss rises away from the best rate, per condition whose best rate is between others.

    A loss above that of a unigram model counts as that.

    Returns:
        indexed by `CONDITION`: `mean`, the mean loss above the lowest mean (nats), over the rates from 1/8 to 8
        times the best that have run; `low` and `high`, the same of single seeds; `below` and `above`, how far these
        rates reach (octaves).
    """
    found = {}
    for condition, runs in cells.groupby(CONDITION):
        runs = runs.assign(loss=runs["loss"].fillna(math.inf).clip(upper=runs["unigram"]))
        means = runs.groupby("lr")["loss"].mean()
        octaves = np.log2(runs["lr"] / means.idxmin())
        near = octaves[octaves.abs() <= 3.1]
        if near.min() < 0 < near.max():
            above_best = (runs["loss"] - means.min())[near.index].groupby(runs["seed"]).mean()
            found[condition] = (above_best.mean(), above_best.min(), above_best.max(), -near.min(), near.max())
    index = pd.MultiIndex.from_tuples(found, names=CONDITION) if found else None
    return pd.DataFrame(list(found.values()), index, ["mean", "low", "high", "below", "above"])


def limits(cells: pd.DataFrame) -> pd.DataFrame:
    """The highest rate at which a seed learns, per condition in which no seed does at the highest rate.

    Returns:
        indexed by `CONDITION`: `low` and `high`, the lowest and the highest of the seeds' limits; `fallen`, the number
        of seeds whose limit is below that of the same seed in the reference of `transfer`, nan without one.
    """
    learned = cells[cells["loss"] <= cells["unigram"] - LEARNED]
    by_seed = learned.groupby([*CONDITION, "seed"])["lr"].max().unstack().dropna()
    highest = cells.groupby(CONDITION)["lr"].max()
    by_seed = by_seed[by_seed.lt(highest.reindex(by_seed.index), axis=0).all(axis=1)]
    compared = references(cells)
    fallen = {
        condition: float((by_seed.loc[condition] < by_seed.loc[compared[condition]]).sum())
        for condition in by_seed.index
        if compared.get(condition, condition) != condition and compared[condition] in by_seed.index
    }
    found = pd.DataFrame({"low": by_seed.min(axis=1), "high": by_seed.max(axis=1)})
    return found.assign(fallen=pd.Series(fallen, dtype=float).reindex(found.index))


def decide(cells: pd.DataFrame, complete: dict[str, bool]) -> list[dict[str, Any]]:
    """The six tests of `plan.md` on the cells of GPT with pre-norm.

    Args:
        complete: whether all cells of a group have run; until then its tests count with p = 1.

    Returns:
        per test: `test`, its number; `claim`; `p` and `p_holm`; `decided`, whether its cells have run and their best
        rates are inside the grid; `supported`; `refuted`, whether the plan calls the claim wrong. Tests 3 and 6 also
        have `contrast`, the mean over seeds of the scaled minus the standard shift (octaves), in which the base, which
        their pooled deviation counts twice, cancels, and `contrast_p` of a paired one-sided t test of it. These decide
        nothing.
    """
    moved = shifts(cells)
    moved = moved[[condition[:3] == ("gpt", "pre", False) for condition in moved.index]]
    tests, opposites = [], []  # p-values of the opposite of each claim, where the plan counts it as a refutation
    for group, parametrization, size, deeper in (
        ("width", "mup", (4, 256), False),
        ("depth", "completep", (16, 64), True),
    ):
        p, outside, contrast = [math.nan] * 3, False, {}
        if complete[group]:
            of_group = moved[(moved.index.get_level_values("num_layers") > 4) == deeper]
            spread, freedom = pooled(of_group)
            standard, scaled = (
                of_group.xs((name, *size), level=[ARM[-1], *SIZE]).iloc[0] for name in ("standard", parametrization)
            )
            falls, moves = standard.mean(skipna=False), abs(scaled.mean(skipna=False))
            error, outside = spread / math.sqrt(len(scaled)), bool(moves > WITHIN)
            more = (scaled.abs() - standard.abs()).mean(skipna=False) / math.sqrt(2)
            p = [stats.t.cdf(t / error, freedom) for t in (falls, moves - WITHIN, more)]
            paired = stats.ttest_rel(scaled, standard, alternative="greater")
            contrast = {"contrast": float((scaled - standard).mean()), "contrast_p": float(paired.pvalue)}
        what = f"from width 64 to {size[1]}" if group == "width" else f"from 4 to {size[0]} layers"
        claims = (
            f"under standard the best rate falls {what}",
            f"under {parametrization} it stays within one octave {what}",
            f"under {parametrization} it moves less than under standard {what}",
        )
        for claim, q, wrong in zip(claims, p, (False, outside, False), strict=True):
            known = math.isfinite(q)
            tests.append({"claim": claim, "p": float(q) if known else 1.0, "decided": known, "refuted": wrong})
        tests[-1] |= contrast if tests[-1]["decided"] else {}
        opposites += [1.0, 1.0, 1.0 - tests[-1]["p"] if tests[-1]["decided"] else 1.0]
    p_holm, p_opposite = holm([test["p"] for test in tests]), holm(opposites)
    for number, test in enumerate(tests):
        test |= {"test": number + 1, "p_holm": p_holm[number], "supported": p_holm[number] < LEVEL}
        test["refuted"] |= p_opposite[number] < LEVEL
    return tests


def decide_more(cells: pd.DataFrame) -> dict[str, Any]:
    """The record of the cells added later: tests 7 and 8 of `plan.md`, and `transfer` of their conditions."""
    best, table = best_rates(cells).xs(("gpt", "pre", False), level=ARM[:-1]).droplevel("tokens"), transfer(cells)
    base, wide = (best.loc[c].dropna() for c in MORE[:2])
    p = [stats.ttest_ind(wide, base, alternative="less").pvalue]
    p.append(stats.ttest_rel(*best.loc[MORE[2:]].dropna(axis=1).to_numpy(), alternative="greater").pvalue)
    p = [1.0 if math.isnan(q) else float(q) for q in p]  # of fewer than two seeds
    claims = "scaled, standard's best rate falls from width 64 to 256", "at 32 layers completep's is above standard's"
    tests = [{"claim": c, "p": q, "p_holm": h} for c, q, h in zip(claims, p, holm(p), strict=True)]
    own = table[[", std" in c[3] or c[4] == 32 for c in table.index]][["shift", "least", "most", "penalty", "gain"]]
    named = own.set_axis([f"{c[3]}, {c[4]} x {c[5]}" for c in own.index]).stack().items()
    metrics = {"/".join(name): {"value": value, "unit": UNITS[name[1]]} for name, value in named}
    metrics["spread of the base"] = {"value": float(base.std()), "unit": "octaves"}
    return new_record("scaling_law_more", "scaled_down", {"tests": tests}, 1, metrics, **ONE_THREAD)


def study_laws(cells: pd.DataFrame, complete: dict[str, bool]) -> pd.DataFrame:
    """`laws` of the study: of its group `tokens` alone, whose rate was chosen before; none until it has run."""
    (names,) = (run.names_of(group["keys"]) for group in run.read_groups() if group["name"] == "tokens")
    return laws(cells[cells.index.isin(names) & complete["tokens"]], NUM_RESAMPLES)


def summarize(cells: pd.DataFrame, tables: Iterable[pd.DataFrame], complete: dict[str, bool]) -> dict[str, Any]:
    """The record of the study: the tests, and the tables of `transfer`, `sensitivity`, `limits` and `laws`."""
    metrics = {}
    for table, kind in zip(tables, ("", "sensitivity_", "limit_", ""), strict=True):
        for (family, order, qk_norm, parametrization, *rest), row in table.add_prefix(kind).iterrows():
            arm = f"{family}_{order}{'_qk' * qk_norm}_{parametrization}"
            name = f"{arm}_{rest[0]}x{rest[1]}" if len(rest) > 1 else f"{arm}/{rest[0]}"
            metrics |= {f"{name}/{key}": {"value": value, "unit": UNITS.get(key, "1")} for key, value in row.items()}
    metrics["train_time"] = {"value": float(cells["train_time"].sum()), "unit": "s"}
    config = {"tests": decide(cells, complete), "complete": complete, "runs": len(cells)}
    return new_record("scaling_law", "scaled_down", config, 1, metrics, **ONE_THREAD)


def recorded_laws(record: dict[str, Any]) -> pd.DataFrame:
    """The laws of a record of `summarize`: one row per count, the columns of `laws`."""
    values = metrics_table(record)["value"]
    values = values[values.index.str.count("/") > 1]
    values.index = values.index.str.extract("/(.+)/(.+)").set_index([0, 1]).index
    return values.unstack().astype(float)


@one_line_errors()
def main() -> int:
    """Print the tables; for the study also decide its tests and write its summary."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    paths = "folders of runs and files of records; none: the study"
    parser.add_argument("paths", nargs="*", type=existing_path, help=paths)
    parser.add_argument("--more", action="store_true", help="the study with the cells of more.yaml: its record alone")
    parser.add_argument("--figure", type=path_argument, help="of the loss over the rate, of one family and placement")
    options = parser.parse_args()
    if options.more:
        record = decide_more(tabulate(read_runs([run.RECORDS, run.MORE_RECORDS])))
        print(*(f"{t['claim']}: p {t['p_holm']:.2g} after Holm" for t in record["config"]["tests"]), sep="\n")
        write_record(record, run.MORE_RECORDS.with_suffix(".json"))
        return 0
    if options.figure is not None:
        prepare_figure("--figure", options.figure)
    cells = tabulate(read_runs(options.paths or [run.RECORDS]))
    if options.figure is not None:
        check_one_panel(cells)
    complete = {group["name"]: run.is_complete(group, run.RECORDS) for group in run.read_groups()}
    found = laws(cells, NUM_RESAMPLES) if options.paths else study_laws(cells, complete)
    tables = {
        "Best rate of sizes with three rates at least, in octaves from that of the smallest size (none: at an end of "
        "the rates), the loss by which keeping that one is worse, and the gain by the size": transfer(cells),
        "Mean loss above the best, over rates from 1/8 to 8 times the best": sensitivity(cells),
        "Highest rate at which a seed ends 0.1 nats below a unigram model": limits(cells),
        "L = E + A N^-alpha + B D^-beta": found,
    }
    for title, table in (*tables.items(), ("Published exponents of the best N in compute", law.PUBLISHED)):
        shown = table.to_string(float_format="{:.3f}".format, na_rep="none") if len(table) else "too few runs"
        print(f"\n{title}\n{shown}")
    if options.figure is not None:
        draw_rates(cells, "Validation loss over the peak learning rate").savefig(options.figure)
        print(f"\nfigure: {options.figure}")
    if not options.paths:
        record = summarize(cells, tables.values(), complete)
        print("", *(f"test {t['test']}: {t['claim']}: {outcome(t)}" for t in record["config"]["tests"]), sep="\n")
        write_record(record, run.RECORDS.with_suffix(".json"))
        print(f"record: {run.RECORDS.with_suffix('.json')}")
    return 0


def outcome(test: dict[str, Any]) -> str:
    """The result of a test of `decide` in words."""
    if not test["decided"]:
        return "not decided: cells are missing, or a best rate is beyond the grid"
    words = "supported" if test["supported"] else "refuted" if test["refuted"] else "not supported"
    result = f"{words} (p {test['p_holm']:.2g} after Holm)"
    if "contrast" in test:
        result += f"; the difference {test['contrast']:+.3f} octaves, paired p {test['contrast_p']:.2g}"
    return result


if __name__ == "__main__":
    sys.exit(main())
