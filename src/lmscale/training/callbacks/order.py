"""Which callbacks a pretraining has, in the order in which they must act."""

from ...planner.flops import dense_peak_flops_per_s
from ..job import PretrainJob
from ..output.resuming import CHECKPOINTS
from ..runtime.run import Run
from .layer_statistics import LayerStatistics
from .profiling import StepProfiler
from .progress import ProgressLine
from .replica_sentinel import ReplicaSentinel
from .sample_digest import SampleDigest
from .saving import Checkpointing
from .step_report import StepReport


def add_callbacks(job: PretrainJob, running: Run) -> StepReport:
    """Give the Trainer its callbacks, in the order in which they must act; returns the one that reports the steps."""
    run, ending = job.run, running.ending
    peak = dense_peak_flops_per_s(job.device_name(), run.precision.dtype, run.trainer.matmul_precision)
    digest, report = SampleDigest(), StepReport(run, job.config, peak, running.watchdog, ending)
    callbacks = [digest]
    if run.trainer.check_replicas_every_steps:
        callbacks.append(ReplicaSentinel(run.trainer.check_replicas_every_steps, digest, ending))
    if run.trainer.profiler is not None:
        callbacks.append(StepProfiler(running.folder / "profile"))
    callbacks.append(report)
    if run.logger.layer_statistics:
        callbacks.append(LayerStatistics(run.logger.layer_statistics, running.folder))
    if run.trainer.progress_bar:
        callbacks.append(ProgressLine(report))
    folder = running.folder / CHECKPOINTS
    callbacks.append(Checkpointing(folder, run, running.interruption, ending, report, digest))
    running.trainer.callbacks.extend(callbacks)
    return report
