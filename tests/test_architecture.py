"""What `docs/architecture.md` promises: a short reading path, small files and folders, recipes with tests."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
import test_imports

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "lmscale"
DOCUMENT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MAX_READING_PATH_LINES = 1000
MAX_FILE_LINES, MAX_FOLDER_FILES, MAX_TOP_LEVEL_MODULES = 300, 20, 8
LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def section(title: str) -> str:
    """Text of one `## title` section."""
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", DOCUMENT, re.M | re.S)[1]


def code_lines(source: str) -> int:
    """Lines that hold code: no docstrings, comments or blank lines."""
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            documentation |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT_TOKENS:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - documentation)


def test_code_lines_counts_neither_docstrings_nor_comments() -> None:
    source = (
        '"""One.\n\nTwo."""\n\nx = [\n    1,  # one\n]\n\n\ndef f():\n    """Doc."""\n    # comment\n    return x\n'
    )
    assert code_lines(source) == 5


def reading_path() -> list[Path]:
    """Files of the reading path, in the order of the document's table."""
    links = re.findall(r"^\| \d+ \| \[[^]]+\]\(\.\./([^)]+\.py)\)", section("The reading path"), re.M)
    return [ROOT / link for link in links]


def test_the_reading_path_is_short_and_its_length_is_the_documents() -> None:
    files = reading_path()
    assert len(files) >= 12 and len(set(files)) == len(files)
    counts = {path.name: code_lines(path.read_text(encoding="utf-8")) for path in files}
    rows = re.findall(r"^\| \d+ \| \[[^]]+\]\([^)]*/([^/)]+\.py)\) \| (\d+) \|", section("The reading path"), re.M)
    assert {name: int(lines) for name, lines in rows} == counts
    assert sum(counts.values()) <= MAX_READING_PATH_LINES, counts
    assert f"{sum(counts.values())} code lines" in section("The reading path")


@pytest.mark.parametrize(
    "name",
    [
        "copy_to_tensor_parallel_region",
        "reduce_from_tensor_parallel_region",
        "ColumnParallelLinear",
        "RowParallelLinear",
        "VocabParallelEmbedding",
        "vocab_parallel_cross_entropy",
        "SelfAttention",
        "MLP",
        "TransformerLayer",
        "GPT",
        "MixedPrecisionAdamW",
        "TensorParallelStrategy",
    ],
)
def test_the_reading_path_defines(name) -> None:
    defined = {
        node.name
        for path in reading_path()
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert name in defined


def test_files_and_folders_are_small() -> None:
    files = [path for path in PACKAGE.rglob("*.py")]
    long = {
        path.name: n for path in files if (n := len(path.read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES
    }
    assert long == {}
    for folder in {path.parent for path in files}:
        assert len(list(folder.glob("*.py"))) <= MAX_FOLDER_FILES, folder
    assert len(list(PACKAGE.glob("*.py"))) <= MAX_TOP_LEVEL_MODULES


def test_the_table_of_packages_is_the_one_that_is_enforced() -> None:
    assert test_imports.table() in DOCUMENT


def test_every_recipe_names_files_that_exist_and_a_test_that_exists() -> None:
    recipes = re.split(r"^### ", section("How to add"), flags=re.M)[1:]
    assert [recipe.split("\n", 1)[0] for recipe in recipes] == [
        "A key",
        "A model family",
        "A norm placement",
        "A finetuning task",
        "A dataset",
        "A figure",
        "A collective backend",
    ]
    for recipe in recipes:
        proofs = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", recipe)
        assert proofs, recipe
        for path, name in proofs:
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), (path, name)


def test_every_link_leads_to_a_file() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", DOCUMENT):
        if not link.startswith("http"):
            assert (ROOT / "docs" / link).exists(), link
