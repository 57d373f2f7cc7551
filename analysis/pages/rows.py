"""The ledger as rows: every number of the paper with our value, and the main ones for the short form."""

import pandas as pd

from analysis.ledger.entries import ENTRIES, SHORT_FORM

from .evidence import COUNTED, KINDS, MODELLED, NOT_RUN, REPRODUCED, SCALED_DOWN, SETTING, Context, find

COLUMNS = ("id", "paper", "ours", "unit", "evidence", "from", "origin", "command")


def ledger(context: Context) -> pd.DataFrame:
    """One row per entry, in the order of `paper.yaml`.

    Returns:
        columns `COLUMNS`: `ours` is in the paper's unit, or text with its own; `from` is the record, the code, the key,
        or why there is none; `origin` is how the paper's value was obtained.
    """
    rows = []
    for entry in ENTRIES:
        found = find(entry, context)
        ours = found.ours
        if found.unit is not None and not entry.unit.endswith(found.unit):
            ours = f"{ours:.4g} ({found.unit})"
        row = (entry.id, entry.paper, ours, entry.unit, found.kind, found.source, entry.origin, entry.command)
        rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS), dtype=object)


def heading(place: str) -> str:
    """Heading of a place in the paper: `Table 1`, `Section 4.1`, `Appendix C`."""
    word, _, number = place.partition("_")
    return f"{word.capitalize()} {number.upper()}".rstrip()


def kinds(rows: pd.DataFrame) -> pd.DataFrame:
    """Number of entries per kind of evidence: columns `evidence`, `numbers`, `meaning`."""
    counts = rows["evidence"].value_counts()
    found = [(kind, int(counts.get(kind, 0)), meaning) for kind, meaning in KINDS.items()]
    return pd.DataFrame(found, columns=["evidence", "numbers", "meaning"])


def status(rows: pd.DataFrame) -> str:
    """How many numbers were counted, modelled or reached by training."""
    of = kinds(rows).set_index("evidence")["numbers"]
    return (
        f"Of the paper's {len(rows)} numbers, {of[SETTING]} are settings of its runs. Of the other "
        f"{len(rows) - of[SETTING]}, {of[COUNTED]} are counted exactly, {of[MODELLED]} are modelled, {of[SCALED_DOWN]} "
        f"were measured on models scaled down and are not comparable, and {of[NOT_RUN]} were not run. Training at the "
        f"paper's size reached {of[REPRODUCED] or 'none'} of them."
    )


def short_form(rows: pd.DataFrame) -> pd.DataFrame:
    """The main rows: columns `where`, `paper`, `ours`, `unit`, `evidence`.

    `evidence` also names what was scaled down, and for a cell of the cost model whether it was in the fit.
    """
    main = rows.set_index("id").loc[list(SHORT_FORM), ["paper", "ours", "unit", "evidence", "from"]]
    small = main["evidence"] == SCALED_DOWN
    main.loc[small, "evidence"] += ": " + main.loc[small, "from"].str.split(": ", n=1).str[1]
    role = main["from"].str.extract(r"`cost_model.json`, (\w.*)$")[0].replace("fit", "fitted to it")
    main.loc[role.notna(), "evidence"] += ", " + role.dropna()
    main = main.drop(columns="from")
    main.insert(0, "where", list(SHORT_FORM.values()))
    return main.reset_index(drop=True)
