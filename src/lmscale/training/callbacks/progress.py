"""The progress of a pretraining on the terminal: one line of text."""

import math
import shutil
import sys
import time
from typing import Any, TextIO

import lightning as L

from .step_report import StepReport


class ProgressLine(L.Callback):
    """Shows the last row of metrics in one line.

    A terminal gets one line, rewritten a few times per second, with as many fields as fit its columns: they are ordered
    by importance. A file or pipe gets a new line with all fields every `every_steps` steps.

    Args:
        every_steps: between lines in a file; also the first step with a row and the last have one.
    """

    def __init__(self, report: StepReport, every_steps: int = 100) -> None:
        self.report, self.every_steps = report, every_steps
        self.live = sys.stdout.isatty()
        self._is_shown = False
        self._streams = (sys.stdout, sys.stderr)
        self._first_step = self._last_step = 0
        self._began = self._shown_at = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count the time that is left from this start of the run."""
        self._first_step, self._last_step = pl_module.completed_steps, trainer.max_steps  # which a stop changes
        self._began = time.monotonic()
        if self.live and trainer.is_global_zero:
            self._streams = (sys.stdout, sys.stderr)
            sys.stdout, sys.stderr = (_OtherText(stream, self) for stream in self._streams)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Show a completed step on rank 0, if a line is due."""
        step = pl_module.completed_steps
        if not (trainer.is_global_zero and self.report.metrics):
            return
        if self.live:
            is_due = time.monotonic() - self._shown_at > 0.25
        else:
            is_due = not self._shown_at or step % self.every_steps == 0
        if is_due or step == self._last_step:
            self._show(step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End the line of a terminal, with the last step."""
        if self.live and trainer.is_global_zero:
            sys.stdout, sys.stderr = self._streams
            if self.report.metrics:
                self._show(pl_module.completed_steps)
                print(flush=True)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave the last step on the terminal; what is said of the error comes below it."""
        if self.live and trainer.is_global_zero:
            sys.stdout, sys.stderr = self._streams
            print(end="\n" if self._is_shown else "", flush=True)

    def erase(self) -> None:
        """Make place for other text; the next step shows the line again, below it."""
        if self._is_shown:
            print("\r\x1b[K", end="", file=self._streams[0], flush=True)
            self._is_shown = False

    def _show(self, step: int) -> None:
        seconds = (time.monotonic() - self._began) / max(1, step - self._first_step)
        seconds *= self._last_step - step
        parts = [f"step {step}/{self._last_step}", *fields(self.report, seconds)]
        if self.live:
            # A terminal wraps a line that fills its last column, and keeps the rest of a longer line before it.
            text = first_fields(parts, shutil.get_terminal_size().columns - 1)
            print(f"\r{text}\x1b[K", end="", file=self._streams[0], flush=True)
        else:
            print("  ".join(parts), flush=True)
        self._is_shown, self._shown_at = self.live, time.monotonic()


class _OtherText:
    """A stream of the terminal that erases the line of progress before it writes, for example a warning."""

    def __init__(self, stream: TextIO, progress: ProgressLine) -> None:
        self._stream, self._progress = stream, progress

    def write(self, text: str) -> int:
        self._progress.erase()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def fields(report: StepReport, seconds_left: float) -> list[str]:
    """The figures of the last row, by importance."""
    metrics = report.metrics
    found = [
        f"loss {metrics['train/loss']:.3f}",
        f"val {report.validation['val/loss']:.3f} (step {report.validated_at})" if report.validation else "",
        f"lr {metrics['lr']:.2e}",
        f"{metrics['tokens_per_s']:,.0f} tok/s",
        f"{_clock(seconds_left)} left",
        f"grad norm {metrics['grad_norm']:.2f}",
        f"{metrics['tflops_per_s_per_device']:.3g} TFLOP/s",
        f"MFU {metrics['mfu']:.1%}" if "mfu" in metrics else "",
        f"{metrics['memory_gib']:.2f} GiB",
        f"scale {metrics['loss_scale']:.3g}" if report.request.precision.dtype == "fp16" else "",
    ]
    return [field for field in found if field]


def first_fields(parts: list[str], columns: int) -> str:
    """The first of the parts that fit a line of so many columns."""
    line = parts[0]
    for part in parts[1:]:
        if len(line) + 2 + len(part) > columns:
            break
        line += f"  {part}"
    return line


def _clock(seconds: float) -> str:
    """`0:42`, `12:05` or `1:02:05`."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
