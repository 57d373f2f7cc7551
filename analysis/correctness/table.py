"""Table of predicted and tracked peak memory."""

import pandas as pd


def peak_memory(record: dict) -> pd.DataFrame:
    """Predicted and tracked peak of every case in a record of `analysis/correctness/peak_memory.py`.

    Returns:
        rows with columns `configuration`, `predicted`, `tracked`, `unit`, `difference %` (relative to tracked),
        `evidence`.
    """
    rows = []
    for row in record["config"]["rows"]:
        predicted, tracked = row["predicted"] / 2**20, row["tracked"] / 2**20
        entry = {"configuration": row["name"], "predicted": predicted, "tracked": tracked, "unit": "MiB"}
        rows.append(entry | {"difference %": 100 * (predicted / tracked - 1), "evidence": row["evidence"]})
    return pd.DataFrame(rows)
