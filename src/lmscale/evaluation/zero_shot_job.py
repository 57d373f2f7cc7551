"""One zero-shot evaluation, from its configuration to its record: checks before the ranks start, and work per rank."""

import json
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from ..config import TransformerConfig
from ..config.family import load
from ..config.zero_shot import TASKS, ZeroShotConfig
from ..results import RECORD, check_no_record, new_record, write_record
from ..runtime.exit_codes import DONE
from ..trained_model import LoadedModel, load_model
from .loading import DTYPES, check_model, load_requested_tokenizer
from .ranks import RankPlace, run_on_rank
from .task import Metrics, Task

ANSWERS = "answers.jsonl"
PROGRESS_INTERVAL_S = 30.0


@dataclass(frozen=True)
class ZeroShotJob:
    """The data sent to every rank; all files have been read.

    Args:
        model: of the checkpoint; None if items are counted without one.
    """

    config: ZeroShotConfig
    task: Task
    tokenizer: dict[str, Any]
    model: TransformerConfig | None


def prepare(config: ZeroShotConfig) -> ZeroShotJob:
    """Read the task, and check everything else that does not need the weights.

    Raises:
        ValueError: the run folder has a record and the items are to be scored; see `check_model`; there is no
            tokenizer; or the file cannot be scored, or not by this model.
    """
    task_class, model = load(TASKS[config.task.name][1]), None
    if not config.count_only:
        check_no_record(config.run_dir)
    if config.ckpt is not None:
        model, tokenizer = check_model(config, task_class.needs_causal, checks_ranks=not config.count_only)
    else:
        tokenizer = load_requested_tokenizer(config.tokenizer)
        if tokenizer is None:
            raise ValueError("`tokenizer` must be given (tokenizer=gpt2 tokenizer.path=FOLDER) if `ckpt` is not")
    task = task_class.read(config.task, tokenizer)
    if model is not None:
        task = task.for_model(model)
    about = {"sha256": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}
    return ZeroShotJob(config, task, about, model)


@record
def evaluate(job: ZeroShotJob) -> int:
    """Evaluate on this rank; rank 0 writes. Returns the exit code; see `run_on_rank`."""
    return run_on_rank(partial(_evaluate, job), job.config.accelerator, job.config.parallel)


def _evaluate(job: ZeroShotJob, place: RankPlace) -> int:
    started, began = time.time(), time.monotonic()
    ranks, device = place.ranks, place.device
    config, task = job.config, job.task
    loaded = load_model(config.ckpt, place.context, DTYPES[config.precision.dtype], device, ranks)
    if ranks.is_first:
        counts = ", ".join(f"{name} = {number}" for name, number in task.counts.items())
        print(f"checkpoint {loaded.path}: {loaded.checkpoint_id}, step {loaded.step}")
        print(f"tokenizer {job.tokenizer['sha256'][:16]}, {job.tokenizer['vocab_size']} ids")
        print(f"{config.task.name}, {task.file_name} ({task.split}): {counts}", flush=True)
    scores = task.score(loaded.model, config.micro_batch_tokens, _Progress(config.task.name, place))
    metrics = task.metrics(scores) | {"evaluation_time": (time.monotonic() - began, "s")}
    if ranks.is_first:
        for name, (value, unit) in metrics.items():
            print(f"{name} = {value:.10g} {unit}")
    write = partial(_write, job, loaded, metrics, task.answers(scores), device, started)
    ranks.agree(write, first_rank_only=True)
    return DONE


def _write(
    job: ZeroShotJob, loaded: LoadedModel, metrics: Metrics, answers: list[Any], device: torch.device, started: float
) -> None:
    """Write the record, and one line of JSON per answer, in file order."""
    folder, task = Path(job.config.run_dir), job.task
    kind, paper_size = task.record_kind(loaded.model.config, loaded.step)
    about = {
        "zero_shot": job.config.to_dict(),
        "model": loaded.model.config.to_dict(),
        "paper_size": paper_size,
        "checkpoint": {"path": str(loaded.path), "id": loaded.checkpoint_id, "step": loaded.step},
        "tokenizer": job.tokenizer,
        "file": {"name": task.file_name, "sha256": task.file_sha256, "split": task.split},
        "detokenizer": task.detokenizer,
    }
    layout = asdict(job.config.parallel) | {"threads_per_rank": torch.get_num_threads()}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    metrics = {name: {"value": value, "unit": unit} for name, (value, unit) in metrics.items()}
    result = new_record(
        f"zero_shot_{job.config.task.name}", kind, about, None, metrics, device=name, layout=layout, started=started
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if answers:
            lines = "".join(json.dumps(asdict(answer)) + "\n" for answer in answers)
            (folder / ANSWERS).write_text(lines, encoding="utf-8")
        write_record(result, folder / RECORD)
    except OSError as error:
        raise ValueError(f"`hydra.run.dir` must be a folder that can be written, but {error}") from None
    print(f"record: {folder / RECORD}")


class _Progress:
    """Mark the watchdog and, from time to time, report rank 0's progress on standard error; the others have as much."""

    def __init__(self, name: str, place: RankPlace) -> None:
        self.name, self.place = name, place
        self.done, self.last = 0, time.monotonic()

    def __call__(self, number: int) -> None:
        self.done += number
        self.place.watchdog.mark(f"{self.name}, after {self.done} of this rank")
        if self.place.ranks.is_first and time.monotonic() - self.last > PROGRESS_INTERVAL_S:
            self.last = time.monotonic()
            print(f"{self.name}: about {self.done * self.place.context.dp_size} done", file=sys.stderr, flush=True)
