"""Finetuning: `prepare_job` checks a run once; `finetune`, on every rank, builds model, data and Trainer, and fits."""

import dataclasses
import sys
from functools import partial
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from ..config.finetune import FinetuneConfig
from ..data.prepare import cache_folder
from ..runtime.accelerator import check_products, resolve_accelerator, set_allocator
from ..runtime.exit_codes import DONE
from ..runtime.ranks import AgreedError
from ..runtime.run_lock import check_not_in_use, run_folder_errors
from ..runtime.world import is_first_rank, world_from_outside
from ..training.device_memory import check_free_memory
from ..training.fit import check_copies, choose_layout, finetuning_workload, state_bytes
from ..training.loggers import MetricsFile
from ..training.session import RankSession, new_trainer, run_on_this_rank
from .batches import ScoringBatches, TrainingSteps
from .features import Features, load_features
from .initial_checkpoint import check_initial_checkpoint
from .module import FinetuneModule
from .preparing import FinetuneJob, prepare_features
from .run_folder import announce, prepare_folder, write_results
from .scoring import metric_names
from .sources import check_places, check_unused


def prepare_job(run: FinetuneConfig) -> FinetuneJob:
    """Check a finetuning, cheap checks first: machine, checkpoint, files; then read and encode the data.

    Raises:
        ValueError: anything invalid, in one line.
    """
    accelerator, task = resolve_accelerator(run.trainer.accelerator), run.task
    if accelerator == "gpu":
        set_allocator()
        check_products(run.precision.dtype)
    with run_folder_errors(Path(run.run_dir)):
        check_unused(run)
        if is_first_rank():
            check_not_in_use(Path(run.run_dir))
    check_places(run)
    places = task.scored_sets()
    start, tokenizer = check_initial_checkpoint(run)
    workload, world = finetuning_workload(run, start.config, accelerator == "gpu"), world_from_outside()
    parallel = run.parallel
    if workload.on_gpu and world is None and parallel.dp_size == "auto":  # data ranks may have unequal shares of a step
        parallel = dataclasses.replace(parallel, dp_size=max(1, torch.cuda.device_count() // parallel.tp_size))
    layout, needed = choose_layout(parallel, workload, world)
    start.config.check_tensor_parallel(layout.tp_size, layout.pad_heads)
    if layout.zero1 and run.trainer.save:
        check_copies("parallel.zero1", workload, layout, needed, world)
    cache = cache_folder(run.cache_dir, "cache_dir") / "finetune"
    train = prepare_features(task, task.train, tokenizer, cache) if run.trainer.num_epochs else None
    sets = {name: prepare_features(task, place, tokenizer, cache) for name, place in places.items()}
    job = FinetuneJob(
        run=run,
        layout=layout,
        accelerator=accelerator,
        start=start,
        train=train,
        sets=sets,
    )
    must_have = {f"task.validation.{name}": load_features(sets[name]) for name in task.chosen_on()}
    must_have |= {"task.train": load_features(train)} if train is not None else {}
    for key, features in must_have.items():
        if not features.is_labelled:
            column = f", in the column `{task.columns['label']}`" if task.columns is not None else ""
            raise ValueError(f"`{key}` must have a label for every example{column}, but lacks labels")
    if task.name == "squad_v2" and not task.chosen_on() and task.null_threshold is None:
        raise ValueError("`task.null_threshold` must be given where `task.validation` has no set, but is null")
    if run.objective is not None:
        names = metric_names(task, job.scored_features(), task.chosen_on())
        if run.objective not in names:
            raise ValueError(f"`objective` must be one of {', '.join(names)}, but is {run.objective!r}")
    return job


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
    # The last scoring precedes the saving: the checkpoint has its scores, and the threshold of SQuAD 2.0.
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
        workload = finetuning_workload(run, job.start.config, on_gpu=True)
        check_free_memory(state_bytes(workload, job.layout), strategy)
    strategy.ranks.agree(partial(prepare_folder, job, folder), first_rank_only=True)
    if run.trainer.save:
        strategy.ranks.check_shared(folder / "checkpoints")
    model = FinetuneModule(run, job.start, job.scored_features(), steps_per_epoch, session)
    place = strategy.parallel.dp_rank, strategy.parallel.dp_size
    scoring = ScoringBatches(model.sets, run.trainer.scoring_batch_size, *place)
    if session.is_first:
        announce(job, model, features, strategy.parallel)
    if features is not None:
        sizes = run.global_batch_size, run.micro_batch_size, run.trainer.num_epochs
        training = TrainingSteps(features, *sizes, run.seed, run.trainer.pool_batches, *place)
        metrics = MetricsFile(folder / "metrics.csv", validation=())  # scores are in scores.jsonl
        metrics.resume_at(0)
        trainer.loggers = [metrics]
        trainer.fit(model, training, scoring)
    if session.ending.exit_code == DONE and model.scored_at != model.completed_steps:
        trainer.validate(model, scoring, verbose=False)
    if session.ending.exit_code != DONE:
        if session.is_first:
            print(
                f"error: the training has diverged at step {model.completed_steps}: more steps in a row without a "
                f"finite gradient than trainer.max_skipped_steps ({run.trainer.max_skipped_steps}), or scores not "
                "finite",
                file=sys.stderr,
                flush=True,
            )
        return session.ending.exit_code
    write = partial(write_results, job, model, features, session.num_threads)
    strategy.ranks.agree(write, first_rank_only=True)
    if model.save_problem is not None:
        raise AgreedError(f"checkpoint of step {model.completed_steps} not saved: {model.save_problem}")
    return DONE
