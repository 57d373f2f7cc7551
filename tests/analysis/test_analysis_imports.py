"""The folders of analysis/ import each other one way."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ANALYSIS = Path(__file__).resolve().parents[2] / "analysis"


def imported_folders(folder: Path) -> set[str]:
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("analysis"):
                parts = node.module.split(".")
                names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return names - {folder.name}


def test_the_folders_of_analysis_import_each_other_one_way() -> None:
    folders = [folder for folder in ANALYSIS.iterdir() if any(folder.rglob("*.py"))]
    graph = {folder.name: imported_folders(folder) for folder in folders}
    assert "pages" in list(TopologicalSorter(graph).static_order())  # a circle raises CycleError
    assert not any("pages" in imported for imported in graph.values())
