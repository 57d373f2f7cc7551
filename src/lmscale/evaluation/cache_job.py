"""What a teacher predicts for the samples of a run to come, written to a cache: checks, then the work of a rank."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.distributed.elastic.multiprocessing.errors import record

from ..config import Layout
from ..config.checks import refuse, require
from ..config.family import load
from ..config.teacher import CacheConfig
from ..data.loading import Batch, References, as_tensors, cut_step, scored_rows
from ..data.prepare import PreparedCorpus, check_corpus, prepare_corpus
from ..data.sampler import RunSamples
from ..data.teacher_cache import TeacherCache, sample_facts
from ..parallel import ProjectedTargets
from ..runtime.accelerator import resolve_accelerator
from ..runtime.exit_codes import DONE
from ..runtime.run_lock import RunLock
from ..trained_model import check_saved_tokenizer, describe_checkpoint, load_model
from .loading import DTYPES
from .ranks import RankPlace, run_on_rank

PROGRESS_INTERVAL_S = 30.0


@dataclass(frozen=True)
class CacheJob:
    """The data sent to every rank.

    Args:
        facts: of the cache, but for the teacher's weights.
    """

    config: CacheConfig
    corpus: PreparedCorpus
    facts: dict[str, Any]


def prepare(config: CacheConfig) -> CacheJob:
    """Read the corpus, and check everything else that does not need the weights.

    Raises:
        ValueError: the teacher is missing, damaged, of a family whose loss takes none, or does not fit the ranks or the
            data; or there is no GPU.
    """
    resolve_accelerator(config.accelerator)
    model, folder = describe_checkpoint(config.ckpt)
    if not hasattr(load(model.traits.loss), "output_projection"):
        refuse("ckpt", "of a family whose loss takes a teacher", model.family)
    model.check_tensor_parallel(config.parallel.tp_size, config.parallel.pad_heads)
    data, most, longest = config.data, model.vocab_size, model.max_position_embeddings
    require(config, "top_k", f"at most the teacher's {most} ids", config.top_k <= most)
    require(config, "data.seq_length", f"at most the teacher's {longest} positions", data.seq_length <= longest)
    check_corpus(data, model.family)
    corpus = prepare_corpus(data, config.tokenizer, model.family, most)
    check_saved_tokenizer("ckpt", config.ckpt, folder, model, corpus.load_tokenizer())
    is_masked = model.traits.scored_share < 1
    facts = {
        "tokenizer": corpus.manifest["tokenizer"][:16],
        "data": corpus.content_hash,
        "shuffled_for_all": corpus.shuffles_documents and not is_masked,
        "num_samples": config.trainer.max_steps * config.global_batch_size,
        "temperature": config.temperature,
        "top_k": config.top_k,
        "precision": config.precision.dtype,
        "vocab_size": most,
        "rows": max(1, int(data.mask_probability * data.seq_length)) if is_masked else data.seq_length,
    }
    return CacheJob(config, corpus, sample_facts(config, model.family) | facts)


@record
def compute(job: CacheJob) -> int:
    """Compute this rank's parts; returns the exit code, see `run_on_rank`."""
    return run_on_rank(partial(_compute_alone, job), job.config.accelerator, Layout(**vars(job.config.parallel)))


def _compute_alone(job: CacheJob, place: RankPlace) -> int:
    lock = RunLock("output")
    try:
        place.ranks.agree(partial(lock.take, Path(job.config.output)), first_rank_only=True)
        return _compute(job, place)
    finally:
        lock.release()


def _compute(job: CacheJob, place: RankPlace) -> int:
    config, ranks, context = job.config, place.ranks, place.context
    loaded = load_model(config.ckpt, context, DTYPES[config.precision.dtype], place.device, ranks)
    begin = partial(TeacherCache.begin, Path(config.output), job.facts | {"ckpt": loaded.checkpoint_id})
    cache, missing = ranks.broadcast(ranks.agree(begin, first_rank_only=True))
    sizes = config.global_batch_size, config.trainer.max_steps
    samples = RunSamples(job.corpus, config.data, config.seed, *sizes, num_validation_samples=0)
    order, references, project = samples.sampler(), References(samples.train), load(loaded.model.config.traits.loss)

    def read(part: int) -> list[Batch]:
        numbers = cache.samples(part)
        found = references.__getitems__(order.references(numbers.start, numbers.stop))
        return cut_step(as_tensors(found), config.micro_batch_size)

    def predict(batch: Batch) -> np.ndarray:
        place.watchdog.mark("the teacher's predictions")
        used = scored_rows(batch["labels"], job.facts["rows"]).numpy()
        records = np.zeros(len(used), cache.record)
        batch = {name: x if x is None else x.to(place.device) for name, x in batch.items()}
        projection = project.output_projection(loaded.model, batch)
        targets = ProjectedTargets(config.temperature, 1.0, *projection, job.facts["vocab_size"])
        for name, values in zip(("log_p", "ids"), targets.most_probable(config.top_k, context), strict=True):
            records[name][used] = values.cpu().numpy()
        return records

    if ranks.is_first:
        num_bytes = sum(len(cache.samples(part)) for part in missing) * cache.record.itemsize
        print(f"{config.output}: {len(missing)} parts to write, {num_bytes / 2**30:.3g} GiB", flush=True)
    started = said = time.monotonic()
    for first in range(0, len(missing), context.dp_size):
        mine = missing[first + context.dp_rank :][:1]
        steps = ranks.agree(lambda mine=mine: [(part, read(part)) for part in mine])
        made = [(part, np.concatenate([predict(batch) for batch in step])) for part, step in steps]
        ranks.agree(lambda made=made: [cache.write(*each) for each in made if context.tp_rank == 0])
        done, now = min(first + context.dp_size, len(missing)), time.monotonic()
        if ranks.is_first and now > said + PROGRESS_INTERVAL_S:
            left, said = (now - started) / done * (len(missing) - done), now
            print(f"{done} of {len(missing)} parts are written, {left / 60:.1f} min left", flush=True)
    if ranks.is_first:
        print(f"complete; a run reads it with teacher.cache={config.output} teacher.temperature={config.temperature:g}")
    return DONE
