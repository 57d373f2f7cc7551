"""The outcome of the second norm-order study as tables, from the record of `decide.py`."""

from typing import Any

import pandas as pd

from .cells import STATISTICS

NAMES = {"pre": "pre-norm", "post": "post-norm", "b2t": "B2T", "deepnorm": "DeepNorm"}
ANSWERS = {True: "yes", False: "no"}
REFUTED = "expectation refuted"
QUESTIONS = (
    "1. How does the largest rate that trains fall with depth?",
    "2. Which placement ends lower, each at its best rate?",
    "3. Does B2T, or a longer warm-up, recover post-norm's loss without its fragility?",
    "4. What distinguishes a stuck run early?",
    "5. Does it hold on a second corpus and for GPT?",
)


def table_of_tests(record: dict[str, Any]) -> pd.DataFrame:
    """The twelve tests: hypothesis, method, n, effect with its 95 % interval and unit, p, Holm's p, decision, note."""
    rows = record["config"]["tests"]
    numbers = {name: [f"{row[key]:.2g}" for row in rows] for name, key in (("p", "p"), ("p, Holm", "p_holm"))}
    table = pd.DataFrame(rows).astype({"test": str, "n": str})
    table = table.assign(**numbers, **{"effect, 95 %": [_effect(row) for row in rows]})
    return table[["test", "hypothesis", "method", "n", "effect, 95 %", "unit", *numbers, "decision", "note"]]


def questions_table(record: dict[str, Any]) -> pd.DataFrame:
    """The five questions of the plan: what was found, and whether the plan's conditions refute us."""
    found = (_depth, _who_ends_lower, _recovery, _mechanism, _elsewhere)
    refuted = record["config"]["refuted"]
    rows = [
        {"question": question, "found": words(record["config"]), REFUTED: ANSWERS[refuted[f"question {number}"]]}
        for number, (question, words) in enumerate(zip(QUESTIONS, found, strict=True), 1)
    ]
    return pd.DataFrame(rows)


def limits_table(record: dict[str, Any]) -> pd.DataFrame:
    """The largest rate at which both seeds learned, with all lower ones: a row per placement and warm-up, by depth."""
    rows = pd.DataFrame(record["config"]["limits"])
    rows = rows.assign(placement=rows["order"].map(NAMES), limit=rows["limit"].map("{:.2g}".format))
    rows = rows.rename(columns={"warmup": "warm-up"})
    return rows.pivot(index=["placement", "warm-up"], columns="layers", values="limit").fillna("")


def _effect(row: dict[str, Any]) -> str:
    if row["effect"] is None:
        return ""
    form = "+.3f" if row["unit"] != "share of pairs" else ".2f"
    return f"{row['effect']:{form}} [{row['low']:{form}}, {row['high']:{form}}]"


def _decided(row: dict[str, Any]) -> str:
    effect = _effect(row)
    if effect and row["unit"] == "share of pairs":
        lower = "lower in " if row["method"] == "exact sign test" else ""
        effect = f"{lower}{row['effect'] * row['n']:.0f} of the {row['n']} pairs that differ"
    return f"{effect} ({row['decision']})" if effect else row["decision"]


def _depth(config: dict[str, Any]) -> str:
    fits = [
        f"{NAMES[order]} {fit['k']:.2f} [{fit['low']:.2f}, {fit['high']:.2f}] at {fit['layers'][0]} to "
        f"{fit['layers'][-1]} layers ({fit['k_deepest_higher']:.2f} to {fit['k_deepest_lower']:.2f} with the deepest "
        "limits a step higher or lower)"
        for order, fit in config["exponents"].items()
    ]
    faster = f"Post-norm's faster fall (test 7): {_decided(config['tests'][6])}."
    return f"As depth^-k, with k of {', '.join(fits)}. {faster}"


def _who_ends_lower(config: dict[str, Any]) -> str:
    return " ".join(
        f"At {layers} layers: post-norm minus pre-norm {_decided(config['tests'][first])}, "
        f"B2T minus post-norm {_decided(config['tests'][first + 2])}, "
        f"B2T minus pre-norm {_decided(config['tests'][first + 4])}."
        for layers, first in ((12, 0), (24, 1))
    )


def _recovery(config: dict[str, Any]) -> str:
    recovered = config["recovery"]
    answers = {name: ANSWERS[value] for name, value in recovered.items()}
    for arm in ("warm-up of 400, 12 layers", "warm-up of 400, 24 layers"):
        if recovered[f"{arm}: recovers"] and recovered[f"{arm}: 100 steps do so too"]:
            answers[f"{arm}: recovers"] = "trivially, as 100 steps do,"
    b2t = ", ".join(f"{answers[f'b2t, {layers} layers: recovers']} at {layers} layers" for layers in (12, 24))
    longer = ", ".join(f"{answers[f'warm-up of 400, {n} layers: recovers']} at {n} layers" for n in (12, 24))
    deep = answers["b2t, 48 layers: learns at twice post-norm's limit"]
    return (
        f"B2T: {b2t}. It learns at twice post-norm's limit at 48 layers: {deep}. With a warm-up of 400 steps, "
        f"post-norm's limit is at least pre-norm's (two seeds): {longer}. For eight seeds at 0.006 see test 8."
    )


def _mechanism(config: dict[str, Any]) -> str:
    tests, rule = config["tests"], config["mechanism"]
    chosen = rule["rule"]
    side = "above" if chosen["above"] else "below"
    return (
        f"{STATISTICS[chosen['statistic']]} {side} {chosen['threshold']:.3g} at step 100 is right for "
        f"{rule['accuracy']:.0%} [{rule['low']:.0%}, {rule['high']:.0%}] of {rule['n']} held-out runs; the "
        f"loss alone {rule['loss_accuracy']:.0%}, the majority {rule['majority_accuracy']:.0%}, depth, rate and "
        f"warm-up {rule['condition_accuracy']:.0%} (test 9: {tests[8]['decision']}). Medians of the constant share: "
        f"{', '.join(f'{state} {value:.2f}' for state, value in rule['constant_share'].items())}. "
        f"Runs without statistics: {config['without_statistics']}. Warm-up (test 8): {_decided(tests[7])}. "
        f"DeepNorm (test 10): {_decided(tests[9])}."
    )


def _elsewhere(config: dict[str, Any]) -> str:
    race, gpt = (_decided(config["tests"][test - 1]) for test in (11, 12))
    return f"Post-norm minus pre-norm at 12 layers: on RACE {race}, for GPT {gpt}."
