"""Which callbacks a pretraining has, in the order in which they must act."""

from ..checkpoints.saving import Checkpointing
from ..run import Run
from ..session import RankSession
from .layer_statistics import LayerStatistics
from .profiling import StepProfiler
from .progress import ProgressLine
from .replica_sentinel import ReplicaSentinel
from .sample_digest import SampleDigest
from .step_report import StepReport


def add_callbacks(run: Run, session: RankSession) -> StepReport:
    """Give the Trainer its callbacks, in the order in which they must act; returns the one that reports the steps."""
    request, digest, report = run.request, SampleDigest(), StepReport(run, session)
    callbacks = [digest]
    if request.trainer.check_replicas_every_steps:
        callbacks.append(ReplicaSentinel(request.trainer.check_replicas_every_steps, digest, session.ending))
    if request.trainer.profiler is not None:
        callbacks.append(StepProfiler(session.folder / "profile"))
    callbacks.append(report)
    if request.logger.layer_statistics:
        callbacks.append(LayerStatistics(request.logger.layer_statistics, session.folder))
    if request.trainer.progress_bar:
        callbacks.append(ProgressLine(report))
    callbacks.append(Checkpointing(run, session, report, digest))
    session.trainer.callbacks.extend(callbacks)
    return report
