"""metrics.csv: one row a reported step, each exactly once, across any number of resumes."""

import csv
import io
import os
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

_VALIDATION_COLUMNS = ("val/loss", "val/perplexity", "val/lm_loss", "val/order_loss")


class MetricsFile(Logger):
    """A CSV whose row is on disk as soon as its step is done.

    Lightning's CSVLogger drops what was there when it is opened on an existing folder; this one keeps the rows up to
    the step that training resumes from and takes away the later ones, which will be written again. Validation figures
    join the row of their step. Figures without a row (validation before the first step) are not written: every row has
    a training loss.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.columns: list[str] = []
        self.last_row: dict[str, Any] | None = None
        self.last_offset = 0

    @property
    def name(self) -> str:
        """Lightning's name of the logger."""
        return "metrics"

    @property
    def version(self) -> str:
        """There is one file a run."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The configuration is saved with the run, not here."""

    @rank_zero_only
    def resume_at(self, step: int) -> None:
        """Keep the rows of steps up to `step`; 0 starts a new file."""
        self.columns, self.last_row = [], None
        if step == 0 or not self.path.is_file():
            self.path.unlink(missing_ok=True)
            return
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        rows = csv.reader(lines[1:])
        kept = [line for line, row in zip(lines[1:], rows, strict=True) if line.endswith("\n") and int(row[0]) <= step]
        self.columns = next(csv.reader(lines[:1]))
        temporary = self.path.with_suffix(".csv.unfinished")
        temporary.write_text(lines[0] + "".join(kept), encoding="utf-8")
        os.replace(temporary, self.path)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write the row of a step, or add validation figures to the row of the step just written."""
        if "train/loss" not in metrics:
            if self.last_row is not None and self.last_row["step"] == step:
                self.last_row |= metrics
                self._write(self.last_row, self.last_offset)
            return
        if not self.columns:
            self.columns = ["step", *metrics, *_VALIDATION_COLUMNS]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(",".join(self.columns) + "\n", encoding="utf-8")
        self.last_row = {"step": step} | metrics
        self.last_offset = self.path.stat().st_size
        self._write(self.last_row, self.last_offset)

    def _write(self, row: dict[str, Any], offset: int) -> None:
        line = io.StringIO()
        csv.DictWriter(line, self.columns, extrasaction="ignore", lineterminator="\n").writerow(
            {k: repr(v) if isinstance(v, float) else v for k, v in row.items()}
        )
        with open(self.path, "r+", encoding="utf-8") as file:
            file.seek(offset)
            file.write(line.getvalue())
            file.truncate()
