"""What `docs/architecture.md` promises: a reading path that defines the central names, recipes with tests."""

import ast
import re
from pathlib import Path

import pytest
import test_imports

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """Text of one `## title` section."""
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", DOCUMENT, re.M | re.S)[1]


def reading_path() -> list[Path]:
    """Files of the reading path, in the order of the document's table."""
    links = re.findall(r"^\| \d+ \| \[[^]]+\]\(\.\./([^)]+\.py)\)", section("The reading path"), re.M)
    return [ROOT / link for link in links]


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


def test_the_table_of_packages_is_the_one_that_is_enforced() -> None:
    assert test_imports.table() in DOCUMENT


def test_every_recipe_names_files_that_exist_and_a_test_that_exists() -> None:
    recipes = re.split(r"^### ", section("How to add"), flags=re.M)[1:]
    assert [recipe.split("\n", 1)[0] for recipe in recipes] == [
        "A key",
        "A model family",
        "A norm placement",
        "A parametrization",
        "An optimizer, a callback, a loss term",
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
