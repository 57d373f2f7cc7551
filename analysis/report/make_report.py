"""One page with the findings, every figure, the cost model to try, the ledger and every table: `make report`.

    python analysis/report/make_report.py          # outputs/report/index.html

The page is self-contained: figures are embedded as data, so it can be opened without a network. It prints as one page
of findings, followed by the figures.
"""

import argparse
import base64
import html
import json
import re
import sys
import tempfile
from pathlib import Path
from string import Template

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import pandas as pd

from analysis.ledger.evidence import KINDS
from analysis.ledger.rows import heading, kinds, status
from analysis.report import make_figures, make_tables
from analysis.report.records import fitted_cluster, read_records
from analysis.report.results_page import findings
from analysis.scaling.study import MICRO_BATCH, SIZES, STUDY_TP_SIZES
from lmscale.config.cluster import Cluster

TEMPLATE, COST_MODEL = Path(__file__).with_name("report.html"), Path(__file__).with_name("cost_model.js")
_FIRST_FIGURE = "norm_order_curves"  # beside the findings
_CELL = {True: "number", False: "words"}  # CSS classes
_SIDES = ("paper", "ours")
_SHOWN = ("id", "paper", "ours", "evidence", "unit", "from", "command")  # a narrow screen shows the first four


def render(results: Path) -> str:
    """Render the page from a folder of records.

    Raises:
        ValueError: a record that a table needs is missing.
    """
    records = read_records(results)
    rows, cluster = make_tables.all_rows(records), fitted_cluster(records["cost_model.json"])
    ledger, tables = rows["Ledger"], [(name, *about) for name, about in make_tables.TABLES.items() if name in rows]
    figures = _figures(results)
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        total=len(ledger),
        status=_text(status(ledger)),
        findings="\n".join(_finding(each, figures) for each in findings(records)),
        first_figure=figures.pop(_FIRST_FIGURE, ""),
        figures="\n".join(figures.values()),
        device=f"{cluster.device}, {cluster.memory_gib:g} GiB",
        presets="\n".join(_presets()),
        cluster=json.dumps(cluster_rates(cluster)),
        cost_model=COST_MODEL.read_text(encoding="utf-8"),
        contents="\n".join(f'<a href="#{_anchor(name)}">{name}</a>' for name, *_ in tables),
        kinds="\n".join(_kind(row) for row in kinds(ledger).itertuples()),
        filters="\n".join(_filter(kind) for kind in KINDS),
        ledger=_ledger(ledger),
        tables="\n".join(_section(name, title, note, rows[name]) for name, title, note in tables),
    )


def cluster_rates(cluster: Cluster) -> dict[str, float]:
    """The rates of a cluster that `cost_model.js` reads."""
    of_cluster = ("memory_gib", "reserved_gib", "memory_bandwidth_gb_s", "latency_us", "devices_per_node")
    names = ("matmul_share", "elementwise_factor", "layer_overhead_ms", "tensor_bandwidth_gb_s", "data_bandwidth_gb_s")
    rates = {name: getattr(cluster, name) for name in of_cluster}
    rates |= {name: getattr(cluster.calibration, name) for name in names}
    return rates | {"peak_fp16_tflops": cluster.peaks.fp16}


def _presets() -> list[str]:
    """One button per model of Table 1 on its GPUs, and the largest on 512."""
    shown = [(size, tp_size, 1) for size, tp_size in STUDY_TP_SIZES.items()]
    buttons = []
    for size, tp_size, dp_size in [*shown, (shown[-1][0], shown[-1][1], 64)]:
        num_layers, hidden_size, _ = SIZES[size]
        choice = {"layers": num_layers, "hidden": hidden_size, "tp": tp_size, "dp": dp_size, "batch": MICRO_BATCH}
        num_gpus = tp_size * dp_size
        label = f"{size} on {num_gpus} GPU{'s' * (num_gpus > 1)}"
        buttons.append(f'<button type="button" data-choice="{html.escape(json.dumps(choice))}">{label}</button>')
    return buttons


def _finding(each: dict[str, str], figures: dict[str, str]) -> str:
    link = f' <a href="#{each["figure"]}-drawing">Figure</a>' if each["figure"] in figures else ""
    return (
        f"<li><h3>{_text(each['title'])}</h3><p>{_text(each['text'])} <small>{each['records']}</small>{link}</p></li>"
    )


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _kind(row) -> str:
    number = f'<b>{row.numbers}</b><span class="chip">{row.evidence}</span>'
    return f'<li class="{_anchor(row.evidence)}">{number}<p>{_text(row.meaning)}</p></li>'


def _filter(kind: str) -> str:
    # Settings are half of the ledger but not results, so they are hidden by default.
    checked = "" if kind == "setting" else " checked"
    return f'<label><input type="checkbox" value="{_anchor(kind)}"{checked}> {kind}</label>'


def _ledger(rows: pd.DataFrame) -> str:
    """One table body per section or table of the paper; each row carries its kind of evidence."""
    places = rows["id"].str.split("/").str[0]
    bodies = []
    for place in places.unique():
        lines = [f'<tr class="place"><th colspan="{len(_SHOWN)}" scope="colgroup">{heading(place)}</th></tr>']
        lines += [_ledger_row(row) for _, row in rows[places == place].iterrows()]
        bodies.append("<tbody>\n" + "\n".join(lines) + "\n</tbody>")
    marked = ((column, _CELL[column in _SIDES]) for column in _SHOWN)
    head = "".join(f'<th scope="col" class="{kind}">{column}</th>' for column, kind in marked)
    return f'<table id="ledger-table"><thead><tr>{head}</tr></thead>\n' + "\n".join(bodies) + "\n</table>"


def _ledger_row(row: pd.Series) -> str:
    kind = _anchor(row["evidence"])
    origin = "" if row["origin"] == "printed" else f"<small>{_text(row['origin'])}</small>"
    command = f"<details><summary>show</summary><code>{html.escape(row['command'])}</code></details>"
    cells = (
        f'<td class="id">{_text(row["id"].partition("/")[2], "<wbr>")}{origin}</td>',
        *(
            f'<td class="{"value" if isinstance(row[side], str) else "number"}">{_cell(row[side])}</td>'
            for side in _SIDES
        ),
        f'<td class="{kind}"><span class="chip">{row["evidence"]}</span></td>',
        f"<td>{_text(row['unit'])}</td>",
        f'<td class="from">{_text(row["from"], "<wbr>")}</td>',
        f"<td>{command if row['command'] else ''}</td>",
    )
    return f'<tr data-kind="{kind}">{"".join(cells)}</tr>'


def _section(name: str, title: str, note: str, rows: pd.DataFrame) -> str:
    """A table with its heading and note, in a scrollable box."""
    numeric = [pd.api.types.is_numeric_dtype(rows[column]) for column in rows.columns]
    titles = zip(rows.columns, numeric, strict=True)
    head = "".join(f'<th scope="col" class="{_CELL[number]}">{_text(column)}</th>' for column, number in titles)
    lines = []
    for row in rows.itertuples(index=False):
        marked = zip(row, numeric, strict=True)
        cells = [f'<td class="{_CELL[number]}">{_cell(value)}</td>' for value, number in marked]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(lines)
    return (
        f'<section id="{_anchor(name)}"><h3>{name}: {_text(title)}</h3>\n<p class="note">{_text(note)}</p>\n'
        f'<div class="box"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div></section>'
    )


def _figures(results: Path) -> dict[str, str]:
    """All figures by name, embedded as data."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for path, title in make_figures.draw_all(results, Path(folder), "svg").items():
            image = f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"
            box = f'<div class="box" tabindex="0"><img alt="{html.escape(title)}" src="{image}"></div>'
            figures[path.stem] = (
                f'<figure id="{path.stem}-drawing">{box}<figcaption>{_text(title)}</figcaption></figure>'
            )
    return figures


def _cell(value: object) -> str:
    return _text(make_tables.format_cell(value))


def _text(text: str, between: str = "") -> str:
    """Escape text and render Markdown's inline code; `between` is inserted between the parts of a path or name."""
    parts = re.sub(r"([/_])(?=\w)", rf"\1{between}", html.escape(text))
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", parts)


def main() -> int:
    """Render and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--records", type=Path, default=make_tables.ANALYSIS, help="folder of records")
    parser.add_argument(
        "--output", type=Path, default=make_tables.ROOT / "outputs" / "report" / "index.html", help="file"
    )
    options = parser.parse_args()
    try:
        page = render(options.records)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(page, encoding="utf-8")
    print(f"report: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
