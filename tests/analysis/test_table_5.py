"""Table 5 has every printed value once, ours beside it for runs of the paper's setting, and small runs separately."""

import dataclasses
import json
from pathlib import Path

import pytest
from composed import composed

from analysis.finetuning.inputs import RECORDS
from analysis.finetuning.small import summarize
from analysis.finetuning.table import table_5
from analysis.ledger.entries import PAPER as NUMBERS
from analysis.report.records import read_lines
from lmscale.config import TransformerConfig
from lmscale.config.finetune import FinetuneConfig
from lmscale.finetune.run_folder import SCORED, TRAINED, record_kind
from lmscale.paper import BERT_SIZES

SMALL = TransformerConfig("bert", 3, 24, 4, 301, 64)
PAPER = TransformerConfig("bert", *BERT_SIZES["1.3B"], 30_522, 512)


def finetune_record(kind: str, value: float, size: str | None, metric: str = "qqp/accuracy") -> dict:
    metrics = {metric: {"value": value, "unit": "%"}}
    return {"name": "finetune_qqp", "kind": kind, "metrics": metrics, "config": {"paper_size": size}}


def qqp_run(**trainer) -> FinetuneConfig:
    values = {"name": "finetune_qqp", "run_dir": "run", "ckpt": "ckpt", "size": "1.3b", "tokenizer": {}}
    values |= {"task": composed("finetune", "task=qqp", "ckpt=x")["task"]}
    values |= {"parallel": {}, "trainer": {"num_epochs": 12, "warmup_fraction": 0.1} | trainer}
    values |= {"optimizer": {"lr": 3e-5}, "precision": {"dtype": "fp16"}, "cache_dir": str(Path("cache"))}
    return FinetuneConfig.from_dict(values | {"micro_batch_size": 8, "global_batch_size": 128})


def test_without_records_every_printed_value_is_listed_as_not_run() -> None:
    table = table_5({})
    printed = [i for i in NUMBERS if i.startswith("table_5/") and not i.endswith("/trained_tokens")]
    assert len(table) == len(printed) == 73 and set(table["evidence"]) == {"not run"}
    row = table[(table["configuration"] == "3.9B") & (table["unit"] == "SQuAD 2.0 F1, %")]
    assert list(row["paper"]) == [91.2]


def test_runs_of_the_papers_model_give_their_median() -> None:
    records = {f"{n}.json": finetune_record("run", value, "1.3B") for n, value in enumerate((92.0, 93.0, 92.5))}
    records["small.json"] = finetune_record("scaled_down", 80.0, "1.3B")
    records["other.json"] = {"name": "speed", "kind": "run", "metrics": {}, "config": {}}
    table = table_5(records)
    (row,) = table[table["evidence"] != "not run"].to_dict("records")
    assert (row["configuration"], row["paper"], row["ours"], row["record"]) == ("1.3B", 92.6, 92.5, "0.json")
    assert row["difference"] == pytest.approx(-0.1)
    assert row["evidence"] == "reproduced, median of 3 (the paper: of 5)"


def test_the_small_bert_is_separate_from_printed_values() -> None:
    metrics = {}
    for task in ("mnli", "qqp", "race", "squad_v1"):
        metrics |= {f"{task}/{kind}/median": {"value": 50.0} for kind in ("pretrained", "from_scratch")}
        metrics[f"{task}/scored"] = {"value": 1234}
    record = {"name": "finetune_small", "kind": "scaled_down", "metrics": metrics, "config": {"seeds": [1, 2, 3]}}
    table = table_5({"finetune_small.json": record})
    small = table[table["evidence"] == "scaled down, median of 3"]
    assert len(small) == 8 and small["paper"].isna().all() and set(small["ours"]) == {50.0}
    assert "1,234 examples" in small["configuration"].iloc[0]


def test_only_the_papers_size_on_the_full_set_is_a_run() -> None:
    whole, trained = SCORED["qqp"], TRAINED["qqp"]
    assert record_kind(qqp_run(), PAPER, whole, trained) == ("run", "1.3B")
    assert record_kind(qqp_run(), PAPER, whole, None) == ("run", "1.3B")  # a finetuned checkpoint, scored again
    assert record_kind(qqp_run(), SMALL, whole, trained) == ("scaled_down", None)
    assert record_kind(qqp_run(), PAPER, {"dev": 669}, trained) == ("scaled_down", "1.3B")
    assert record_kind(qqp_run(), PAPER, whole, 8_999) == ("scaled_down", "1.3B")
    assert record_kind(qqp_run(max_train_examples=100), PAPER, whole, trained)[0] == "scaled_down"
    for changes in ({"norm_order": "post"}, {"parametrization": "mup"}):
        other = dataclasses.replace(PAPER, **changes)
        assert record_kind(qqp_run(), other, whole, trained)[0] == "scaled_down"


def test_the_committed_comparison_matches_the_committed_runs() -> None:
    again = summarize(read_lines(RECORDS / "finetune_small.jsonl"))
    assert again["metrics"] == json.loads((RECORDS / "finetune_small.json").read_text())["metrics"]
