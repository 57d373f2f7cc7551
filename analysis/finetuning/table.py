"""Table 5 of the paper, finetuned BERTs: the paper's values, ours, and the kind of evidence."""

import statistics
from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.ledger.entries import ENTRIES, PAPER

NOT_RUN = "not run"
# Rows of Table 5 by their part of the ledger's ids; its columns are metrics of a finetuning record.
_MODELS = {
    "bert_336m": "336M",
    "bert_1.3b": "1.3B",
    "bert_3.9b": "3.9B",
    "bert_3.9b_ensemble": "3.9B ensemble",
    "roberta": "RoBERTa",
    "albert": "ALBERT",
    "xlnet": "XLNet",
    "albert_ensemble": "ALBERT ensemble",
}
_UNITS = {
    entry.id.removeprefix("table_5/bert_336m/"): entry.unit
    for entry in ENTRIES
    if entry.id.startswith("table_5/bert_336m/") and not entry.id.endswith("/trained_tokens")
}
# Task in finetune_small.json -> metric and scored set; those of Table 5, and the other ones of GLUE.
_SMALL = {
    "mnli": "MNLI matched and mismatched, accuracy, %",
    "qqp": "QQP accuracy, %",
    "squad_v1": "SQuAD 1.1 F1, %",
    "race": "RACE dev accuracy, %",
}
_SMALL_GLUE = {
    "cola": "CoLA Matthews correlation x 100",
    "sst2": "SST-2 accuracy, %",
    "mrpc": "MRPC accuracy, %",
    "stsb": "STS-B Pearson correlation x 100",
    "qnli": "QNLI accuracy, %",
    "rte": "RTE accuracy, %",
}


def table_5(records: Mapping[str, dict[str, Any]]) -> pd.DataFrame:
    """Every value of Table 5 with the median of ours, then our small measurements.

    A record is `reproduced` if the model's size and the scored sets are the paper's (`finetune.run_folder.record_kind`
    decides when it is written). Only such records are placed beside a printed value.

    Args:
        records: by file name; records of other kinds are ignored.

    Returns:
        rows with columns `configuration`, `paper`, `ours`, `difference` (ours - paper), `unit`, `evidence`
        (`reproduced, median of n`, `scaled down` or `not run`) and `record` (the first of several).

    Source: Table 5; section 5.3 for the median of five seeds.
    """
    rows = []
    for metric, unit in _UNITS.items():
        for model, name in _MODELS.items():
            paper = PAPER.get(f"table_5/{model}/{metric}")
            if paper is not None:
                rows.append({"configuration": name, "paper": paper, "unit": unit} | _ours(records, name, metric, paper))
    for file, record in sorted(records.items()):
        if record["name"] == "finetune_small":
            rows += _small_rows(file, record)
    columns = ["configuration", "paper", "ours", "difference", "unit", "evidence", "record"]
    return pd.DataFrame(rows, columns=columns)


def small_medians(records: Mapping[str, dict[str, Any]]) -> pd.DataFrame:
    """The comparison of `small.py`: medians over the seeds, in percent, and the larger of two standard errors."""
    rows, summary = [], records.get("finetune_small.json", {"config": {"metrics": {}}})
    for task in summary["config"]["metrics"]:
        of_task = {name: entry["value"] for name, entry in summary["metrics"].items() if name.startswith(f"{task}/")}
        value = {name.removeprefix(f"{task}/"): number for name, number in of_task.items()}
        config = records[f"finetune_small/{task}_pretrained_1"]["config"]
        rows.append(
            {
                "task": (_SMALL | _SMALL_GLUE)[task],
                "trained on": f"{config['sets']['train']['items']:,} x {config['trainer']['num_epochs']}",
                "scored": value["scored"],
                "required": value["floor"],
                "one class": value.get("majority"),
                "published weights": value["pretrained/median"],
                "random weights": value["from_scratch/median"],
                "error of the difference": max(value["se_seeds"], value["se_examples"]),
            }
        )
    return pd.DataFrame(rows)


def small_runs(records: Mapping[str, dict[str, Any]]) -> pd.DataFrame:
    """All runs of `small.py`: columns metric, kind (`published weights` or `random weights`), seed, score and floor.

    Score and floor are in percent.
    """
    summary, rows = records["finetune_small.json"], []
    for task, metric in summary["config"]["metrics"].items():
        floor = summary["metrics"][f"{task}/floor"]["value"]
        for kind, words in (("pretrained", "published weights"), ("from_scratch", "random weights")):
            for seed in summary["config"]["seeds"]:
                record = records[f"finetune_small/{task}_{kind}_{seed}"]
                score = record["metrics"][metric]["value"]
                rows.append({"metric": metric, "kind": words, "seed": seed, "score": score, "floor": floor})
    return pd.DataFrame(rows)


def _ours(records: Mapping[str, dict[str, Any]], size: str, metric: str, paper: float) -> dict[str, Any]:
    """Our value for a printed one: the median over the runs of the paper's model that have the metric."""
    found = {
        file: record["metrics"][metric]["value"]
        for file, record in sorted(records.items())
        if record["kind"] == "run" and record["config"].get("paper_size") == size and metric in record["metrics"]
    }
    if not found:
        return {"evidence": NOT_RUN}
    ours = statistics.median(found.values())
    needed = 1 if size.endswith("ensemble") else PAPER["section_5.3/seeds"]
    short = "" if len(found) >= needed else f" (the paper: of {needed})"
    evidence = f"reproduced, median of {len(found)}{short}"
    return {"ours": ours, "difference": ours - paper, "evidence": evidence, "record": next(iter(found))}


def _small_rows(file: str, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Medians of the small BERT from published and from random weights."""
    rows, seeds = [], len(record["config"]["seeds"])
    for task, unit in _SMALL.items():
        if f"{task}/scored" not in record["metrics"]:
            continue
        for kind, words in (("pretrained", "published weights"), ("from_scratch", "random weights, the control")):
            model = f"6 x 384, {words}; {record['metrics'][f'{task}/scored']['value']:,} examples"
            row = {"configuration": model, "ours": record["metrics"][f"{task}/{kind}/median"]["value"], "unit": unit}
            rows.append(row | {"evidence": f"scaled down, median of {seeds}", "record": file})
    return rows
