"""Every Python block of docs/guides/library.md runs: as a script on two processes, the first in a notebook on one."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from test_stock_trainer import REPOSITORY, run_script

GUIDE = (REPOSITORY / "docs" / "guides" / "library.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.S)


@pytest.mark.slow
@pytest.mark.parametrize("code", BLOCKS, ids=["ten lines", "options of the Trainer"])
def test_a_block_runs_as_a_script(code: str, tmp_path: Path) -> None:
    run_script(code, tmp_path)
    assert list(tmp_path.rglob("*.ckpt"))


@pytest.mark.slow
def test_the_first_block_has_ten_lines_and_runs_in_a_notebook(tmp_path: Path) -> None:
    lines = [line for line in BLOCKS[0].splitlines() if line and not line.startswith("if __name__")]
    assert len(lines) <= 10
    code = BLOCKS[0].replace("tp_size=2", "tp_size=1").replace("devices=2", "devices=1")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code + "\nmodule.completed_steps")])
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    (shown,) = [output for output in notebook.cells[0].outputs if output.output_type == "execute_result"]
    assert shown["data"]["text/plain"] == "8"
