"""Fill the tables of README.md, docs/results.md and analysis/tables/ from the committed records: `make tables`.

A page has the words and a marker, `<!-- table: NAME -->`, for each table; a test compares the committed pages. To add a
table, add its rows to `all_rows` under its name, with the same columns as the others, and a page with the marker.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import pandas as pd
from omegaconf import OmegaConf

from analysis.benchmarks.tables import cpu_speed, profile
from analysis.finetuning.table import small_medians, table_5
from analysis.miniature.decide import overview
from analysis.pages.ledger import Context, heading, kinds, ledger, short_form, status
from analysis.pages.record_list import link_to_record, record_list
from analysis.pages.results_page import fill, metric_tables
from analysis.report.records import ANALYSIS, by_id, fitted_cluster, read_records
from analysis.scaling.sizes import communication_table, memory_table, parameter_table, peak_memory
from analysis.scaling.tables import figure_tables, scaling_tables
from analysis.zero_shot.table import table_3

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "results.md", *sorted((ANALYSIS / "tables").glob("*.md"))]


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
    rows["finetuning"] = small_medians(records)
    rows["miniature"] = overview(by_id(records, "miniature"))
    rows |= {"Parameters": parameter_table(), "Memory": memory_table(), "Communication": communication_table()}
    rows["Records"] = record_list(records)
    return rows | {"Ledger": ledger(Context(records, rows, read_settings(), cluster))}


def short_ledger(rows: pd.DataFrame) -> str:
    """The short ledger: how many numbers there are per kind of evidence, and the main ones."""
    counts = ", ".join(f"{row.numbers} {row.evidence}" for row in kinds(rows).itertuples())
    return f"Of {len(rows)} numbers of the paper: {counts}.\n\n{_table(short_form(rows))}"


def whole_ledger(rows: pd.DataFrame) -> str:
    """All numbers by place in the paper, with the commands of each place above its rows."""
    parts = []
    places = rows["id"].str.split("/").str[0]
    for place in places.unique():
        part = rows[places == place].copy()
        commands = list(dict.fromkeys(command for command in part["command"] if command))
        part["command"] = [f"[{commands.index(command) + 1}]" if command else "" for command in part["command"]]
        lines = [f"{number}. `{command}`" for number, command in enumerate(commands, 1)]
        parts.append("\n".join([f"## {heading(place)}", "", *lines, "", _table(part)]))
    return "\n\n".join(parts)


def fill_page(page: str, rows: dict[str, pd.DataFrame], records: dict[str, dict], folder: Path) -> str:
    """Fill the tables of a page in `folder` from the records.

    Raises:
        ValueError: the page has no marker for a table.
    """
    tables = {name: _table(table, folder) for name, table in (rows | metric_tables(records)).items()}
    ours = rows["Ledger"]
    tables |= {"ledger": short_ledger(ours), "whole ledger": whole_ledger(ours)}
    return fill(page, tables | {"ledger status": f"**{status(ours)}**", "kinds of evidence": _table(kinds(ours))})


def _table(rows: pd.DataFrame, folder: Path = ROOT) -> str:
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


def main() -> None:
    """Fill every page."""
    records = read_records()
    rows = all_rows(records)
    pages = {path: fill_page(path.read_text(encoding="utf-8"), rows, records, path.parent) for path in PAGES}
    for path, page in pages.items():
        path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
