"""One page with the ledger, every table and every figure: `make report`.

    python analysis/report/make_report.py          # outputs/report/index.html

The page is self-contained: figures are embedded as data, so it can be opened without a network.
"""

import argparse
import base64
import html
import re
import sys
import tempfile
from pathlib import Path
from string import Template

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import pandas as pd

from analysis.ledger.evidence import KINDS
from analysis.ledger.rows import heading, kinds
from analysis.report import make_figures, make_tables
from analysis.report.records import read_records

TEMPLATE = Path(__file__).with_name("report.html")
_CELL = {True: "number", False: "words"}  # CSS classes
_SIDES = ("paper", "ours")
_SHOWN = ("id", "paper", "ours", "evidence", "unit", "from", "command")  # a narrow screen shows the first four


def render(results: Path) -> str:
    """Render the page from a folder of records.

    Raises:
        ValueError: a record that a table needs is missing.
    """
    rows = make_tables.all_rows(read_records(results))
    ledger, tables = rows["Ledger"], [(name, *about) for name, about in make_tables.TABLES.items() if name in rows]
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        total=len(ledger),
        contents="\n".join(f'<a href="#{_anchor(name)}">{name}</a>' for name, *_ in tables),
        kinds="\n".join(_kind(row) for row in kinds(ledger).itertuples()),
        filters="\n".join(_filter(kind) for kind in KINDS),
        ledger=_ledger(ledger),
        figures="\n".join(_figures(results)),
        tables="\n".join(_section(name, title, note, rows[name]) for name, title, note in tables),
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


def _figures(results: Path) -> list[str]:
    """All figures, embedded as data."""
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for path, title in make_figures.draw_all(results, Path(folder), "svg").items():
            drawing = path.read_bytes()
            width, height = map(float, re.search(rb'width="([\d.]+)pt" height="([\d.]+)pt"', drawing).groups())
            # A wide figure would be illegible on a phone, so it scrolls there.
            kind = "wide" if width > 1.8 * height else "narrow"
            image = f"data:image/svg+xml;base64,{base64.b64encode(drawing).decode()}"
            box = f'<div class="box"><img class="{kind}" alt="{html.escape(title)}" src="{image}"></div>'
            figures.append(f"<figure>{box}<figcaption>{_text(title)}</figcaption></figure>")
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
    parser.add_argument("--output", type=Path, default=make_tables.ROOT / "outputs" / "report" / "index.html")
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
