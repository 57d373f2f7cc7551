"""The ledger as rows: every number of the paper with our side of it, and the few that stand for the rest."""

import pandas as pd

from .entries import all_entries
from .evidence import KINDS, SCALED_DOWN, Context

COLUMNS = ("id", "paper", "ours", "unit", "evidence", "from", "origin", "command")
# The rows of the short form, in words.
_MAIN = {
    "table_4/bert_3.9b/parameters": "Table 4, BERT 3.9B",
    "section_3/layer/forward": "Section 3, forward pass",
    "section_5.1/padded_vocabulary": "Section 5.1, padded vocabulary",
    "figure_1/mp_dp/512_gpus": "Figure 1, 512 GPUs",
    "figure_5/mp/8_gpus": "Figure 5, model parallel, 8 GPUs",
    "figure_5/mp_dp/512_gpus": "Figure 5, model + data parallel, 512 GPUs",
    "table_2/gpt_8.3b_24heads/days": "Table 2, GPT 8.3B",
    "table_7/gpt_8.3b/24_heads": "Table 7, 24 heads",
    "table_8/gpt_1.2b/8_gpus": "Table 8, 8 GPUs",
    "table_3/gpt_355m/wikitext103": "Table 3, GPT 355M",
    "table_3/gpt_355m/lambada": "Table 3, GPT 355M",
    "table_3/gpt_8.3b_24heads/wikitext103": "Table 3, GPT 8.3B",
    "figure_6/gpt_8.3b_24heads/validation_perplexity": "Figure 6, GPT 8.3B, validation",
    "figure_7/bert_336m/post": "Figure 7, BERT 336M, post-norm",
    "figure_7/bert_336m/pre": "Figure 7, BERT 336M, pre-norm",
    "figure_7/bert_752m/post": "Figure 7, BERT 752M, post-norm",
    "figure_7/bert_752m/pre": "Figure 7, BERT 752M, pre-norm",
    "table_5/bert_336m/mnli/accuracy_matched": "Table 5, BERT 336M",
    "table_5/bert_336m/squad_v1/f1": "Table 5, BERT 336M",
    "table_5/bert_3.9b/race/accuracy_test": "Table 5, BERT 3.9B",
}


def ledger(context: Context) -> pd.DataFrame:
    """One row an entry, in the order of `all_entries`.

    Returns:
        columns `COLUMNS`: `ours` is in the paper's unit, or words with its own; `from` is the record, the code, the
        key, or why there is none; `origin` how the paper's value was got.
    """
    rows = []
    for entry in all_entries():
        found = entry.find(context)
        ours = found.ours
        if found.unit is not None and not entry.unit.endswith(found.unit):
            ours = f"{ours:.4g} ({found.unit})"
        row = (entry.id, entry.value, ours, entry.unit, found.kind, found.source, entry.origin, entry.command)
        rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS), dtype=object)


def heading(place: str) -> str:
    """A place of the paper as it stands above its rows: `Table 1`, `Section 4.1`, `Appendix C`."""
    word, _, number = place.partition("_")
    return f"{word.capitalize()} {number.upper()}".rstrip()


def kinds(rows: pd.DataFrame) -> pd.DataFrame:
    """How many entries each kind of evidence has: columns `evidence`, `numbers`, `meaning`."""
    counts = rows["evidence"].value_counts()
    return pd.DataFrame(
        {
            "evidence": list(KINDS),
            "numbers": [int(counts.get(kind, 0)) for kind in KINDS],
            "meaning": list(KINDS.values()),
        }
    )


def short_form(rows: pd.DataFrame) -> pd.DataFrame:
    """The main rows: columns `where`, `paper`, `ours`, `unit`, `evidence`; of what is scaled down, what it is, and of a
    cell of the cost model whether it was fitted."""
    main = rows.set_index("id").loc[list(_MAIN), ["paper", "ours", "unit", "evidence", "from"]]
    small = main["evidence"] == SCALED_DOWN
    main.loc[small, "evidence"] += ": " + main.loc[small, "from"].str.split(": ", n=1).str[1]
    role = main["from"].str.extract(r"`cost_model.json`, (\w.*)$")[0].replace("fit", "fitted to it")
    main.loc[role.notna(), "evidence"] += ", " + role.dropna()
    main = main.drop(columns="from")
    main.insert(0, "where", list(_MAIN.values()))
    return main.reset_index(drop=True)
