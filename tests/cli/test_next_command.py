"""A run ends with the commands that follow it, and they run as they are printed."""

import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from entry_points import REPOSITORY, TINY, environment, train
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode

from lmscale.cli import next_command


def run_line(line: str, *more: str) -> subprocess.CompletedProcess:
    """What a user does who copies the line: a shell in the root of the clone."""
    return subprocess.run(
        " ".join([line, *more]),
        shell=True,
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def printed(stdout: str) -> dict[str, str]:
    return dict(re.findall(r"^(\w+): +(\S*python.*)$", stdout, re.M))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("runs") / "a run, (1=2)"
    done = train(*TINY, f"hydra.run.dir='{folder}'")
    assert done.returncode == 0, done.stderr
    return folder, printed(done.stdout)


def test_a_pretraining_ends_with_use_export_and_plot(finished) -> None:
    folder, lines = finished
    assert list(lines) == ["use", "export", "plot"]
    assert shlex.split(lines["use"])[1:] == ["src/generate.py", f"ckpt={folder}", "prompt=The"]
    source, target, form = OverridesParser.create().parse_overrides(shlex.split(lines["export"])[2:])
    assert [source.value(), target.value(), form.value()] == [str(folder), f"{folder}/hugging_face", "hugging_face"]
    assert all(Path(REPOSITORY / shlex.split(line)[1]).is_file() for line in lines.values())


@pytest.mark.slow
def test_the_printed_commands_run(finished, tmp_path) -> None:
    _, lines = finished
    for name, more in {"use": [], "export": [], "plot": ["--output", f"{tmp_path}/curves.png"]}.items():
        done = run_line(lines[name], *more)
        assert done.returncode == 0, (lines[name], done.stderr)
        for line in printed(done.stdout).values():  # `load` after the export
            assert run_line(line).returncode == 0, line


@pytest.mark.slow
def test_an_unfinished_run_ends_with_the_command_that_completes_it(tmp_path, monkeypatch) -> None:
    run = tmp_path / "another run"
    done = train(*TINY, "trainer.stop_after_steps=2", f"hydra.run.dir='{run}'")
    assert done.returncode == 0, done.stderr
    (run / "record.json").unlink()
    hydra_config = SimpleNamespace(mode=RunMode.RUN, runtime=SimpleNamespace(config_sources=[]))
    monkeypatch.setattr(next_command.HydraConfig, "get", lambda: hydra_config)
    monkeypatch.chdir(REPOSITORY)
    line = next_command.after_training({"run_dir": str(run), "overrides": [*TINY, "resume.path=none"]})
    done = run_line(line.removeprefix("continue: "))
    assert done.returncode == 0, done.stderr
    assert "steps 2 to 3 of 3, resumed from" in done.stdout and (run / "record.json").is_file()


def test_a_folder_without_record_and_checkpoints_gets_no_command(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(next_command.HydraConfig, "get", lambda: SimpleNamespace(mode=RunMode.RUN))
    assert next_command.after_training({"run_dir": str(tmp_path), "overrides": []}) == ""
    assert next_command.after_finetuning({"run_dir": str(tmp_path), "overrides": []}) == ""


@pytest.mark.parametrize("path", ["plain/run", "a b", "it's", 'say "x"', "a=b,c", "$HOME", "back\\slash", "ends\\"])
def test_a_path_reaches_the_script_as_it_is(path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = next_command.command("src/convert.py", source=Path(path))
    word = subprocess.run(["sh", "-c", f"printf %s {line.split(' ', 2)[2]}"], capture_output=True, text=True).stdout
    assert OverridesParser.create().parse_override(word).value() == path
