"""`trainer.profiler=torch`: a trace of a few steps."""

from pathlib import Path
from typing import Any

import lightning as L
from torch.profiler import ProfilerActivity, profile, schedule

from ...config.training import TRACED_UP_TO
from ...runtime.messages import warn

WAIT, WARM_UP = 2, 1  # steps without profiling, steps observed but not kept; those up to `TRACED_UP_TO` are kept
UNTRACED = WAIT + WARM_UP
_ROWS = 30


class StepProfiler(L.Callback):
    """Profiles the 4th to 6th step after a start with torch's profiler, on the tensor ranks of data rank 0.

    In `folder` each of them writes `rank_<r>.json`, a trace for https://ui.perfetto.dev or chrome://tracing, and
    `rank_<r>.txt`, the operations by their own time. The other data ranks do the same work on other samples.
    Profiled steps are slower. A resumed run that ends earlier writes the steps it has, or warns if it has none.

    Args:
        folder: created if missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._profile: profile | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the profiler."""
        if pl_module.parallel.dp_rank:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        on_gpu = pl_module.device.type == "cuda"
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
        by = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        name = self.folder / f"rank_{trainer.global_rank}"

        def write(found: profile) -> None:
            if found.step_num <= UNTRACED:
                return
            found.export_chrome_trace(f"{name}.json")
            Path(f"{name}.txt").write_text(found.key_averages().table(sort_by=by, row_limit=_ROWS), encoding="utf-8")

        steps = schedule(wait=WAIT, warmup=WARM_UP, active=TRACED_UP_TO - UNTRACED, repeat=1)
        self._profile = profile(activities=activities, schedule=steps, on_trace_ready=write)
        self._profile.start()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Advance the profiler by one step."""
        if self._profile is not None:
            self._profile.step()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the trace if the run ended early; warn if it has no step."""
        if self._profile is None:
            return
        self._profile.stop()
        steps = self._profile.step_num
        if steps <= UNTRACED and trainer.is_global_zero:
            warn(f"no step was traced: the first {UNTRACED} steps after a start are not; the run had {steps}")
