"""The planner's memory against tracked tensors."""

import pandas as pd


def peak_memory(record: dict) -> pd.DataFrame:
    """Predicted and tracked peak of every case of an `analysis/correctness/peak_memory.py` record.

    Returns:
        rows with columns `configuration`, `predicted`, `tracked`, `unit`, `difference %` (of the tracked), `evidence`.
    """
    rows = []
    for row in record["config"]["rows"]:
        predicted, tracked = row["predicted"] / 2**20, row["tracked"] / 2**20
        entry = {"configuration": row["name"], "predicted": predicted, "tracked": tracked, "unit": "MiB"}
        rows.append(entry | {"difference %": 100 * (predicted / tracked - 1), "evidence": row["evidence"]})
    return pd.DataFrame(rows)
