"""`trainer.profiler=torch`: where the time of a few steps goes."""

from pathlib import Path
from typing import Any

import lightning as L
from torch.profiler import ProfilerActivity, profile, schedule

WAIT, WARM_UP, ACTIVE = 2, 1, 3  # steps left alone, observed but not kept, kept
_ROWS = 30


class StepProfiler(L.Callback):
    """Observes steps 4 to 6 of a run with torch's profiler.

    In `folder` every rank leaves `rank_<r>.json`, a trace for https://ui.perfetto.dev or chrome://tracing, and
    `rank_<r>.txt`, the operations by the time they take themselves. Observed steps are slower.

    Args:
        folder: made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._profile: profile | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to count steps."""
        self.folder.mkdir(parents=True, exist_ok=True)
        on_gpu = pl_module.device.type == "cuda"
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
        by = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        name = self.folder / f"rank_{trainer.global_rank}"

        def write(found: profile) -> None:
            found.export_chrome_trace(f"{name}.json")
            Path(f"{name}.txt").write_text(found.key_averages().table(sort_by=by, row_limit=_ROWS), encoding="utf-8")

        steps = schedule(wait=WAIT, warmup=WARM_UP, active=ACTIVE, repeat=1)
        self._profile = profile(activities=activities, schedule=steps, on_trace_ready=write)
        self._profile.start()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """One more step is done."""
        self._profile.step()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write what there is, where the run was shorter."""
        self._profile.stop()
