"""One zero-shot evaluation, from its configuration to its record: checks before the ranks start, and work per rank."""

import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from ..config.zero_shot import ZeroShotConfig
from ..results import check_no_record, new_record, write_record
from .cloze import Answer, predict_last_words
from .lambada import stop_word_ids
from .loading import DTYPES, LoadedModel, check_gpt, load_model, load_requested_tokenizer
from .perplexity import measure_losses, perplexity
from .ranks import RankPlace, run_on_rank
from .zero_shot_task import Lambada, WikiText103, read_task, record_kind

RECORD, ANSWERS = "record.json", "answers.jsonl"
PROGRESS_INTERVAL_S = 30.0
Metrics = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class ZeroShotJob:
    """The data sent to every rank; all files have been read.

    Args:
        banned: ids excluded as the first token of an answer; empty without the stop-word filter.
    """

    config: ZeroShotConfig
    task: WikiText103 | Lambada
    tokenizer: dict[str, Any]
    banned: list[int]


def prepare(config: ZeroShotConfig) -> ZeroShotJob:
    """Check everything that does not need the weights.

    Raises:
        ValueError: the run folder has a record; see `check_gpt`; the file cannot be scored; or windows are longer than
            the model's positions.
    """
    check_no_record(config.run_dir)
    model, tokenizer = check_gpt(config)
    task = read_task(config.task, tokenizer).fit(model.max_position_embeddings, config.task)
    banned = stop_word_ids(tokenizer) if isinstance(task, Lambada) and config.task.stop_word_filter else []
    about = {"sha256": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}
    return ZeroShotJob(config, task, about, banned)


def count(config: ZeroShotConfig) -> dict[str, int]:
    """Return the counts of what would be scored; of a checkpoint only sizes and tokenizer are read.

    Raises:
        ValueError: there is no tokenizer, the file cannot be scored, or the checkpoint could not score it.
    """
    if config.ckpt is not None:
        model, tokenizer = check_gpt(config, checks_ranks=False)
        return read_task(config.task, tokenizer).fit(model.max_position_embeddings, config.task).counts
    tokenizer = load_requested_tokenizer(config.tokenizer)
    if tokenizer is None:
        raise ValueError("`tokenizer` must be given (tokenizer=gpt2 tokenizer.path=FOLDER) if `ckpt` is not")
    return read_task(config.task, tokenizer).counts


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
    on_batch = _Progress(config.task.name, place)
    answers = []
    if isinstance(task, Lambada):
        answers = predict_last_words(loaded.model, task.passages, config.micro_batch_tokens, job.banned, on_batch)
        metrics = _lambada_metrics(task, answers, with_filter=config.task.stop_word_filter)
    else:
        losses = measure_losses(loaded.model, task.tokens, task.windows, config.micro_batch_tokens, on_batch)
        metrics = _wikitext_metrics(task, losses.tolist())
    if ranks.is_first:
        metrics["evaluation_time"] = {"value": time.monotonic() - began, "unit": "s"}
        for name, entry in metrics.items():
            print(f"{name} = {entry['value']:.10g} {entry['unit']}")
        _write(job, loaded, metrics, answers, device, started)
    return 0


def _wikitext_metrics(task: WikiText103, losses: list[float]) -> Metrics:
    loss_sum, num_targets = math.fsum(losses), task.windows.num_targets
    return {
        "wikitext103/perplexity": {"value": perplexity(loss_sum, task.num_words), "unit": "exp(loss / T_o)"},
        "wikitext103/perplexity_megatron": {
            "value": perplexity(loss_sum, task.num_words - 1),
            "unit": "exp(loss / (T_o - 1))",
        },
        "wikitext103/perplexity_token": {"value": perplexity(loss_sum, num_targets), "unit": "exp(loss / T)"},
        "wikitext103/loss": {"value": loss_sum / num_targets, "unit": "nats/token"},
    } | {f"wikitext103/{name}": {"value": number, "unit": "count"} for name, number in task.counts.items()}


def _lambada_metrics(task: Lambada, answers: list[Answer], with_filter: bool) -> Metrics:
    name, number = f"lambada_{task.form}", len(answers)
    shares = {
        "accuracy_last_word": sum(answer.right for answer in answers),
        "accuracy_last_token": sum(answer.last_token_right for answer in answers),
    }
    if with_filter:
        shares["accuracy_last_word_no_stop_words"] = sum(answer.right_filtered for answer in answers)
    loss_sum = -sum(answer.log_likelihood for answer in answers)
    return (
        {f"{name}/{share}": {"value": 100 * right / number, "unit": "%"} for share, right in shares.items()}
        | {f"{name}/perplexity_last_word": {"value": perplexity(loss_sum, number), "unit": "exp(nats/word)"}}
        | {f"{name}/right": {"value": shares["accuracy_last_word"], "unit": "count"}}
        | {f"{name}/{key}": {"value": value, "unit": "count"} for key, value in task.counts.items()}
    )


def _write(
    job: ZeroShotJob, loaded: LoadedModel, metrics: Metrics, answers: list[Answer], device: torch.device, started: float
) -> None:
    """Write the record, and for LAMBADA one line of JSON per answer, in file order."""
    folder, task = Path(job.config.run_dir), job.task
    kind, paper_size = record_kind(task, loaded.model.config, loaded.step)
    about = {
        "zero_shot": job.config.to_dict(),
        "model": loaded.model.config.to_dict(),
        "paper_size": paper_size,
        "checkpoint": {"path": str(loaded.path), "id": loaded.checkpoint_id, "step": loaded.step},
        "tokenizer": job.tokenizer,
        "file": {"name": task.file_name, "sha256": task.file_sha256, "split": task.split},
        "detokenizer": "megatron_v1" if isinstance(task, WikiText103) else "none",
    }
    layout = asdict(job.config.parallel) | {"threads_per_rank": torch.get_num_threads()}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
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
