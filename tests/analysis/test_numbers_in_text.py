"""No number in the README or a notebook without a record: measured ones name theirs, the others are facts held here."""

import json
from pathlib import Path

import pytest
from numbers_in_text import Stated, blocks, notebook_texts, stated_numbers, unproved, values_named

from analysis.report import make_tables
from analysis.report.records import read_records

ROOT = Path(__file__).resolve().parents[2]
LATER = "a duration; its column says that it is not recorded"
# Passages of the README and the notebooks that need no record: the file that holds the number and how it is written
# there, or a reason.
FACTS = {
    "BERTs of hidden size 64, 1,000 steps": ("conf/sweep/norm_order.yaml", "max_steps: 1000"),
    "that fail at 24 train too": ("analysis/results/norm_order/24_post_scaled_1.5e-3_1.json", '"layers": 24'),
    "in 1 run of 8": "its words stand in the caption, with their record",
    "36 runs of a BERT of 12 layers": ("tests/analysis/test_norm_order_cells.py", "2 * 2 * 3 * 3"),
    "hold that to 1e-12": ("tests/training/test_layouts.py", "1e-12"),
    "on 2 CPU cores": "the machine",
    "tensor-parallel 2 on the documentation": ("analysis/demo.py", "parallel.tp_size=2"),
    "under 4 minutes after installation": LATER,
    "about 18 minutes, in parallel": LATER,
    "under 90 minutes": LATER,
    "4 layers x 128": ("conf/model/gpt_tiny.yaml", "num_layers: 4"),
    "exit code 2 before": ("src/lmscale/training/runtime/exit_codes.py", "= 2"),
    "0.1 in the paper": ("conf/model/base/gpt.yaml", "hidden_dropout: 0.1"),
    "12 bytes a parameter of half types become 12 /": "fp32 master and two moments",
    "take 4 bytes a parameter instead of 8": "two moments of 2 or of 4 bytes",
    "one 139 GiB GPU": ("conf/cluster/h200.yaml", "memory_gib: 139"),
    "a random moment, tp 2": ("analysis/soak.py", "parallel.tp_size=2"),
    "drifts by 1e-12": ("tests/training/test_faults.py", "1e-12"),
    "documents under 128 tokens": ("conf/cleaning/paper.yaml", "min_tokens: 128"),
    "above Jaccard 0.7": ("conf/dedup/paper.yaml", "jaccard: 0.7"),
    "29:1 split": ("conf/prepare_data.yaml", "29:1"),
    "window of 1024 and stride of 32": ("conf/task/wikitext103.yaml", "stride: 32"),
    "T_o = 217,642": ("tests/evaluation/test_wikitext.py", "217_642"),
    "T = 236,891": ("tests/evaluation/test_wikitext.py", "236_891"),
    "7,372 windows": ("tests/evaluation/test_wikitext.py", "7_372"),
    "padded to 1024": ("conf/task/wikitext103.yaml", "window: 1024"),
    "at 4 layers x 256": ("analysis/zero_shot_speed.py", "256"),
    "at 12 x 768": ("analysis/zero_shot_speed.py", "768"),
    "an item's 8-grams": ("conf/prepare_data.yaml", "ngram: 8"),
    "a GPT of 5.5 M parameters": ("analysis/tables/table_3.md", "5.5 M parameters"),
    "up to 8.3 B at 8 ranks": ("analysis/tables/peak_memory.md", "8.3B, fp16, 8 ranks"),
    "MP+DP on 128 GPUs": ("analysis/tables/figure_5.md", "model + data parallel, 128 GPUs"),
    "The cell at 128 GPUs": ("analysis/tables/figure_5.md", "model + data parallel, 128 GPUs"),
    "of September 2020": "a date",
    "a BERT of 6 x 512": ("src/lmscale/report/speed.py", "BERT 6 x 512"),
    "of hidden size 1,024 in": ("src/lmscale/report/speed.py", "hidden size 1024"),
    "within 1e-12 (fp64)": ("tests/training/test_layouts.py", "1e-12"),
    "within 5 % of tracked": ("tests/planner/test_peak_memory.py", "0.05"),
    "at tensor-parallel 1, 2 and 8": ("analysis/tables/peak_memory.md", "8.3B, fp16, 8 ranks"),
    "2 forward and 2 backward a layer": ("src/lmscale/report/text_entries.py", '("layer/forward", 2'),
    "the 8.3 B model at 512 ranks": ("tests/training/test_trace.py", "8_317_040_640"),
    "at Jaccard 0.7": ("tests/corpus/test_duplicates.py", "0.7"),
    "recall at least 0.99": ("tests/corpus/test_duplicates.py", ">= 0.99"),
    "at step 253,123 of 300,000": ("tests/training/test_schedule.py", "253_123"),
    "1.2 million tokens": ("conf/sweep/model_size.yaml", "1.2 million tokens"),
    "with their 95 % intervals": ("src/lmscale/report/power_law.py", "95 %"),
    "the 95 % interval of": ("src/lmscale/report/power_law.py", "95 %"),
    "in fp16 at 8 sequences": ("src/lmscale/report/scaling.py", "MICRO_BATCH = 8"),
    "with 32 heads and Figure 5 at 8 GPUs": ("analysis/tables/table_7.md", "32 heads"),
    "in September 2020, of which": "a date",
    "and SQuAD 2.0 among what": "a name",
    # Depths of the norm-order study, wherever they are named; longer passages first.
    "24 and 48 layers": ("analysis/norm_order.py", "6: 3, 24: 3, 48: 1"),
    "6 and 12 layers": ("analysis/norm_order.py", "6: 3, 24: 3, 48: 1"),
    "12 layers": ("conf/sweep/norm_order.yaml", "num_layers: 12"),
    "6 layers": ("analysis/norm_order.py", "6: 3, 24: 3, 48: 1"),
    "24 layers": ("analysis/norm_order.py", "6: 3, 24: 3, 48: 1"),
    "48 layers": ("analysis/norm_order.py", "6: 3, 24: 3, 48: 1"),
    "best at 12,": ("conf/sweep/norm_order.yaml", "num_layers: 12"),
    "chosen at 12**": ("conf/sweep/norm_order.yaml", "num_layers: 12"),
    "level at 12;": ("conf/sweep/norm_order.yaml", "num_layers: 12"),
    "at 48 they were not": ("analysis/norm_order.py", "6: 3, 24: 3, 48: 1"),
    "at 24 or more": ("analysis/norm_order.py", "6: 3, 24: 3, 48: 1"),
    "(mean of 10 steps)": ("analysis/norm_order.py", "NORM_WINDOW = 10"),
    "at 1/sqrt(2 L) of the others": ("src/lmscale/report/figures/norm_order.py", "1/sqrt(2 L)"),
    "size 64 with 2 heads": ("conf/sweep/norm_order.yaml", "num_attention_heads: 2"),
    "260 WordPiece ids": ("conf/sweep/norm_order.yaml", "vocab_size: 260"),
    "sequences of 32 tokens, 128 of them": ("conf/sweep/norm_order.yaml", "global_batch_size: 128"),
    "0.08, which is 0.02 x sqrt(1024 / 64)": (
        "conf/sweep/norm_order.yaml",
        "initializer_std: 0.08        # 0.02 x sqrt(1024 / 64)",
    ),
    "is that of hidden size 1,024;": ("conf/sweep/norm_order.yaml", "that of hidden 1024"),
    "weight decay 0.01, clipping at norm 1;": ("conf/optimizer/adamw.yaml", "weight_decay: 0.01"),
    "a warm-up of 100 of the 1,000 steps": ("conf/sweep/norm_order.yaml", "warmup_steps: 100"),
    "means of the last 50 steps": ("analysis/norm_order.py", "-2 * WINDOW"),
    "half of their 95 % interval": ("src/lmscale/report/norm_order_summary.py", "97.5 %"),
    "an end 0.25 nats above": ("src/lmscale/report/norm_order.py", "DIVERGED_ABOVE, STUCK_WITHIN = 0.25, 0.1"),
    "lowest mean of 25 steps": ("analysis/norm_order.py", "WINDOW = 25"),
    "less than 0.1 nats below": ("src/lmscale/report/norm_order.py", "DIVERGED_ABOVE, STUCK_WITHIN = 0.25, 0.1"),
    "came 0.25 nats over": ("src/lmscale/report/norm_order.py", "DIVERGED_ABOVE, STUCK_WITHIN = 0.25, 0.1"),
    "layer 0 is next to": "a name",
    "Hidden size 64 and sequences of 32 tokens": ("conf/sweep/norm_order.yaml", "max_position_embeddings: 32"),
    "1,000 steps; every sample": ("conf/sweep/norm_order.yaml", "max_steps: 1000"),
    "**Warm-up** is 100 steps": ("conf/sweep/norm_order.yaml", "warmup_steps: 100"),
    "Xiong et al. 2020": "a citation",
    "Liu et al. 2020": "a citation",
    "embedding starts at 0.08 too": ("conf/sweep/norm_order.yaml", "initializer_std: 0.08"),
    "with 1 or 2 workers": ("tests/cli/test_prepare_data.py", "workers"),
}


@pytest.fixture(scope="module")
def records() -> dict[str, dict]:
    """The committed records, and the ledger as one."""
    found = read_records(make_tables.ANALYSIS)
    rows = make_tables.all_rows(found)["Ledger"]
    values = [(row.id, row.paper) for row in rows.itertuples()] + [(f"ours/{r.id}", r.ours) for r in rows.itertuples()]
    metrics = {name: {"value": value} for name, value in values if isinstance(value, (int, float))}
    return found | {"ledger": {"metrics": metrics}}


def readme() -> str:
    """Without the ledger, which `test_tables.py` holds to the records."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(make_tables.LEDGER_START)
    return before + rest.partition(make_tables.LEDGER_END)[2]


def test_every_number_of_the_readme_has_a_record(records) -> None:
    assert unproved(readme(), records, FACTS) == []


def test_the_facts_still_stand() -> None:
    """Each passage is in the README or a notebook, and its number in the file that it names."""
    prose = [text for path in (ROOT / "notebooks").glob("*.ipynb") for text in notebook_texts(path)[0]]
    text = " ".join("\n".join([readme(), *prose]).split())
    for passage, source in FACTS.items():
        assert passage in text, passage
        if source is LATER:
            assert "not recorded" in next(block for block in blocks(readme()) if passage in block)
        elif isinstance(source, tuple):
            path, written = source
            assert written in (ROOT / path).read_text(encoding="utf-8"), (passage, path)


@pytest.mark.parametrize(
    "text",
    [
        "It is 2.5 times as fast.",
        "It takes 90 s.",
        "It takes 90s, or is 16x as fast.",
        "It differs by -4.2 %.",
        "Accuracy is 4.1/90.2 <!-- numbers: a.json: time -->",
        "It takes 4.1-5 s <!-- numbers: a.json: time -->",
        "| what | times |\n|---|---|\n| kills | 16 |",
        "It took 4.1 to 7 s <!-- numbers: a.json: time -->",  # the 7 is not there
        "A first paragraph. <!-- numbers: a.json: time -->\n\nAnother says 4.1 s.",
        "- One item. <!-- numbers: a.json: time -->\n- Another says 4.1 s.",
        "None was lost: 0. <!-- numbers: a.json: time -->",
    ],
)
def test_a_number_without_a_record_is_found(text) -> None:
    assert unproved(text, {"a.json": {"metrics": {"time": {"value": 4.096}}}}) != []


@pytest.mark.parametrize(
    "text",
    [
        "It takes 4.1 s. <!-- numbers: a.json: time -->",
        "It takes 4,096 ms, exactly 4.096 s. <!-- numbers: a.json: time -->",
        "In all 16, at most 9. <!-- numbers: b.json: sum kills/.* | largest kills/.* -->",
        "Two kinds, or 2. <!-- numbers: a.json: time; b.json: number kills/.* -->",
        "See section 5.1, Tables 7 and 8, Python 3.11-3.13 and GPT-2, `x=3`, H200, 2x1, fp32 and 8.3B.",
        "It is fast (once, not recorded: 3.7 s).",
        "```bash\nmake 3\n```",
    ],
)
def test_a_number_with_a_record_or_a_name_passes(text) -> None:
    kills = {"kills/rank": {"value": 7}, "kills/job": {"value": 9}}
    assert unproved(text, {"a.json": {"metrics": {"time": {"value": 4.096}}}, "b.json": {"metrics": kills}}) == []


def test_a_comment_that_names_nothing_is_refused() -> None:
    records = {"a.json": {"metrics": {"time": {"value": 4.1}}}}
    with pytest.raises(ValueError, match="must name a record, but there is no 'gone.json'"):
        values_named("4.1 <!-- numbers: gone.json: time -->", records)
    with pytest.raises(ValueError, match="must name a metric, but a.json has no 'speed'"):
        values_named("4.1 <!-- numbers: a.json: speed -->", records)


def all_values(records: dict[str, dict], rows: dict) -> list[float]:
    """Every value that a notebook may print: of records, their settings, and of the rendered tables."""

    def numbers(value) -> list[float]:
        if isinstance(value, dict):
            return [number for each in value.values() for number in numbers(each)]
        if isinstance(value, list):
            return [number for each in value for number in numbers(each)]
        return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []

    tables = [number for table in rows.values() for column in table for number in numbers(table[column].tolist())]
    return numbers([[record["metrics"], record.get("config", {})] for record in records.values()]) + tables


def wrong_in_notebook(path: Path, records: dict[str, dict], values: list[float]) -> list[str]:
    """Numbers of its Markdown without a record, and decimal numbers of its outputs that nothing of ours rounds to."""
    prose, outputs = notebook_texts(path)
    wrong = [each for text in prose for each in unproved(text, records, FACTS)]
    for text in outputs:
        decimal = [number for number in stated_numbers(text) if "." in number.text]
        wrong += [number.text for number in decimal if not number.is_proved_by(values)]
    return wrong


def test_every_number_of_a_notebook_has_a_record(records) -> None:
    rows = make_tables.all_rows(read_records(make_tables.ANALYSIS))
    values = all_values(records, rows)
    wrong = {path.name: wrong_in_notebook(path, records, values) for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert {name: numbers for name, numbers in wrong.items() if numbers} == {}


def test_a_wrong_number_in_a_notebook_is_found(tmp_path) -> None:
    table = {"data": {"text/html": ["<td>0.25</td>", "<td>0.31</td>"], "text/plain": ["0.9"]}}
    cells = [
        {"cell_type": "markdown", "source": ["We reach 0.25 and 7.5.\n", "<!-- numbers: a.json: share -->"]},
        {"cell_type": "code", "source": ["1.5"], "outputs": [table, {"text": ["loss 0.77\n"]}]},
    ]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells}))
    records = {"a.json": {"metrics": {"share": {"value": 0.25}}}}
    found = wrong_in_notebook(tmp_path / "n.ipynb", records, [0.25])
    assert [number.split()[0] for number in found] == ["7.5", "0.31", "0.77"]


def test_rounding_is_that_of_the_number_shown() -> None:
    assert Stated("0.14", "").is_proved_by([0.1357]) and not Stated("0.140", "").is_proved_by([0.1357])
    assert Stated("0.59", "").is_proved_by([589_493_688]) and not Stated("0.6", "").is_proved_by([0.54])
