"""`lmscale COMMAND ...` runs the script of the command."""

import ast
import shutil
import signal
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from entry_points import REPOSITORY, TINY, environment

from lmscale.__main__ import COMMANDS
from lmscale.cli.reference import ENTRY_POINTS


def lmscale(*arguments: str, cwd: Path, package: Path = REPOSITORY / "src") -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "lmscale", *arguments],
        cwd=cwd,
        env=environment(PYTHONPATH=str(package)),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_entry_point_has_a_command_and_the_console_script_exists() -> None:
    assert {script for script, _ in COMMANDS.values()} == set(ENTRY_POINTS)
    module, _, name = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"][
        "lmscale"
    ].partition(":")
    assert callable(getattr(import_module(module), name))


def test_without_a_command_it_lists_them(tmp_path) -> None:
    for arguments in ((), ("--help",)):
        done = lmscale(*arguments, cwd=tmp_path)
        assert done.returncode == 0
        assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


def test_a_command_that_does_not_exist_is_refused_in_one_line(tmp_path) -> None:
    done = lmscale("trian", "model=gpt_tiny", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.endswith("but is 'trian'; did you mean `train`?\n") and len(done.stderr.splitlines()) == 1


def test_every_script_handles_ctrl_c_before_it_imports_anything_else() -> None:
    for script in ENTRY_POINTS:
        statements = ast.parse((REPOSITORY / script).read_text(encoding="utf-8")).body
        first = next(each for each in statements if isinstance(each, ast.Import | ast.ImportFrom))
        assert first.names[0].name == "lmscale.cli.ctrl_c", script


@pytest.mark.parametrize("library", ["hydra", "torch"])
def test_ctrl_c_while_a_library_is_imported_prints_one_line(library, tmp_path) -> None:
    code = "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: pass\n"
    (tmp_path / f"{library}.py").write_text(code)  # some modules of torch catch every exception
    command = [sys.executable, str(REPOSITORY / "src" / "train.py")]
    path = environment(PYTHONPATH=f"{tmp_path}:{REPOSITORY / 'src'}")
    # A shell that starts the tests in the background makes them, and their child processes, ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=120)
    signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped by SIGINT\n")
    assert not (tmp_path / "outputs").exists()


def test_outside_a_clone_one_line_says_so(tmp_path) -> None:
    shutil.copytree(REPOSITORY / "src" / "lmscale" / "config", tmp_path / "site" / "lmscale" / "config")
    for name in ("__init__.py", "__main__.py"):
        shutil.copy(REPOSITORY / "src" / "lmscale" / name, tmp_path / "site" / "lmscale")
    done = lmscale("train", cwd=tmp_path, package=tmp_path / "site")
    assert done.returncode == 2
    assert done.stderr == (
        f"error: `lmscale` must be installed from a clone (pip install -e CLONE), but {tmp_path} has no conf/\n"
    )


@pytest.mark.slow
def test_lmscale_train_starts_two_ranks_from_another_folder(tmp_path) -> None:
    done = lmscale("train", *TINY, "parallel.tp_size=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (record,) = (tmp_path / "outputs" / "gpt_tiny").glob("*/record.json")
    assert '"tp_size": 2' in record.read_text() and '"started": "20' in record.read_text()
