"""Pages: their links, the index, and the files and names that tables and recipes give."""

import ast
import re
from pathlib import Path

import pytest
import test_imports

ROOT = Path(__file__).parents[1]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def headings(page: Path) -> set[str]:
    """Anchors of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    """Links of `page` that lead nowhere; addresses with a scheme are not followed."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = page if not path else page.parent / path
        if re.match(r"\w+:", link):
            continue
        if not target.exists() or (anchor and anchor not in headings(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_every_page_of_docs_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    links = re.findall(r"^- \[[^]]+\]\(([^)#]+)\)", index.read_text(encoding="utf-8"), re.M)
    assert set(index.parent.rglob("*.md")) - {index} <= {index.parent / link for link in links}


def missing_files(page: Path) -> list[str]:
    """Code and tests that the tables of a page name and that do not exist.

    A name without a folder is in the folder of the name before it.
    """
    missing, folder = [], ROOT
    for name in re.findall(r"`([\w/.]+\.(?:py|yaml|ipynb))`", page.read_text(encoding="utf-8")):
        found = [base / name for base in (ROOT, ROOT / "src" / "lmscale", ROOT / "tests", folder)]
        found = [path for path in found if path.exists()]
        folder = found[0].parent if found else folder
        missing += [] if found else [name]
    return missing


def test_the_tables_of_claims_name_existing_files() -> None:
    assert missing_files(ROOT / "docs" / "claims.md") == []


def section(title: str) -> str:
    """Text of one `## title` section."""
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", ARCHITECTURE, re.M | re.S)[1]


def test_the_table_of_packages_is_the_one_that_is_enforced() -> None:
    assert test_imports.table() in ARCHITECTURE


def test_where_is_names_only_what_is_defined() -> None:
    names = re.findall(r"`([\w/]+\.py)(?:::([\w.]+))?`", section("Where is ..."))
    assert len(names) > 20
    for path, name in names:
        body = ast.parse((ROOT / "src" / "lmscale" / path).read_text(encoding="utf-8")).body
        for part in filter(None, name.split(".")):
            (body,) = (node.body for node in body if getattr(node, "name", None) == part)


def test_every_recipe_names_files_that_exist_and_a_test_that_exists() -> None:
    recipes = re.split(r"^### ", section("How to add"), flags=re.M)[1:]
    assert len(recipes) >= 9
    for recipe in recipes:
        proofs = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", recipe)
        assert proofs, recipe
        for path, name in proofs:
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), (path, name)
