"""Table of predicted and tracked peak memory."""

import pandas as pd


def peak_memory(record: dict) -> pd.DataFrame:
    """Predicted and tracked peak of every case in a record of `analysis/correctness/peak_memory.py`.

    Returns:
        rows with columns `configuration`, `predicted`, `tracked`, `unit`, `difference %` (relative to tracked),
        `evidence`.
    """
    rows = pd.DataFrame(record["config"]["rows"])
    predicted, tracked = rows["predicted"] / 2**20, rows["tracked"] / 2**20
    sizes = {"configuration": rows["name"], "predicted": predicted, "tracked": tracked, "unit": "MiB"}
    return pd.DataFrame(sizes | {"difference %": 100 * (predicted / tracked - 1), "evidence": rows["evidence"]})
