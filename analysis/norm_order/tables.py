"""The tables of both norm-order studies, from the records of `decide.py` and the rows of `summary.py`."""

import math
from typing import Any

import pandas as pd

from .run_folder import NATS

NAMES = {"pre": "pre-norm", "post": "post-norm", "b2t": "B2T", "deepnorm": "DeepNorm"}


def table_of_tests(record: dict[str, Any]) -> pd.DataFrame:
    """The twelve tests: hypothesis, method, n, effect with its 95 % interval and unit, p, Holm's p, decision, note."""
    rows = record["config"]["tests"]
    numbers = {name: [f"{row[key]:.2g}" for row in rows] for name, key in (("p", "p"), ("p, Holm", "p_holm"))}
    table = pd.DataFrame(rows).astype({"test": str, "n": str})
    table = table.assign(**numbers, **{"effect, 95 %": [_effect(row) for row in rows]})
    return table[["test", "hypothesis", "method", "n", "effect, 95 %", "unit", *numbers, "decision", "note"]]


def _effect(row: dict[str, Any]) -> str:
    if row["effect"] is None:
        return ""
    form = "+.3f" if row["unit"] != "share of pairs" else ".2f"
    return f"{row['effect']:{form}} [{row['low']:{form}}, {row['high']:{form}}]"


def limits_table(record: dict[str, Any]) -> pd.DataFrame:
    """The largest rate at which both seeds learned, with all lower ones: a row per placement and warm-up, by depth."""
    rows = pd.DataFrame(record["config"]["limits"])
    rows = rows.assign(placement=rows["order"].map(NAMES), limit=rows["limit"].map("{:.2g}".format))
    rows = rows.rename(columns={"warmup": "warm-up"})
    return rows.pivot(index=["placement", "warm-up"], columns="layers", values="limit").fillna("")


def start_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Format `start_differences` for display."""
    shown = [_interval(row.difference, row.half_width) for row in rows.itertuples()]
    columns = {"layers": rows["layers"], "norm order": rows["order"], "learning rate": rows["lr"]}
    return pd.DataFrame(columns | {"not scaled - scaled, 95 %": shown, "unit": NATS})


def order_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Format `order_differences` for display."""
    return pd.DataFrame(
        {
            "layers": rows["layers"],
            "initialization of residual layers": ["scaled" if scaled else "not scaled" for scaled in rows["scaled"]],
            "pre-norm (lr)": [_loss_and_rate(r.pre, r.lr_pre) for r in rows.itertuples()],
            "post-norm (lr)": [_loss_and_rate(r.post, r.lr_post) for r in rows.itertuples()],
            "post - pre, 95 %": [_interval(r.difference, r.half_width) for r in rows.itertuples()],
            "validation": [_interval(r.validation_difference, r.validation_half_width) for r in rows.itertuples()],
            "unit": NATS,
            "pre-norm runs": rows["state_pre"],
            "post-norm runs": rows["state_post"],
            "evidence": "scaled down",
        }
    )


def _loss_and_rate(loss: float, lr: float) -> str:
    return ("-" if math.isnan(loss) else f"{loss:.3f}") + f" ({lr:g})"


def _interval(mean: float, half_width: float) -> str:
    if math.isnan(mean):
        return ""
    return f"{mean:+.3f}" + (" (one seed)" if math.isnan(half_width) else f" +- {half_width:.3f}")
