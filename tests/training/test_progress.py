"""The line of progress: it fits the terminal, counts right after a resume, and is a log line without a terminal."""

import io
import itertools
import re
import sys
import time
from types import SimpleNamespace

import pytest
from entry_points import TINY, train

from lmscale.training.callbacks.progress import ProgressLine, fields, first_fields


def report(**metrics: float) -> SimpleNamespace:
    known = {"train/loss": 10.1234, "lr": 1.5e-4, "grad_norm": 12.3, "tokens_per_s": 1234567.0}
    known |= {"tflops_per_s_per_device": 123.4, "mfu": 0.412, "memory_gib": 70.12, "loss_scale": 4294967296.0}
    run = SimpleNamespace(precision=SimpleNamespace(dtype="fp16"))
    return SimpleNamespace(metrics=known | metrics, validation={"val/loss": 10.2}, validated_at=100, request=run)


@pytest.mark.parametrize("columns", [40, 80, 132, 400])
def test_as_many_fields_as_fit_are_shown_and_the_loss_comes_first(columns) -> None:
    parts = ["step 1234567/2000000", *fields(report(), 12345)]
    line = first_fields(parts, columns)
    assert len(line) <= columns and line.startswith("step 1234567/2000000  loss 10.123")
    shown = line.split("  ")
    assert shown == parts[: len(shown)]
    if len(shown) < len(parts):
        assert len(line) + 2 + len(parts[len(shown)]) > columns
    assert ("scale 4.29e+09" in line) == (columns == 400)


def test_without_a_terminal_first_and_last_step_have_a_line_that_counts_on_after_a_resume(tmp_path) -> None:
    shown = (*(o for o in TINY if "progress_bar" not in o), f"hydra.run.dir={tmp_path}")
    first = train(*shown, "trainer.stop_after_steps=1")
    assert first.returncode == 0, first.stderr
    assert re.findall(r"^step (\d+/\d+)  loss \d", first.stdout, re.M) == ["1/1"]
    second = train(*shown, "resume=auto")
    assert second.returncode == 0, second.stderr
    lines = [line for line in second.stdout.splitlines() if re.match(r"step \d+/", line)]
    assert [line.split()[1] for line in lines] == ["2/3", "3/3"]
    assert all(name in lines[0] for name in (" tok/s", "  lr ", " left", "grad norm ", " GiB"))
    assert "\r" not in first.stdout + second.stdout


@pytest.mark.parametrize("log_every", [1, 5])
def test_without_a_terminal_the_first_logged_step_has_a_line_and_no_line_is_cut(monkeypatch, capsys, log_every) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    trainer = SimpleNamespace(is_global_zero=True, max_steps=2000)
    module = SimpleNamespace(completed_steps=0)
    shown = report()
    logged, shown.metrics = shown.metrics, {}
    progress = ProgressLine(shown)
    progress.on_train_start(trainer, module)
    for step in range(1, 102):
        module.completed_steps = step
        shown.metrics = logged if step >= log_every else {}
        progress.on_train_batch_end(trainer, module)
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == [f"step {log_every}/2000", "step 100/2000"]
    assert [line[-1] for line in lines] == ["scale 4.29e+09"] * 2 and all(line[5].endswith(" left") for line in lines)


def test_the_time_that_is_left_is_that_of_the_steps_since_this_start(monkeypatch, capsys) -> None:
    now = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: 60.0 * next(now))
    trainer, module = SimpleNamespace(is_global_zero=True, max_steps=103), SimpleNamespace(completed_steps=100)
    progress = ProgressLine(report())
    progress.on_train_start(trainer, module)
    module.completed_steps = 101
    progress.on_train_batch_end(trainer, module)
    assert "  2:00 left" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_other_text_erases_the_line_of_progress_and_the_next_step_shows_it_below(monkeypatch) -> None:
    """A warning on stderr, as a library prints it between two steps."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "60")
    trainer = SimpleNamespace(is_global_zero=True, max_steps=2)
    module = SimpleNamespace(completed_steps=0)
    progress = ProgressLine(report())
    progress.on_train_start(trainer, module)
    for step in (1, 2):
        print("too hot", file=sys.stderr)
        module.completed_steps = step
        progress.on_train_batch_end(trainer, module)
    progress.on_train_end(trainer, module)
    assert sys.stdout is sys.stderr is screen
    shown = re.sub(r"  loss[^\x1b]*", "", screen.getvalue())
    assert shown == "too hot\n\rstep 1/2\x1b[K\r\x1b[Ktoo hot\n\rstep 2/2\x1b[K\rstep 2/2\x1b[K\n"
