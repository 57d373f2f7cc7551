"""The committed notebooks run from the committed records and reproduce their outputs."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
MAKE_FIGURES = FOLDER.parent / "analysis" / "pages" / "make_figures.py"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
STORIES = [path for path in NOTEBOOKS if path.stem != "06_your_runs"]
FASTEST = "01_parameter_counts"
WITHOUT_DRAWING = ("text/html", "text/plain")


def printed(notebook: nbformat.NotebookNode) -> list[list[dict[str, str]]]:
    """The text output of every code cell, and whether it draws a figure."""
    cells = []
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        outputs = []
        for output in cell.outputs:
            assert output.output_type in ("display_data", "execute_result"), output  # no warning, no error
            shown = {kind: output.data[kind] for kind in WITHOUT_DRAWING if kind in output.data}
            outputs.append(shown | {"draws": "image/png" in output.data})
        cells.append(outputs)
    return cells


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem != FASTEST)) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_running_a_notebook_reproduces_its_outputs(path: Path, tmp_path) -> None:
    (tmp_path / "notebooks").mkdir()
    for name in ("analysis", "conf"):  # without `outputs/` and `multirun/`, as in a fresh clone
        (tmp_path / name).symlink_to(FOLDER.parent / name)
    (tmp_path / "notebooks" / "on_ranks.py").symlink_to(FOLDER / "on_ranks.py")
    committed = nbformat.read(path, as_version=4)
    again = nbformat.read(path, as_version=4)
    for cell in again.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    NotebookClient(again, timeout=120, resources={"metadata": {"path": str(tmp_path / "notebooks")}}).execute()
    assert printed(again) == printed(committed)


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_a_notebook_opens_with_the_papers_place_and_ends_with_where_we_differ(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert "**" in "".join(cells[0]["source"])  # the finding
    titles = [text for text in ("".join(cell["source"]) for cell in cells) if text.startswith(("# ", "## "))]
    first, last = titles[0], [title for title in titles if not title.startswith("## Appendix")][-1]
    assert first.startswith("# ") and ("Table" in first.split("\n")[0] or "Figure" in first.split("\n")[0])
    assert last.startswith("## Where we differ")
    assert [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"] == list(
        range(1, sum(cell["cell_type"] == "code" for cell in cells) + 1)
    )


def test_every_figure_of_a_notebook_is_also_a_file() -> None:
    drawn = {name for path in STORIES for name in re.findall(r"draw_\w+", path.read_text(encoding="utf-8"))}
    assert drawn and drawn <= set(re.findall(r"draw_\w+", MAKE_FIGURES.read_text(encoding="utf-8")))
