"""Where a run logs its metrics: metrics.csv, files of JSON lines, TensorBoard, Weights & Biases."""

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.compat.proto.summary_pb2 import Summary

from ..checkpoint import set_aside
from ..config.pretrain import RunConfig
from ..runtime.messages import warn
from ..shared_files import write_atomically


class MetricsFile(Logger):
    """metrics.csv: a row per reported step, each exactly once across any number of resumes, on disk when it is done.

    Lightning's CSVLogger deletes existing rows when it opens a folder. This logger keeps the rows up to the step that
    training resumes from and removes the later ones, which will be written again. Validation losses are added to the
    row of their step. Metrics without a row (validation before the first step) are not written: every row has a
    training loss.

    A full disk does not end the training: rows are kept in memory until they can be written.

    Args:
        path: the file.
        validation: the metrics of a validation, which have columns from the first row on.
    """

    def __init__(self, path: Path, validation: Sequence[str] = ("val/loss", "val/perplexity")) -> None:
        super().__init__()
        self.path, self.validation = path, validation
        self.columns: list[str] = []
        self.rows: list[dict[str, Any]] = []  # the last row, and those before it that are not on disk yet
        self.offset = 0  # of the first of them in the file, bytes
        self.problem: OSError | None = None  # why they are not on disk

    @property
    def name(self) -> str:
        """Name of the logger in Lightning."""
        return "metrics"

    @property
    def version(self) -> str:
        """Empty: a run has one file."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The configuration is saved with the run, not here."""

    @rank_zero_only
    def resume_at(self, step: int) -> None:
        """Keep the rows of steps up to `step`; 0 starts a new file.

        Raises:
            ValueError, LookupError, csv.Error: the file is damaged, other than by a last row that is cut short.
        """
        self.columns, self.rows, self.offset, self.problem = [], [], 0, None
        if step == 0 or not self.path.is_file():
            self.path.unlink(missing_ok=True)
            return
        text = self.path.read_text(encoding="utf-8-sig")  # a spreadsheet may add a mark
        header, *lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        kept = [line for line, row in zip(lines, csv.reader(lines), strict=True) if int(row[0]) <= step]
        self.columns = next(csv.reader([header]))
        write_atomically(self.path, (header + "".join(kept)).encode())
        self.offset = self.path.stat().st_size

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write the row of a step, or add validation losses to the row of the step just written."""
        if "train/loss" not in metrics:
            if self.rows and self.rows[-1]["step"] == step:
                self.rows[-1] |= metrics
                self._write()
            return
        if self.problem is None and self.rows:
            self.rows, self.offset = [], self.path.stat().st_size
        self.rows.append({"step": step} | metrics)
        self._write()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the rows that are not on disk yet; warn if that fails."""
        if self.problem is not None:
            self._write()
        if self.problem is not None:
            lost = f"the rows from step {self.rows[0]['step']} on ({len(self.rows)}) are not in it"
            warn(f"{self.path}: {lost}: {self.problem}")

    def _write(self) -> None:
        """Write `rows` at `offset`, after the header if the file is empty; a metric without a column gets one."""
        names = (name for row in self.rows for name in row)
        columns = list(dict.fromkeys([*self.columns, *names, *self.validation]))
        text = io.StringIO()
        table = csv.DictWriter(text, columns, lineterminator="\n")
        if self.offset == 0:
            table.writeheader()
        table.writerows({k: repr(v) if isinstance(v, float) else v for k, v in row.items()} for row in self.rows)
        try:
            if self.offset == 0:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.touch()
            elif columns != self.columns:
                self._add_columns(columns)
            self.columns = columns
            with open(self.path, "r+", encoding="utf-8") as file:
                file.seek(self.offset)
                file.write(text.getvalue())
                file.truncate()
        except OSError as error:
            if self.problem is None:
                warn(f"{self.path}: it cannot be written ({error}); its rows are kept in memory until it can")
            self.problem = error
        else:
            self.problem = None

    def _add_columns(self, columns: list[str]) -> None:
        """Give the rows of the file empty cells for the columns that it lacks."""
        data = self.path.read_bytes()
        _, *lines = data.decode().splitlines()
        commas, num_before = "," * (len(columns) - len(self.columns)), data[: self.offset].count(b"\n")
        wider = [line + "\n" for line in (",".join(columns), *(line + commas for line in lines))]
        write_atomically(self.path, "".join(wider).encode())
        self.offset = len("".join(wider[:num_before]).encode())


def training_losses(path: Path) -> list[float]:
    """The losses of the rows of a metrics.csv; empty if it could not be written."""
    if not path.is_file():
        return []
    with open(path, encoding="utf-8-sig", newline="") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file)]


class LinesFile:
    """A file of JSON lines, each on disk as soon as it is appended.

    As with `MetricsFile`, a full disk does not end the training.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.kept = path, b""  # the lines that are not on disk yet
        self.offset: int | None = None  # where they begin, once the file could be opened

    def append(self, line: dict[str, Any]) -> None:
        """Write a line, and those before it that could not be written."""
        was_kept, self.kept = bool(self.kept), self.kept + json.dumps(line).encode() + b"\n"
        problem = self._write()
        if problem is not None and not was_kept:
            warn(f"{self.path}: it cannot be written ({problem}); its lines are kept in memory until it can")

    def finalize(self) -> None:
        """Write the lines that are not on disk yet; warn if that fails."""
        problem = self._write() if self.kept else None
        if problem is not None:
            num_lines = self.kept.count(b"\n")
            warn(f"{self.path}: its last lines ({num_lines}) are not in it: {problem}")

    def _write(self) -> OSError | None:
        try:
            self.path.touch()
            with open(self.path, "r+b") as file:
                self.offset = file.seek(0, os.SEEK_END) if self.offset is None else file.seek(self.offset)
                file.write(self.kept)
        except OSError as error:
            if self.offset is not None:  # no half line for those who append later
                with suppress(OSError):
                    os.truncate(self.path, self.offset)
            return error
        self.kept, self.offset = b"", None
        return None


def optional_loggers(run: RunConfig, run_dir: Path) -> list[Logger]:
    """The loggers that `logger=` switches on."""
    loggers: list[Logger] = []
    if run.logger.tensorboard:
        loggers.append(StepEvents(run_dir, name="tensorboard", version=""))
    if run.logger.wandb:
        from lightning.pytorch.loggers import WandbLogger  # wandb is optional and may not be installed

        loggers.append(WandbLogger(name=run.name, project=run.logger.project, save_dir=run_dir))
    return loggers


class StepEvents(TensorBoardLogger):
    """TensorBoard logger that writes one event per step; Lightning's writes one per metric (0.5 ms more per step)."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write the metrics of one step, by name."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self.experiment._get_file_writer().add_summary(Summary(value=values), step)


def keep_damaged(path: Path) -> None:
    """Set a file of an earlier part of the run aside, with a warning."""
    kept = set_aside(path)
    warn(f"{path.name} cannot be read; kept as {kept.name}, a new one begins")
