"""Finetuning on every rank: build model, data and Trainer, and fit."""

from functools import partial

from torch.distributed.elastic.multiprocessing.errors import record

from ..checkpoint import checkpoint_name
from ..results import CHECKPOINTS, METRICS
from ..runtime.exit_codes import DONE
from ..runtime.messages import print_error
from ..runtime.ranks import AgreedError
from ..training.device_memory import check_free_memory
from ..training.loggers import MetricsFile
from ..training.session import RankSession, new_trainer, run_on_this_rank
from .batches import ScoringBatches, TrainingSteps
from .callbacks import Scoring, StepReport, for_json
from .features import Features
from .module import FinetuneModule
from .preparing import FinetuneJob
from .run_folder import announce, prepare_folder, write_results


@record
def finetune(job: FinetuneJob) -> int:
    """Finetune and score on this rank; rank 0 writes scores, predictions and the record into the run folder.

    Returns:
        the exit code; see `runtime.exit_codes`. The same on all ranks.
    """
    features, options = job.training_features(), job.run.trainer
    steps_per_epoch = -(-len(features) // job.run.global_batch_size) if features is not None else 0
    num_steps = steps_per_epoch * options.num_epochs
    interval = steps_per_epoch if options.score_every_epoch else num_steps
    trainer = new_trainer(job.run, job.layout, job.accelerator, max_steps=num_steps, val_check_interval=interval or 1)
    return run_on_this_rank(job.run, trainer, partial(train, job, features, steps_per_epoch), stops_on_signal=False)


def train(job: FinetuneJob, features: Features | None, steps_per_epoch: int, session: RankSession) -> int:
    """Finetune and score in a locked run folder, with the process group started; returns the exit code.

    Raises:
        AgreedError: the weights and the optimizer do not fit into the free memory of a GPU; the run folder cannot be
            used or is not shared; or, after the record has been written, the checkpoint could not be.
    """
    trainer, strategy, folder, run = session.trainer, session.strategy, session.folder, job.run
    if job.on_gpu and features is not None:
        check_free_memory(job.state_bytes, strategy)
    strategy.ranks.agree(partial(prepare_folder, job, folder), first_rank_only=True)
    if run.trainer.save:
        strategy.ranks.check_shared(folder / CHECKPOINTS)
    model = FinetuneModule(run, job.start, trainer.max_steps, session.watchdog.mark)
    report = StepReport(job, steps_per_epoch, session)
    scoring = Scoring(job, steps_per_epoch, session)
    trainer.callbacks.extend([report, scoring])
    place = strategy.parallel.dp_rank, strategy.parallel.dp_size
    batches = ScoringBatches(scoring.sets, run.trainer.scoring_batch_size, *place)
    if session.is_first:
        announce(job, session, features, scoring.sets)
    if features is not None:
        sizes = run.global_batch_size, run.micro_batch_size, run.trainer.num_epochs
        training = TrainingSteps(features, *sizes, run.seed, run.trainer.pool_batches, *place)
        metrics = MetricsFile(folder / METRICS, validation=())  # scores are in scores.jsonl
        metrics.resume_at(0)
        trainer.loggers = [metrics]
        trainer.fit(model, training, batches)
    if session.ending.exit_code == DONE and scoring.scored_at != model.completed_steps:
        trainer.validate(model, batches, verbose=False)
    if session.ending.exit_code != DONE:
        if session.is_first:
            print_error(
                f"the training has diverged at step {model.completed_steps}: more steps in a row without a finite "
                f"gradient than trainer.max_skipped_steps ({run.trainer.max_skipped_steps}), or scores not finite"
            )
        return session.ending.exit_code
    problem = None
    if run.trainer.save and features is not None:
        session.watchdog.mark("saving")
        # The task, so that its head can be used again, and the scores with the threshold of SQuAD 2.0.
        state = {"finetune": {"task": run.task.name, "metrics": for_json(scoring.metrics)}}
        strategy.begin_save(folder / CHECKPOINTS / checkpoint_name(model.completed_steps), run.to_dict(), state)
        problem = strategy.finish_save()
    strategy.ranks.agree(partial(write_results, job, session, features, report, scoring), first_rank_only=True)
    if problem is not None:  # which must not discard the scores
        raise AgreedError(f"checkpoint of step {model.completed_steps} not saved: {problem}")
    return DONE
