"""metrics.csv: one row per step, written to disk immediately, also across resumes."""

import csv
import errno
import resource
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from runs import read_rows, run_jobs, tiny_run
from sharding import small_config

from lmscale.parallel import ParallelContext
from lmscale.planner.workload import Workload
from lmscale.runtime.watchdog import Watchdog
from lmscale.training.callbacks.step_report import StepReport
from lmscale.training.loggers import LinesFile, MetricsFile
from lmscale.training.module import BERTModule, GPTModule
from lmscale.training.session import Ending
from lmscale.training.timing import PhaseTimer, memory_in_use


def rows(path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def resumed(folder: Path, step: int = 0, *columns: tuple[str, ...]) -> MetricsFile:
    """The file of a run that goes on after a step."""
    logger = MetricsFile(folder / "metrics.csv", *columns)
    logger.resume_at(step)
    return logger


def write(logger: MetricsFile, steps: range) -> None:
    for step in steps:
        logger.log_metrics({"train/loss": 1.0 / step, "lr": 0.1}, step)


def full(path, *args, **kwargs) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_validation_is_added_to_the_row_of_its_step(tmp_path) -> None:
    logger = resumed(tmp_path)
    logger.log_metrics({"val/loss": 9.0}, 0)  # before the first step
    write(logger, range(1, 3))
    logger.log_metrics({"val/loss": 5.0, "val/perplexity": 148.4}, 2)
    write(logger, range(3, 4))
    logger.log_metrics({"val/loss": 4.0}, 4)  # of a step that has no row
    assert [row["val/loss"] for row in rows(logger.path)] == ["", "5.0", ""]


def test_a_resume_keeps_earlier_rows_and_drops_later_and_truncated_ones(tmp_path) -> None:
    first = resumed(tmp_path)
    path = first.path
    write(first, range(1, 8))
    with open(path, "a", encoding="utf-8") as file:
        file.write("8,0.1\n9,0.1\n1")  # killed after the first digit of step 10
    second = resumed(tmp_path, 4)
    write(second, range(5, 10))
    assert [int(row["step"]) for row in rows(path)] == list(range(1, 10))
    assert all(float(row["train/loss"]) == 1.0 / int(row["step"]) for row in rows(path))


def test_a_resume_loses_no_row_of_a_file_with_a_byte_order_mark_and_other_letters(tmp_path) -> None:
    first = resumed(tmp_path)
    path = first.path
    first.log_metrics({"train/loss": 0.5, "Länge": 1.0}, 1)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # saved by a spreadsheet
    second = resumed(tmp_path, 1)
    second.log_metrics({"train/loss": 0.5}, 2)
    second.log_metrics({"train/loss": 0.5, "new": 2.0}, 3)
    second.log_metrics({"train/loss": 0.5}, 4)
    assert [row["step"] for row in rows(path)] == ["1", "2", "3", "4"]
    assert list(rows(path)[0])[:3] == ["step", "train/loss", "Länge"]


def test_lines_that_a_full_disk_refused_follow_with_the_next(tmp_path, monkeypatch, capsys) -> None:
    lines = LinesFile(tmp_path / "scores.jsonl")
    lines.append({"step": 1})
    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", full)
        lines.append({"step": 2})
        lines.append({"step": 3})
    assert capsys.readouterr().err.count("scores.jsonl: it cannot be written (") == 1
    lines.append({"step": 4})
    assert lines.path.read_text() == "".join(f'{{"step": {step}}}\n' for step in range(1, 5))
    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", full)
        lines.append({"step": 5})
        lines.finalize()
    assert "scores.jsonl: its last lines (1) are not in it: " in capsys.readouterr().err
    lines.finalize()
    assert lines.path.read_text().endswith('{"step": 5}\n') and capsys.readouterr().err == ""


def test_a_line_that_a_full_disk_cut_is_not_followed_by_others(tmp_path, capsys) -> None:
    lines = LinesFile(tmp_path / "scores.jsonl")
    lines.append({"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, hard))
    try:
        lines.append({"step": 2})
        lines.finalize()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "its last lines (1) are not in it" in capsys.readouterr().err
    LinesFile(lines.path).append({"step": 3})
    assert lines.path.read_text() == '{"step": 1}\n{"step": 3}\n'


def test_a_run_from_scratch_starts_a_new_file(tmp_path) -> None:
    for stop in (6, 3):
        logger = resumed(tmp_path)
        write(logger, range(1, stop))
    assert len(rows(logger.path)) == 2


def test_rows_are_buffered_while_the_disk_is_full_with_one_warning(tmp_path, monkeypatch, capsys) -> None:
    logger = resumed(tmp_path)
    write(logger, range(1, 3))

    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", full)
        write(logger, range(3, 5))
        logger.log_metrics({"val/loss": 5.0}, 4)
        assert capsys.readouterr().err.count("WARNING") == 1
        logger.finalize("success")
        assert "the rows from step 3 on (2) are not in it: [Errno 28] No space left" in capsys.readouterr().err
    assert [row["step"] for row in rows(logger.path)] == ["1", "2"]
    write(logger, range(5, 6))
    assert [row["step"] for row in rows(logger.path)] == ["1", "2", "3", "4", "5"]
    assert [row["val/loss"] for row in rows(logger.path)] == ["", "", "", "5.0", ""]
    logger.finalize("success")
    assert capsys.readouterr().err == ""


def test_if_the_disk_is_full_from_the_start_the_whole_file_is_written_later(tmp_path) -> None:
    (tmp_path / "run").write_text("in the way")
    logger = MetricsFile(tmp_path / "run" / "metrics.csv")
    write(logger, range(1, 3))
    (tmp_path / "run").unlink()
    write(logger, range(3, 4))
    assert [row["step"] for row in rows(logger.path)] == ["1", "2", "3"]


def test_a_metric_that_only_the_later_part_has_gets_a_column(tmp_path, monkeypatch) -> None:
    """As with logger.layer_grad_norms=true at a resume, or on a machine with a known peak rate."""
    first = resumed(tmp_path)
    write(first, range(1, 3))
    first.log_metrics({"val/loss": 5.0}, 2)
    second = resumed(tmp_path, 2)
    write(second, range(3, 4))
    with monkeypatch.context() as patched:
        patched.setattr("lmscale.training.loggers.write_atomically", full)
        second.log_metrics({"train/loss": 0.2, "lr": 0.1, "mfu": 0.4}, 4)
        assert [row["step"] for row in rows(second.path)] == ["1", "2", "3"]
    second.log_metrics({"train/loss": 0.2, "lr": 0.1, "mfu": 0.5}, 5)
    assert [row["mfu"] for row in rows(second.path)] == ["", "", "", "0.4", "0.5"]
    assert [row["val/loss"] for row in rows(second.path)] == ["", "5.0", "", "", ""]
    third = resumed(tmp_path, 5)
    write(third, range(6, 7))
    third.log_metrics({"val/loss": 4.0}, 6)
    assert [row["mfu"] for row in rows(third.path)] == ["", "", "", "0.4", "0.5", ""]
    assert float(rows(third.path)[5]["train/loss"]) == 1.0 / 6 and rows(third.path)[5]["val/loss"] == "4.0"
    third.log_metrics({"val/penalty_loss": 0.5}, 6)  # of the row just written
    assert [row["step"] for row in rows(third.path)] == list("123456")


def test_a_resumed_run_gets_the_validation_columns_that_its_file_lacks(tmp_path) -> None:
    first = resumed(tmp_path)
    write(first, range(1, 3))
    second = resumed(tmp_path, 2, ("val/loss", "val/penalty_loss"))
    write(second, range(3, 4))
    second.log_metrics({"val/loss": 5.0, "val/penalty_loss": 0.5}, 3)
    assert [row["val/penalty_loss"] for row in rows(second.path)] == ["", "", "0.5"]
    assert [row["val/loss"] for row in rows(second.path)] == ["", "", "5.0"]


def test_the_columns_are_the_validation_metrics_of_the_module(monkeypatch) -> None:
    monkeypatch.setattr(BERTModule, "parallel", ParallelContext())
    module = BERTModule(small_config("bert"), logs=False)
    assert module.validation_metrics == ["val/loss", "val/perplexity", "val/lm_loss", "val/order_loss"]
    assert GPTModule(small_config("gpt"), logs=False).validation_metrics == ["val/loss", "val/perplexity"]


def test_a_validated_step_has_a_row_even_if_it_is_not_logged(tmp_path) -> None:
    run_jobs(
        [tiny_run("gpt", tmp_path, trainer__max_steps=7, trainer__validate_every_steps=3, logger__log_every_steps=2)], 1
    )
    rows = read_rows(tmp_path)
    assert [row["step"] for row in rows] == [2, 3, 4, 6, 7]
    assert [row["step"] for row in rows if "val/loss" in row] == [3, 6, 7]


def test_the_time_of_a_validation_belongs_to_no_step(tmp_path) -> None:
    request, model = tiny_run("gpt", tmp_path), small_config("gpt")
    run = SimpleNamespace(request=request, on_gpu=False, model=model, workload=Workload.of(request))
    session = SimpleNamespace(watchdog=Watchdog(0, 60), ending=Ending())
    report = StepReport(run, session)
    report.timer, report._batch_end = PhaseTimer(torch.device("cpu")), time.perf_counter() - 99
    report.on_validation_end(SimpleNamespace(loggers=[]), SimpleNamespace(validation={}, completed_steps=1))
    report.on_train_batch_start(None, None, None, 0)
    assert report.timer.read()["data"] < 9


def test_an_overflowing_perplexity_is_infinite(monkeypatch) -> None:
    module = GPTModule(small_config("gpt"), logs=False)
    monkeypatch.setattr(GPTModule, "parallel", ParallelContext())
    module._trainer = SimpleNamespace(num_val_batches=[1])
    module._validation_sums = {0: torch.tensor([[900.0], [1.0]], dtype=torch.float64)}
    module.on_validation_epoch_end()
    assert module.validation == {"val/loss": 900.0, "val/perplexity": float("inf")}


def test_the_perplexity_of_a_bert_is_that_of_its_masked_tokens_alone(monkeypatch) -> None:
    monkeypatch.setattr(BERTModule, "parallel", ParallelContext())
    module = BERTModule(small_config("bert"), logs=False)
    module._trainer = SimpleNamespace(num_val_batches=[1])
    module._validation_sums = {0: torch.tensor([[6.0, 1.0], [2.0, 2.0]], dtype=torch.float64)}
    module.on_validation_epoch_end()
    losses = {"val/loss": 3.5, "val/lm_loss": 3.0, "val/order_loss": 0.5}
    assert module.validation == losses | {"val/perplexity": torch.tensor(3.0, dtype=torch.float64).exp().item()}
    assert list(module.validation) == module.validation_metrics


def test_memory_in_use_respects_the_page_size(monkeypatch) -> None:
    small = memory_in_use(torch.device("cpu"))
    assert small < 1.1 * 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # which lags behind
    monkeypatch.setattr("os.sysconf", lambda name: 65_536)
    assert memory_in_use(torch.device("cpu")) > 10 * small
