"""Which callbacks a pretraining has, in the order in which they must act."""

from ..agreement import Agreement
from ..checkpoints.saving import Checkpointing
from ..resolve import ResolvedRun
from ..session import RankSession
from .layer_statistics import LayerStatistics
from .profiling import StepProfiler
from .progress import ProgressLine
from .replica_sentinel import ReplicaSentinel
from .sample_digest import SampleDigest
from .step_report import StepReport


def add_callbacks(job: ResolvedRun, agreed: Agreement, session: RankSession) -> StepReport:
    """Give the Trainer its callbacks, in the order in which they must act; returns the one that reports the steps."""
    run, digest, report = job.run, SampleDigest(), StepReport(job, agreed, session)
    callbacks = [digest]
    if run.trainer.check_replicas_every_steps:
        callbacks.append(ReplicaSentinel(run.trainer.check_replicas_every_steps, digest, session.ending))
    if run.trainer.profiler is not None:
        callbacks.append(StepProfiler(session.folder / "profile"))
    callbacks.append(report)
    if run.logger.layer_statistics:
        callbacks.append(LayerStatistics(run.logger.layer_statistics, session.folder))
    if run.trainer.progress_bar:
        callbacks.append(ProgressLine(report))
    callbacks.append(Checkpointing(job, agreed, session, report, digest))
    session.trainer.callbacks.extend(callbacks)
    return report
