"""Table 3 of the paper, zero-shot results: the paper's values, ours, and the kind of evidence."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.ledger.entries import PAPER
from lmscale.config import TransformerConfig
from lmscale.planner.params import count_parameters

EVIDENCE = {"run": "reproduced", "scaled_down": "scaled down", "modelled": "modelled"}
NOT_RUN = "not run"
_MODELS = {"355M": "gpt_355m", "2.5B": "gpt_2.5b", "8.3B": "gpt_8.3b_24heads"}
# record -> column of Table 3, unit, metric per form of the file
_MEASURES = {
    "zero_shot_wikitext103": ("wikitext103", "WikiText103 perplexity", ("wikitext103/perplexity",)),
    "zero_shot_lambada": (
        "lambada",
        "LAMBADA accuracy, %",
        ("lambada_openai/accuracy_last_word", "lambada_original/accuracy_last_word"),
    ),
}


def table_3(records: Mapping[str, dict[str, Any]]) -> pd.DataFrame:
    """Every value of Table 3 with ours, then our measurements without a counterpart in the paper.

    A record is `reproduced` if the model's size, its steps, the file and the protocol are the paper's
    (`evaluation.task.Task.record_kind` decides when it is written). Only such records are placed beside a printed
    value, because perplexities of other files and models are not comparable.

    Args:
        records: by file name; records of other kinds are ignored.

    Returns:
        rows with columns `configuration`, `paper`, `ours`, `difference` (ours - paper), `unit`, `evidence`
        (`reproduced`, `scaled down`, `modelled` or `not run`) and `record`.

    Raises:
        ValueError: a record names a paper model that Table 3 does not have.

    Source: Table 3; perplexity by the formula of appendix E, LAMBADA accuracy on the whole last word.
    """
    ours = [_measurement(name, record) for name, record in sorted(records.items()) if record["name"] in _MEASURES]
    rows = []
    for key, unit, _ in _MEASURES.values():
        printed = {size: PAPER[f"table_3/{model}/{key}"] for size, model in _MODELS.items()}
        for size, paper in printed.items():
            found = [row for row in ours if row["size"] == size and row["unit"] == unit]
            rows += [row | {"paper": paper, "difference": row["ours"] - paper} for row in found]
            if not found:
                rows.append({"configuration": size, "paper": paper, "unit": unit, "evidence": NOT_RUN})
        best = {"configuration": "previous best, as printed", "paper": PAPER[f"table_3/previous_best/{key}"]}
        rows.append(best | {"unit": unit, "evidence": NOT_RUN})
        rows += [row for row in ours if row["size"] is None and row["unit"] == unit]
    columns = ["configuration", "paper", "ours", "difference", "unit", "evidence", "record"]
    return pd.DataFrame(rows, columns=columns)


def _measurement(name: str, record: dict[str, Any]) -> dict[str, Any]:
    """A row of our side alone; `size` is the paper's name of the model for a reproduced record."""
    about, metrics = record["config"], record["metrics"]
    _, unit, candidates = _MEASURES[record["name"]]
    metric = next(candidate for candidate in candidates if candidate in metrics)
    size = about["paper_size"] if record["kind"] == "run" else None
    if size is not None and size not in _MODELS:
        raise ValueError(f"`paper_size` must be one of {', '.join(_MODELS)}, but is {size!r} in {name}")
    value = metrics[metric]["value"]
    return {
        "configuration": size or _describe(about, metric, metrics),
        "ours": float(metrics[metric]["non_finite"]) if value is None else value,
        "unit": unit,
        "evidence": EVIDENCE[record["kind"]],
        "record": name,
        "size": size,
    }


def _describe(about: dict[str, Any], metric: str, metrics: dict[str, dict[str, Any]]) -> str:
    """Describe a model and a file that differ from the paper's."""
    model, file = TransformerConfig.from_dict(about["model"]), about["file"]
    millions = count_parameters(model).total / 1e6
    which = file["name"] if file["split"] == "other" else f"{file['split']} file"
    if metric.startswith("lambada"):
        which += f", {metrics[metric.split('/')[0] + '/passages']['value']:,} passages"
        which += " in the original form" if metric.startswith("lambada_original") else ""
    step = f"step {about['checkpoint']['step']:,}"
    return f"{model.num_layers} x {model.hidden_size}, {millions:.1f} M parameters, {step}; {which}"
