"""The committed tables match the committed records, and Table 3 states the evidence for each value."""

import re
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from analysis.pages import make_tables, results_page
from analysis.pages.record_list import described, record_list
from analysis.pages.results_page import metric_tables
from analysis.report.records import add_line, read_records
from analysis.zero_shot.table import table_3
from lmscale.config import TransformerConfig
from lmscale.paper import GPT_SIZES

ROOT = Path(__file__).resolve().parents[2]
SMALL = TransformerConfig("gpt", 3, 24, 4, 301, 64)


def gpt(size: str) -> TransformerConfig:
    return TransformerConfig("gpt", *GPT_SIZES[size], 50_257, 1024)


def zero_shot_record(task: str, kind: str, value: float | None, model: TransformerConfig = SMALL, **about) -> dict:
    metric = {"wikitext103": "wikitext103/perplexity", "lambada": "lambada_openai/accuracy_last_word"}[task]
    config = {"model": model.to_dict(), "paper_size": None, "checkpoint": {"step": 70}}
    config["file"] = {"name": "some.tokens", "split": "validation"}
    entry = (
        {"value": value, "unit": "any"} if value is not None else {"value": None, "non_finite": "inf", "unit": "any"}
    )
    return {"record_version": 1, "name": f"zero_shot_{task}", "kind": kind, "metrics": {metric: entry}} | {
        "config": config | about
    }


def rows_of(table: pd.DataFrame, evidence: str) -> list[tuple]:
    part = table[table["evidence"] == evidence]
    return list(part[["configuration", "paper", "ours", "difference"]].itertuples(index=False, name=None))


def test_the_committed_tables_match_the_committed_records() -> None:
    records = read_records()
    rows = make_tables.all_rows(records)
    pages = [path.read_text(encoding="utf-8") for path in make_tables.PAGES]
    folders = [path.parent for path in make_tables.PAGES]
    assert pages == [
        make_tables.fill_page(page, rows, records, folder) for page, folder in zip(pages, folders, strict=True)
    ]
    named = re.findall(r"<!-- table: (.*?) -->", "".join(pages))
    assert set(named) >= rows.keys() - {"Ledger"} | set(metric_tables(records))
    assert "".join(pages).count("<!-- end of the table -->") == len(named)


def test_every_record_has_a_command_and_a_commit_of_this_history() -> None:
    records = read_records()
    table = record_list(records)
    assert [row.record for row in table.itertuples() if row.command == "``"] == []
    if git("rev-parse", "--is-shallow-repository") != (0, "false"):
        pytest.skip("this is not a whole clone")
    commits = {name: str(record["environment"]["commit"]) for name, record in records.items()}
    inside = {commit: git("merge-base", "--is-ancestor", commit, "HEAD")[0] == 0 for commit in set(commits.values())}
    missing = {name for name, commit in commits.items() if not inside[commit]}
    assert missing <= described()["elsewhere"].keys()


def git(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout.strip()


def test_a_record_is_found_by_its_name_in_the_folder_of_its_study(tmp_path) -> None:
    for place in ("one/records/a.json", "two/records/cells/b.json"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text('{"record_version": 1}')
    assert list(read_records(tmp_path)) == ["a.json", "cells/b.json"]
    (tmp_path / "two" / "records" / "a.json").write_text("{}")
    with pytest.raises(ValueError, match="names of records must be different, but a.json occurs twice"):
        read_records(tmp_path)


def test_records_of_a_file_have_what_they_share_and_their_own(tmp_path) -> None:
    path = tmp_path / "records" / "cells.jsonl"
    path.parent.mkdir()
    path.write_text(
        '{"shared": {"record_version": 1, "config": {"steps": 5, "model": {"layers": 2}}}}\n'
        '{"record": "a", "config": {"model": {"heads": 4}, "lr": 1}}\n'
        '{"record": "b", "kind": "run"}\n'
    )
    add_line(path, "c", {"record_version": 1})
    shared = {"steps": 5, "model": {"layers": 2}}
    assert read_records(tmp_path) == {
        "cells/a": {"record_version": 1, "config": shared | {"model": {"layers": 2, "heads": 4}, "lr": 1}},
        "cells/b": {"record_version": 1, "config": shared, "kind": "run"},
        "cells/c": {"record_version": 1},
    }
    add_line(path, "c", {"record_version": 1})
    with pytest.raises(ValueError, match="IDs of records must be different, but c occurs twice in .*cells.jsonl"):
        read_records(tmp_path)
    path.write_text('{"record": "a"')
    with pytest.raises(ValueError, match="must be JSON, but line 1 of .*cells.jsonl is not"):
        read_records(tmp_path)


def test_a_table_of_metrics_shows_sum_count_and_maximum(monkeypatch, tmp_path) -> None:
    described = "kills:\n" + "".join(
        f"  - {{what: {of}, record: a.json, metric: kills/.*, of: {of}}}\n" for of in ("sum", "number", "largest")
    )
    (tmp_path / "results.yaml").write_text(described)
    monkeypatch.setattr(results_page, "__file__", str(tmp_path / "results_page.py"))
    metrics = {"kills/0": {"value": 7, "unit": "kills"}, "kills/1": {"value": -9, "unit": "kills"}}
    table = metric_tables({"a.json": {"metrics": metrics}})["kills"]
    assert table["measured"].tolist() == [-2, 2, -9]
    assert table["unit"].tolist() == ["kills", "", "kills"]
    with pytest.raises(ValueError, match=r"must match metrics of a.json, but 'kills/.\*' matches 0"):
        metric_tables({"a.json": {"metrics": {}}})


def test_without_records_every_value_of_table_3_is_listed_as_not_run() -> None:
    table = table_3({})
    assert set(table["evidence"]) == {"not run"} and table["ours"].isna().all()
    assert list(table["paper"]) == [19.31, 12.76, 10.81, 15.79, 45.18, 61.73, 66.51, 63.24]


def test_a_run_of_the_papers_model_is_beside_the_printed_value() -> None:
    run = zero_shot_record("lambada", "run", 46.0, gpt("355M"), paper_size="355M")
    table = table_3({"b.json": run, "a.json": {"name": "speed", "kind": "run"}})
    ((configuration, paper, ours, difference),) = rows_of(table, "reproduced")
    assert (configuration, paper, ours) == ("355M", 45.18, 46.0) and difference == pytest.approx(0.82)
    missing = table[(table["evidence"] == "not run") & (table["unit"] == "LAMBADA accuracy, %")]
    assert list(missing["configuration"]) == ["2.5B", "8.3B", "previous best, as printed"]
    assert list(table["record"].dropna()) == ["b.json"]


def test_a_scaled_down_record_has_no_printed_value_beside_it() -> None:
    small = zero_shot_record("wikitext103", "scaled_down", 333.25)
    early = zero_shot_record("wikitext103", "scaled_down", None, gpt("355M"), paper_size="355M")
    table = table_3({"small.json": small, "early.json": early})
    (first, second) = rows_of(table, "scaled down")
    assert first[0] == "24 x 1024, 355.8 M parameters, step 70; validation file" and first[2] == float("inf")
    assert second[0].startswith("3 x 24, 0.0 M") and second[2] == 333.25
    assert all(pd.isna(row[1]) and pd.isna(row[3]) for row in (first, second))
    assert "355M" in {row[0] for row in rows_of(table, "not run")}


def test_a_part_of_lambada_is_recognized_by_its_number_of_passages() -> None:
    record = zero_shot_record("lambada", "scaled_down", 0.0, file={"name": "half.jsonl", "split": "other"})
    record["metrics"]["lambada_openai/passages"] = {"value": 2577, "unit": "count"}
    ((configuration, _, ours, _),) = rows_of(table_3({"half.json": record}), "scaled down")
    assert configuration == "3 x 24, 0.0 M parameters, step 70; half.jsonl, 2,577 passages" and ours == 0.0


def test_a_paper_size_that_table_3_lacks_is_refused() -> None:
    run = zero_shot_record("lambada", "run", 46.0, gpt("355M"), paper_size="5B")
    with pytest.raises(ValueError, match="`paper_size` must be one of 355M, 2.5B, 8.3B, but is '5B' in x.json"):
        table_3({"x.json": run})
