"""The report is one self-contained valid HTML page with every entry, table and figure, from any records."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from analysis.report import make_report, make_tables
from analysis.report.records import NEEDED, read_records

ROOT = Path(__file__).resolve().parents[2]
EMPTY = {"meta", "wbr", "img", "input", "br", "link"}


class Page(HTMLParser):
    """All elements in order, and whether they are closed correctly."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.elements, self.words = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> at {self.getpos()} closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> Path:
    """A folder with only the required records."""
    folder = tmp_path_factory.mktemp("records")
    for name in NEEDED:
        shutil.copy(next(make_tables.ANALYSIS.glob(f"*/records/{name}")), folder)
    return folder


@pytest.fixture(scope="module")
def text(records) -> str:
    return make_report.render(records)


@pytest.fixture(scope="module")
def page(text) -> Page:
    return Page(text)


def test_every_element_is_closed_and_every_id_is_unique(page) -> None:
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = [attributes["href"].removeprefix("#") for attributes in page.all("a")]
    assert set(targets) <= set(ids)


def test_the_page_loads_no_external_resources(page, text) -> None:
    addresses = [attributes[key] for _, attributes in page.elements for key in ("src", "href") if key in attributes]
    assert addresses and all(address.startswith(("#", "data:")) for address in addresses)
    style, script = (re.search(rf"<{tag}>(.*?)</{tag}>", text, re.S)[1] for tag in ("style", "script"))
    assert not re.search(r"url\(|@import|http", style) and not re.search(r"fetch|import|http", script)
    assert not page.all("link") and not page.all("iframe")


def test_every_table_figure_and_entry_is_on_the_page(page, records) -> None:
    rows = make_tables.all_rows(read_records(records))
    sections = {attributes.get("id") for attributes in page.all("section")}
    tables = [name for name in make_tables.TABLES if name in rows]
    assert sections >= {name.lower().replace(" ", "-") for name in tables}
    assert len(page.all("table")) == len(tables) + 1
    images = page.all("img")
    assert {"Figure 1", "Figure 5"} < {image["alt"][:8] for image in images}
    assert all(image["src"].startswith("data:image/svg+xml;base64,") for image in images)
    marked = [attributes["data-kind"] for attributes in page.all("tr") if "data-kind" in attributes]
    assert len(marked) == len(rows["Ledger"])
    assert set(marked) <= {attributes["value"] for attributes in page.all("input") if "value" in attributes}


def test_wide_content_scrolls_in_its_own_box(text) -> None:
    wide = re.findall(r"(<div class=\"box\"[^>]*>\s*)?<(?:table|img)\b", text)
    assert wide and all(wide)
    assert '<meta name="viewport" content="width=device-width' in text


def test_missing_results_are_listed_as_missing(page) -> None:
    words = " ".join(page.words)
    assert "no record has a metric of this name" in words and "needs the pretrained 3.9B BERT" in words


def test_the_report_is_made_without_torch() -> None:
    code = "import sys, analysis.report.make_report; print({'torch', 'lightning', 'hydra'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_html_in_text_is_escaped() -> None:
    assert make_report._text("`a<b` & c") == "<code>a&lt;b</code> &amp; c"
    assert make_report._text("`x/y_z.json`", "<wbr>") == "<code>x/<wbr>y_<wbr>z.json</code>"


def test_main_writes_the_page_and_refuses_a_folder_without_records(tmp_path, records, monkeypatch, capsys) -> None:
    output = tmp_path / "new" / "page.html"
    monkeypatch.setattr(sys, "argv", ["make_report.py", "--records", str(records), "--output", str(output)])
    assert make_report.main() == 0 and output.read_text(encoding="utf-8").startswith("<!doctype html>")
    monkeypatch.setattr(sys, "argv", ["make_report.py", "--records", str(tmp_path / "gone")])
    assert make_report.main() == 2
    assert capsys.readouterr().err.startswith("error: `--records` must have cost_model.json")
