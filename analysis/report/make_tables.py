"""Write the paper's tables and figure bars beside our values, from the committed records: `analysis/tables/`.

    python analysis/report/make_tables.py          # or: make tables

All values come from the records; a test compares the committed files. `ledger.md` has every number of the paper, the
README the main results, and `docs/results.md` the tables of our measurements. To add a table, add its title to `TABLES`
and its rows to `all_rows`, with the same columns as the others.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import pandas as pd
from omegaconf import OmegaConf

from analysis.benchmarks.tables import cpu_speed, profile
from analysis.correctness.table import peak_memory
from analysis.finetuning.table import table_5
from analysis.ledger.evidence import Context
from analysis.ledger.rows import heading, kinds, ledger, short_form, status
from analysis.norm_order.cells import read_cells
from analysis.norm_order.outcome_table import table_of_tests
from analysis.norm_order.summary import order_differences, order_table
from analysis.report.record_list import link_to_record, record_list
from analysis.report.records import ANALYSIS, fitted_cluster, read_records, records_below
from analysis.report.results_page import fill, metric_tables
from analysis.scaling.sizes import communication_table, memory_table, parameter_table
from analysis.scaling.tables import figure_tables, scaling_tables
from analysis.zero_shot.table import table_3

ROOT = Path(__file__).resolve().parents[2]
TABLES_FOLDER = ANALYSIS / "tables"
PAGES = [ROOT / "README.md", ROOT / "docs" / "results.md"]  # their tables are filled in
_MODELLED = (
    "`exact` is counted. `modelled` comes from the cost model of `analysis/scaling/records/cost_model.json` and states "
    "whether the cell was in its fit; nothing was run on GPUs."
)
# name -> title, note
TABLES = {
    "Parameters": (
        "of the paper's models, by part and per rank",
        "Counted by formula; tests compare with the modules. The vocabulary is padded to 51,200 (GPT) and 30,720 "
        "(BERT) rows at every layout.",
    ),
    "Memory": (
        "per rank of the paper's models",
        "Predicted by `lmscale.planner`: fp16 with fp32 masters, exact attention, one data rank, one micro-batch of 8 "
        "GPT sequences of 1,024 tokens or 4 BERT sequences of 512. Empty: the heads are not divisible by the "
        "tensor-parallel size. `Peak memory` compares such predictions with tracked memory.",
    ),
    "Communication": (
        "per rank of the models of Table 1 for one micro-batch",
        "Counted by formula; tests compare with a traced world of 512 ranks. fp16, 8 sequences of 1,024 tokens. The "
        "logits are what gathering the output would send.",
    ),
    "Figure 1": ("sustained PFLOP/s of the study's models, without and with 64-way data parallelism", _MODELLED),
    "Figure 5": ("weak scaling of model and model + data parallelism", _MODELLED),
    "Peak memory": (
        "predicted and tracked bytes per rank",
        "Predicted by `lmscale.planner`; tracked: the peak of all live tensors in a step "
        "(`analysis/correctness/peak_memory.py`). `real`: on a CPU, on one rank or two; `traced`: models of the paper "
        "on fake tensors, with a GPU's attention kernels. No GPU was used. Neither includes allocations inside "
        "kernels, rounding by the allocator or the framework. No case was used to derive a term of the estimate.",
    ),
    "Profile": (
        "breakdown of a step's time",
        "Shares of three traced steps on one CPU thread, by kind of work: self time per operation, except for the "
        "optimizer and the vocabulary, which count as a whole. `analysis/benchmarks/profile.md` describes the models, "
        "the method and the result; the records `profile_gpt.json` and `profile_bert.json` have the rest.",
    ),
    "Speed CPU": (
        "speed and memory goals on two CPU cores",
        "Models of 6 layers x 512, 8 x 256 tokens, bf16, two threads. A ratio is a peer's time over ours on the same "
        "work, measured in alternation, each in a process of its own: the median of the ratios per round of one run, "
        "here the median, least and most of several runs, on a shared machine. Ours is the step of `train.py`, with "
        "`model.attention=auto`. Two ranks have one "
        "thread each and are compared "
        "with one thread. `bash analysis/benchmarks/bench_cpu.sh` measures all of it. The GPU goals (`bash "
        "analysis/benchmarks/h200.sh`) have not been run.",
    ),
    "Records": (
        "every committed record, with the command that wrote it",
        "A record in `analysis/*/records/` holds configuration, seed, versions, hardware and metrics. `commits` is the "
        "code it was measured on, and `changed` how many were written with uncommitted changes. Records from "
        "before 2026-11-23 do not hold their command, which `analysis/report/records.yaml` gives. A pattern stands for "
        "the records of a file or folder.",
    ),
    "Table 1": ("parameters of the scaling study", _MODELLED),
    "Table 2": (
        "GPT-2 models and their days per epoch",
        f"{_MODELLED} The paper's days are \"the time it takes to advance one epoch which is equivalent to 68,507 "
        'iterations"; it does not mention validation. Ours are for as many optimizer steps with 8 sequences per data '
        "rank, alone and with 100 validation batches every 1,000 steps (the defaults of the released code). Neither "
        "includes checkpoints and data loading.",
    ),
    "Table 3": (
        "zero-shot results of GPT-2 models",
        "`reproduced`: the paper's size, 300,000 steps, test file and protocol. `scaled down`: another model or file, "
        "which the printed values do not apply to. Perplexity is exp(loss / T_o); accuracy is on the whole last word. "
        "The records have the other variants, T, T_o, windows and hashes.",
    ),
    "Table 5": (
        "finetuned BERT models",
        "`reproduced`: a size of Table 4 on the whole published set. `scaled down`: a published post-norm BERT of "
        "22.7 M parameters on parts of the sets (`analysis/finetuning/small.py`), which the printed values do not "
        "apply to. The paper's RACE scores are on the test set. All other scores, ours on RACE too, are on development "
        "sets or parts of them.",
    ),
    "Figure 7": (
        "layer-norm placement as a controlled experiment",
        "Training loss of a BERT of hidden size 64, the mean of the last 50 of 1,000 steps, each arm at its best "
        "learning rate at 12 layers (`analysis/norm_order/run.py`). Differences are paired by seed, with Student's 95 "
        "% interval; they are omitted if a run did not learn. `stuck`: the final loss is not at least 0.1 nats below "
        "the lowest loss possible without context. `diverged`: the gradient became non-finite, or the final loss is "
        "more than 0.25 nats above the run's lowest.",
    ),
    "Placement": (
        "the twelve tests of the second study of layer-norm placement",
        "Planned in `analysis/norm_order/plan.md` before the first run, and amended as it says. Effects are "
        "differences of the final training loss, the first placement's minus the second's, or of slopes, or the share "
        "of differing pairs that agree with the hypothesis. Holm's correction is over all twelve tests.",
    ),
    "Table 7": ("effect of the number of attention heads on scaling", _MODELLED),
    "Table 8": ("strong scaling of the 1.2 B model", _MODELLED),
}


LEDGER_TITLE = "every number of the paper, with ours"
LEDGER_NOTE = (
    "The id of a number gives its place in the paper. `from` is the record in `analysis/*/records/`, the code that "
    "counts, the key that sets it, or the reason why we have none. `origin` is how the paper's value was obtained. "
    "`command` (by its number above the table) is for the paper's run, on its machines and data; `records.md` has the "
    "commands of our records. `scaled down` "
    "measurements are listed with the smallest of the paper's models and are not comparable with it. Rounded "
    "repetitions in the abstract and points of curves that are drawn but not printed are not listed. A record provides "
    "an entry's value by a metric named like its id."
)


def read_settings(folder: Path = ROOT / "conf") -> dict[str, dict]:
    """Contents of the files of `conf/` by relative path, unresolved."""
    return {
        path.relative_to(folder).as_posix(): OmegaConf.to_container(OmegaConf.load(path))
        for path in sorted(folder.rglob("*.yaml"))
    }


def all_rows(records: dict[str, dict]) -> dict[str, pd.DataFrame]:
    """Rows of every table by name, including `Ledger`."""
    cluster = fitted_cluster(records["cost_model.json"])
    rows = scaling_tables(cluster) | figure_tables(cluster)
    rows["Peak memory"] = peak_memory(records["peak_memory.json"])
    rows["Profile"] = profile({name: records[f"profile_{name.lower()}.json"] for name in ("GPT", "BERT")})
    rows["Speed CPU"] = cpu_speed(records)
    rows["Table 3"] = table_3(records)
    rows["Table 5"] = table_5(records)
    rows |= {"Parameters": parameter_table(), "Memory": memory_table(), "Communication": communication_table()}
    cells = records_below(records, "norm_order")
    if cells and "norm_order.json" in records:
        rows["Figure 7"] = order_table(
            order_differences(read_cells(cells), records["norm_order.json"]["config"]["factorial"])
        )
    if "norm_order_study.json" in records:
        rows["Placement"] = table_of_tests(records["norm_order_study.json"])
    rows["Records"] = record_list(records)
    return rows | {"Ledger": ledger(Context(records, rows, read_settings(), cluster))}


def render_all(rows: dict[str, pd.DataFrame]) -> dict[str, str]:
    """Markdown of every table by name, including the ledger."""
    pages = {name: _page(name, *TABLES[name], rows[name]) for name in TABLES if name in rows}
    return pages | {"Ledger": _ledger_page(rows["Ledger"])}


def short_ledger(rows: pd.DataFrame) -> str:
    """The short ledger: how many numbers there are per kind of evidence, and the main ones."""
    counts = ", ".join(f"{row.numbers} {row.evidence}" for row in kinds(rows).itertuples())
    return f"Of {len(rows)} numbers of the paper: {counts}.\n\n{_table(short_form(rows))}\n"


def fill_page(page: str, rows: dict[str, pd.DataFrame], records: dict[str, dict], folder: Path) -> str:
    """Fill the tables of a page in `folder` from the records.

    Raises:
        ValueError: the page has no marker for a table.
    """
    tables = {name: _table(table, folder) for name, table in (rows | metric_tables(records)).items()}
    return fill(page, tables | {"ledger": short_ledger(rows["Ledger"]).rstrip()})


def _ledger_page(rows: pd.DataFrame) -> str:
    """All numbers by place in the paper, with the commands of each place above its rows."""
    parts = [_page("Ledger", LEDGER_TITLE, f"**{status(rows)}**\n\n{LEDGER_NOTE}", kinds(rows))]
    places = rows["id"].str.split("/").str[0]
    for place in places.unique():
        part = rows[places == place].copy()
        commands = list(dict.fromkeys(command for command in part["command"] if command))
        part["command"] = [f"[{commands.index(command) + 1}]" if command else "" for command in part["command"]]
        lines = [f"{number}. `{command}`" for number, command in enumerate(commands, 1)]
        parts.append("\n".join([f"## {heading(place)}", "", *lines, "", _table(part), ""]))
    return "\n".join(parts)


def _page(name: str, title: str, note: str, rows: pd.DataFrame) -> str:
    """A heading, the note, and the rows as a Markdown table; cells without a value are empty."""
    return f"# {name}: {title}\n\n<!-- made by analysis/report/make_tables.py -->\n\n{note}\n\n{_table(rows)}\n"


def _table(rows: pd.DataFrame, folder: Path = TABLES_FOLDER) -> str:
    """A Markdown table of a page in `folder`; cells without a value are empty, and records are linked."""
    if "record" in rows:
        rows = rows.assign(record=[link_to_record(name, folder) for name in rows["record"]])
    numbers = [column for column in rows.columns if pd.api.types.is_numeric_dtype(rows[column])]
    numbers += [column for column in ("paper", "ours", "measured") if column in rows.columns and column not in numbers]
    lines = [" | ".join(rows.columns), " | ".join("---:" if column in numbers else "---" for column in rows.columns)]
    lines += [" | ".join(format_cell(value) for value in row) for row in rows.itertuples(index=False)]
    return "\n".join(f"| {line} |" for line in lines)


def format_cell(value: object) -> str:
    """Text unchanged, numbers with four significant digits."""
    if value is None or value != value:  # nan
        return ""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def main() -> int:
    """Write every table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--records", type=Path, default=ANALYSIS, help="folder of records")
    parser.add_argument("--output", type=Path, default=TABLES_FOLDER, help="folder of the Markdown files")
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES, help="Markdown files with markers for tables")
    options = parser.parse_args()
    try:
        records = read_records(options.records)
        rows = all_rows(records)
        pages = {
            path: fill_page(path.read_text(encoding="utf-8"), rows, records, path.parent) for path in options.pages
        }
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    for name, page in render_all(rows).items():
        path = options.output / f"{name.lower().replace(' ', '_')}.md"
        path.write_text(page, encoding="utf-8")
        print(path)
    for path, page in pages.items():
        path.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
