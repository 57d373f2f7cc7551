"""Tables of the speed and memory goals on a CPU with measured values, and of the breakdown of a step."""

import statistics
from pathlib import PurePosixPath

import pandas as pd

_TWO_RANKS, _HEAD, _SHARE = "tensor_parallel_cost_cpu", "head_memory", "8 x 1,024/share_of_at_once"
# Description, record, metric, goal, whether less is better.
_GOALS = (
    ("GPT without dropout, against Hugging Face compiled", "bench_gpt_cpu", "hf_compiled/ratio_paired", 1.10, False),
    ("GPT with dropout 0.1, against Hugging Face eager", "bench_gpt_dropout_cpu", "hf_eager/ratio_paired", 1.5, False),
    ("GPT with dropout 0.1, against nanoGPT eager", "bench_nanogpt_cpu", "file_eager/ratio_paired", 1.5, False),
    ("GPT with dropout 0.1, against nanoGPT compiled", "bench_nanogpt_cpu", "file_compiled/ratio_paired", 1.35, False),
    ("BERT without dropout, against Hugging Face compiled", "bench_bert_cpu", "hf_compiled/ratio_paired", 1.5, False),
    *(
        (f"{what}, hidden size {size}", _TWO_RANKS, f"{shape}/{name}_speedup_paired", goal, False)
        for shape, size in (("h512_l4", "512"), ("h1024_l2", "1,024"))
        for what, name, goal in (
            ("two tensor ranks", "tp2", 1.87),
            ("two tensor ranks with sequence parallelism", "tp2_sequence", 1.87),
            ("two models at a time, the limit of this machine", "two_models", None),
        )
    ),
    ("activations per rank at tp 2 with sequence parallelism", _TWO_RANKS, "h512_l4/tp2_sequence_share", 0.55, True),
    ("bytes of the chunked loss, 8 x 1,024 tokens", _HEAD, f"logits alone, {_SHARE}", 0.125, True),
    ("the same with the gradient of gpt_355m's word embedding", _HEAD, f"gpt_355m, {_SHARE}", 0.125, True),
    ("Lightning and callbacks per step", "lightning_cost_cpu", "overhead", 0.001, True),
)


def cpu_speed(records: dict[str, dict]) -> pd.DataFrame:
    """Goals on a CPU and measured values, each the median of all runs that have a record.

    Args:
        records: by name, from `read_records`; runs of one benchmark differ in their folder only.

    Returns:
        rows with columns `what`, `goal`, `median`, `least`, `most`, `runs`, `unit` and `reached`, which compares the
        median and is empty if there is no goal; without a record it is `not run`.
    """
    rows = []
    for what, name, metric, goal, less_is_better in _GOALS:
        metrics = [record["metrics"] for path, record in records.items() if PurePosixPath(path).stem == name]
        found = [each[metric] for each in metrics if metric in each]
        row = {"what": what, "goal": goal, "median": None, "least": None, "most": None, "runs": len(found)}
        row |= {"unit": None, "reached": "not run"}
        if found:
            values = [entry["value"] for entry in found]
            median = statistics.median(values)
            reached = goal is not None and (median <= goal if less_is_better else median >= goal)
            row |= {"median": median, "least": min(values), "most": max(values), "unit": found[0]["unit"]}
            row["reached"] = "" if goal is None else "yes" if reached else "no"
        rows.append(row)
    return pd.DataFrame(rows)


def profile(records: dict[str, dict]) -> pd.DataFrame:
    """Shares of a traced step by kind of work, one column per record.

    Returns:
        rows with columns `kind of work` and one per record, in percent of the traced time, sorted by the first record;
        kinds that do not occur in a record are 0.
    """
    columns = {
        f"{name} %": pd.Series({kind: 100 * entry["value"] for kind, entry in record["metrics"].items()})
        for name, record in records.items()
    }
    table = pd.DataFrame(columns).fillna(0.0)
    table = table.sort_values(list(table.columns), ascending=False)
    return table.rename_axis("kind of work").reset_index()
