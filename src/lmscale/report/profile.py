"""Where a step's time goes, models side by side."""

import pandas as pd


def profile(records: dict[str, dict]) -> pd.DataFrame:
    """Shares of a traced step by kind of work, of `analysis/trace_shares.py` records by the heading of their column.

    Returns:
        rows with columns `kind of work` and, in percent of the traced time, one a record; the largest of the first
        record come first, and a kind that one did not meet is 0.
    """
    columns = {
        f"{name} %": pd.Series({kind: 100 * entry["value"] for kind, entry in record["metrics"].items()})
        for name, record in records.items()
    }
    table = pd.DataFrame(columns).fillna(0.0)
    table = table.sort_values(list(table.columns), ascending=False)
    return table.rename_axis("kind of work").reset_index()
