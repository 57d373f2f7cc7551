"""The ledger has every number of the paper once, the evidence for ours, and commands that exist."""

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from analysis.ledger.entries import ENTRIES, PAPER, paper_shape
from analysis.pages import make_tables
from analysis.pages.ledger import KINDS, Context, kinds, ledger, short_form
from analysis.report.records import read_records
from lmscale import paper
from lmscale.config.cluster import Cluster
from lmscale.config.from_dict import build
from lmscale.results import new_record

ROOT = Path(__file__).resolve().parents[2]
RECORDS = read_records()
ROOTS = {
    "src/train.py": "train",
    "src/plan.py": "plan",
    "src/prepare_data.py": "prepare_data",
    "src/zero_shot.py": "zero_shot",
    "src/generate.py": "generate",
    "finetune/run.py": "finetune",
}


def context(more: dict | None = None, without: str = "") -> Context:
    """The ledger of the committed records, with some left out or added."""
    records = {name: record for name, record in RECORDS.items() if not without or not name.startswith(without)}
    records |= more or {}
    cluster = build(Cluster, records["cost_model.json"]["config"]["cluster"], "cluster.")
    return Context(records, make_tables.all_rows(records), make_tables.read_settings(), cluster)


@pytest.fixture(scope="module")
def rows():
    return ledger(context()).set_index("id")


def made_record(kind: str, metric: str, value: float, unit: str) -> dict:
    return new_record("made", kind, {"factorial": 12}, None, {metric: {"value": value, "unit": unit}})


def test_every_entry_has_its_own_id_and_a_known_kind(rows) -> None:
    assert rows.index.is_unique and set(rows["evidence"]) == set(KINDS) - {"reproduced"}  # nothing is yet
    assert rows["from"].str.len().min() > 0 and rows["origin"].str.len().min() > 0
    assert rows.loc[rows["evidence"] == "not run", "ours"].isna().all()
    assert rows.loc[rows["evidence"] != "not run", "ours"].notna().all()


def test_settings_equal_the_papers_except_for_known_differences(rows) -> None:
    settings = rows[rows["evidence"] == "setting"]
    differ = {entry for entry, row in settings.iterrows() if row["ours"] != _nearly(row["paper"])}
    assert differ == {"table_5/bert_3.9b/trained_tokens", "section_5.3/held_out"}


def _nearly(value: object) -> object:
    return value if isinstance(value, str) else pytest.approx(value)


def test_the_criteria_for_a_paper_run_have_the_papers_values() -> None:
    gpts = {"355M": "gpt_355m", "2.5B": "gpt_2.5b", "8.3B": "gpt_8.3b_24heads"}
    assert {size: paper_shape(f"table_2/{model}") for size, model in gpts.items()} == paper.GPT_SIZES
    assert {size: paper_shape(f"table_4/bert_{size.lower()}") for size in paper.BERT_SIZES} == paper.BERT_SIZES
    assert (paper.STEPS, paper.SEQ_LENGTH) == (PAPER["section_4.2/gpt/steps"], PAPER["section_4.2/gpt/seq_length"])
    vocabularies = (PAPER["section_5.1/vocabulary"], PAPER["section_4.2/bert/vocabulary"])
    assert (paper.GPT_VOCABULARY, paper.BERT_VOCABULARY) == vocabularies
    counts = (PAPER["appendix_e/T_o"], PAPER["appendix_e/T"])
    assert (paper.WIKITEXT_TEST_WORDS, paper.WIKITEXT_TEST_TARGETS) == counts


def test_a_record_that_names_an_entry_fills_it() -> None:
    entry = "figure_7/bert_752m/post"
    found = ledger(context({"norm_order.json": made_record("scaled_down", entry, 0.75, "of runs diverged")}))
    row = found.set_index("id").loc[entry]
    assert (row["ours"], row["evidence"]) == ("0.75 (of runs diverged)", "scaled down")
    assert row["from"].startswith("`norm_order.json`")


def test_the_small_studies_fill_figures_6_and_7() -> None:
    study = made_record("scaled_down", "12_layers/scaled/post", 4.875, "nats/masked token")
    counts = {"12_layers/scaled/post": (3, 0, 0), "24_layers/scaled/post": (1, 0, 2)}
    for place, values in counts.items():
        for state, value in zip(("learned", "stuck", "diverged"), values, strict=True):
            study["metrics"][f"{place}/{state}"] = {"value": value, "unit": "cells at the chosen rate"}
        study["metrics"][place.replace("/post", "/lr_post")] = {"value": 0.003, "unit": "1"}
    sizes = made_record("scaled_down", "gpt_pre_mup_4x256/gain", 0.0625, "nats")
    sizes["metrics"]["gpt_pre_standard_4x256/gain"] = {"value": -0.5, "unit": "nats"}
    rows = ledger(context({"norm_order.json": study, "scaling_law.json": sizes})).set_index("id")
    assert rows.loc["figure_7/bert_336m/post", "ours"] == "3 learned: 4.875 nats/masked token"
    assert rows.loc["figure_7/bert_752m/post", "ours"] == "1 learned, 2 diverged"  # there is no mean of diverged runs
    assert rows.loc["figure_7/bert_752m/post", "from"].endswith(
        "whose 24 layers stand for this model, learning rate 0.003"
    )
    assert rows.loc["figure_7/bert_752m/pre", "evidence"] == "not run"  # the study has no such cell
    assert rows.loc["figure_6/trend", "ours"] == (
        "standard -0.5, muP 0.0625 (nats by which width 256 is better than 64)"
    )


def test_small_measurements_are_listed_only_for_the_smallest_model(rows) -> None:
    assert rows.loc["table_5/bert_336m/mnli/accuracy_matched", "evidence"] == "scaled down"
    assert rows.loc["table_5/bert_1.3b/mnli/accuracy_matched", "from"].startswith("`miniature.json`")
    alone = ledger(context(without="miniature.json")).set_index("id")
    assert alone.loc["table_5/bert_1.3b/mnli/accuracy_matched", "evidence"] == "not run"
    without = ledger(context(without="finetune_small")).set_index("id")
    assert without.loc["table_5/bert_336m/mnli/accuracy_matched", "evidence"] == "not run"


def test_the_summary_adds_up_and_is_short(rows) -> None:
    counts = kinds(rows.reset_index())
    assert counts["numbers"].sum() == len(rows)
    short = short_form(rows.reset_index())
    assert len(short) <= 20 and set(short["evidence"].str.split(":").str[0]) >= {"counted", "modelled", "not run"}


@pytest.mark.slow
def test_every_command_composes() -> None:
    """One command of each kind; the settings test that every model has its file."""
    forms = {re.sub(r"[\d.]+[mb]\b|=\d+", "", entry.command): entry.command for entry in ENTRIES if entry.command}
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        for command in forms.values():
            python, script, *words = shlex.split(command)
            assert python == "python" and (ROOT / script).is_file(), command
            if script in ROOTS:
                overrides = [re.sub("^resume=", "resume.path=", word) for word in words]
                assert compose(ROOTS[script], overrides, return_hydra_config=True), command
