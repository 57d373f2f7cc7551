"""metrics.csv: a row a step, on disk at once, across resumes."""

import csv

from lmscale.training.metrics_file import MetricsFile


def rows(path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(logger: MetricsFile, steps: range) -> None:
    for step in steps:
        logger.log_metrics({"train/loss": 1.0 / step, "lr": 0.1}, step)


def test_a_row_is_on_disk_as_soon_as_it_is_written(tmp_path) -> None:
    logger = MetricsFile(tmp_path / "run" / "metrics.csv")
    logger.resume_at(0)
    write(logger, range(1, 4))
    assert [row["step"] for row in rows(logger.path)] == ["1", "2", "3"]
    assert float(rows(logger.path)[2]["train/loss"]) == 1.0 / 3


def test_validation_joins_the_row_of_its_step_and_never_makes_one(tmp_path) -> None:
    logger = MetricsFile(tmp_path / "metrics.csv")
    logger.resume_at(0)
    logger.log_metrics({"val/loss": 9.0}, 0)  # before the first step
    write(logger, range(1, 3))
    logger.log_metrics({"val/loss": 5.0, "val/perplexity": 148.4}, 2)
    write(logger, range(3, 4))
    assert [row["val/loss"] for row in rows(logger.path)] == ["", "5.0", ""]


def test_a_resume_keeps_earlier_rows_once_and_drops_later_and_torn_ones(tmp_path) -> None:
    path = tmp_path / "metrics.csv"
    first = MetricsFile(path)
    first.resume_at(0)
    write(first, range(1, 8))
    with open(path, "a", encoding="utf-8") as file:
        file.write("8,0.1")  # the process was killed in the middle of a line
    second = MetricsFile(path)
    second.resume_at(4)
    write(second, range(5, 10))
    assert [int(row["step"]) for row in rows(path)] == list(range(1, 10))
    assert all(float(row["train/loss"]) == 1.0 / int(row["step"]) for row in rows(path))


def test_a_run_from_scratch_starts_a_new_file(tmp_path) -> None:
    for stop in (6, 3):
        logger = MetricsFile(tmp_path / "metrics.csv")
        logger.resume_at(0)
        write(logger, range(1, stop))
    assert len(rows(logger.path)) == 2


def test_columns_of_an_earlier_part_are_kept(tmp_path) -> None:
    first = MetricsFile(tmp_path / "metrics.csv")
    first.resume_at(0)
    write(first, range(1, 3))
    second = MetricsFile(tmp_path / "metrics.csv")
    second.resume_at(2)
    second.log_metrics({"train/loss": 0.5, "lr": 0.1, "mfu": 0.4}, 3)  # another machine reports more
    assert [row["lr"] for row in rows(second.path)] == ["0.1"] * 3
    assert "mfu" not in rows(second.path)[0]
