"""Tables of the speed and memory goals on a CPU with measured values, and of the breakdown of a step."""

import pandas as pd

# Description, record, metric, required value, whether less is better.
_GOALS = (
    ("GPT 6 x 512, bf16, against Hugging Face compiled", "bench_gpt_cpu", "hf_compiled/ratio_paired", 1.05, False),
    ("the same, fastest steps", "bench_gpt_cpu", "hf_compiled/ratio_least", 1.05, False),
    ("with dropout 0.1, against Hugging Face eager", "bench_gpt_dropout_cpu", "hf_eager/ratio_paired", 1.4, False),
    ("the same, fastest steps", "bench_gpt_dropout_cpu", "hf_eager/ratio_least", 1.4, False),
    ("with dropout 0.1, against nanoGPT eager", "bench_nanogpt_cpu", "file_eager/ratio_paired", 1.4, False),
    ("the same, fastest steps", "bench_nanogpt_cpu", "file_eager/ratio_least", 1.4, False),
    ("with dropout 0.1, against nanoGPT compiled", "bench_nanogpt_cpu", "file_compiled/ratio_paired", None, False),
    ("the same, fastest steps", "bench_nanogpt_cpu", "file_compiled/ratio_least", None, False),
    ("BERT 6 x 512, bf16, against Hugging Face compiled", "bench_bert_cpu", "hf_compiled/ratio_paired", 1.2, False),
    ("the same, fastest steps", "bench_bert_cpu", "hf_compiled/ratio_least", 1.2, False),
    ("tensor ranks 2 over 1, hidden size 512", "tensor_parallel_cost_cpu", "h512_l4/tp2_speedup_paired", 1.55, False),
    (
        "the same with sequence parallelism",
        "tensor_parallel_cost_cpu",
        "h512_l4/tp2_sequence_speedup_paired",
        1.55,
        False,
    ),
    ("tensor ranks 2 over 1, hidden size 1024", "tensor_parallel_cost_cpu", "h1024_l2/tp2_speedup_paired", 1.78, False),
    (
        "the same with sequence parallelism",
        "tensor_parallel_cost_cpu",
        "h1024_l2/tp2_sequence_speedup_paired",
        1.78,
        False,
    ),
    (
        "activations per rank at tp 2 with sequence parallelism",
        "tensor_parallel_cost_cpu",
        "h512_l4/tp2_sequence_share",
        0.55,
        True,
    ),
    (
        "bytes of the chunked loss, 8 x 1,024 tokens",
        "head_memory",
        "logits alone, 8 x 1,024/share_of_at_once",
        0.125,
        True,
    ),
    (
        "the same with the gradient of gpt_355m's word embedding",
        "head_memory",
        "gpt_355m, 8 x 1,024/share_of_at_once",
        0.125,
        True,
    ),
    ("Lightning and callbacks per step", "lightning_cost_cpu", "overhead", 0.001, True),
)


def cpu_speed(records: dict[str, dict]) -> pd.DataFrame:
    """Goals on a CPU and measured values.

    Args:
        records: by name, from `read_records`.

    Returns:
        rows with columns `what`, `required`, `measured`, `unit`, `reached` (empty if nothing is required) and
        `record`; without its record a goal is `not run`.
    """
    rows = []
    for what, name, metric, required, less_is_better in _GOALS:
        found = records.get(f"{name}.json", {}).get("metrics", {}).get(metric)
        row = {"what": what, "required": required, "measured": None, "unit": None, "reached": "not run", "record": None}
        if found is not None:
            value = found["value"]
            reached = required is not None and (value <= required if less_is_better else value >= required)
            row |= {"measured": value, "unit": found["unit"], "record": f"{name}.json"}
            row["reached"] = "" if required is None else "yes" if reached else "no"
        rows.append(row)
    return pd.DataFrame(rows)


def profile(records: dict[str, dict]) -> pd.DataFrame:
    """Shares of a traced step by kind of work, one column per record of `trace_shares.py`.

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
