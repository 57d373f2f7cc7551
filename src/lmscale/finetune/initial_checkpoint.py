"""The initial checkpoint of a finetuning: check that it fits the task, and find its tokenizer."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from ..config import TransformerConfig
from ..config.finetune import FinetuneConfig
from ..data.tokenizer import Tokenizer, choose_tokenizer, load_tokenizer_at
from .tasks import HeadKind, benchmark_of
from .tasks.benchmark import Benchmark


@dataclass(frozen=True)
class InitialCheckpoint:
    """A checkpoint that fits the run's task.

    Args:
        path: path of the checkpoint.
        config: its model's configuration with the run's dropout, attention and recompute settings.
        tokenizer: its tokenizer, as the text of a tokenizer.json.
        has_head: whether it was finetuned on this task, so that its head is loaded as well.
        head_order: of an imported head: its row of each class; None: the rows are in the task's order.
    """

    path: str
    config: TransformerConfig
    tokenizer: str
    has_head: bool
    head_order: list[int] | None = None


def check_initial_checkpoint(run: FinetuneConfig) -> tuple[InitialCheckpoint, Tokenizer]:
    """Check the run's checkpoint and its tokenizer.

    Raises:
        ValueError: the checkpoint is missing, damaged or of a GPT; it has too few positions; the task needs a trained
            pooler and there is none, or a new one is requested although there is one; the tokenizer is missing or not
            the checkpoint's; its head is of this task's name with other labels; or there is nothing to train and no
            head.
    """
    from ..checkpoint import TOKENIZER_FOLDER, Checkpoint, find_given  # imports torch, which takes seconds

    checkpoint = Checkpoint.open(find_given("ckpt", run.ckpt, "a checkpoint or a run folder"))
    checkpoint.check_intact()
    path, metadata, config = checkpoint.path, checkpoint.metadata, checkpoint.model_config(needs_heads=False)
    task = run.task
    if not config.traits.has_pooler:
        raise ValueError(
            f"`ckpt` must be of a BERT, but {path} is of a {config.family}; src/generate.py and src/zero_shot.py take "
            "that of a GPT"
        )
    positions = config.max_position_embeddings
    if task.max_seq_length > positions:
        inside = (task.max_query_length or 0) + (task.doc_stride or 0)  # of SQuAD's windows
        too_long = f"`task.max_query_length` + `task.doc_stride` at most {positions - 3}, but is {inside}"
        raise ValueError(
            f"`task.max_seq_length` must be at most the {positions} positions of the checkpoint, "
            f"but is {task.max_seq_length}" + (f", and {too_long}" if inside > positions - 3 else "")
        )
    fresh = set(metadata.run.get("initialized", ()))
    has_pooler = "model/pooler.weight" in metadata.tensors and "pooler.weight" not in fresh
    benchmark = benchmark_of(task)
    if benchmark.head is not HeadKind.SPAN and not (has_pooler or run.new_pooler or run.from_scratch):
        raise ValueError(
            f"`ckpt` must have a trained pooler for task {task.name}, but {path.name} has none; new_pooler=true draws "
            "one from the seed"
        )
    if run.new_pooler and has_pooler and not run.from_scratch:
        raise ValueError(
            f"`new_pooler` must be false if the checkpoint has a trained pooler, as {path.name}, but is true"
        )
    finetuned, order = metadata.state.get("finetune", {}), None
    before = finetuned.get("task")
    has_head = before == task.name and not run.from_scratch
    if "kind" in finetuned:  # imported, with classes but without a task's name
        has_head, before, order = _compare_head(benchmark, run.from_scratch, **finetuned)
    elif has_head:
        saved = metadata.run.get("task", {})
        for name in ("labels", "value_range") if saved.get("columns") is not None else ():
            there, here = saved.get(name), getattr(task, name)
            if there != here:
                raise ValueError(
                    f"`task.{name}` must be {there}, with which {path.name} was finetuned on {task.name}, but is {here}"
                )
    if not has_head and run.trainer.num_epochs == 0:
        raise ValueError(
            f"`ckpt` must have been finetuned on {task.name} if `trainer.num_epochs` is 0, but {path.name} was "
            + (f"finetuned on {before}" if before else "not finetuned")
        )
    tokenizer = _find_tokenizer(run, path, path.parent / TOKENIZER_FOLDER, config)
    dropout = {name: getattr(run, name) for name in ("hidden_dropout", "attention_dropout")}
    changes = {name: value for name, value in dropout.items() if value is not None}
    config = dataclasses.replace(config, **changes, attention=run.attention, recompute=run.recompute)
    return InitialCheckpoint(str(path), config, tokenizer.inner.to_str(), has_head, order), tokenizer


def _compare_head(
    benchmark: Benchmark, from_scratch: bool, kind: str, classes: list[str]
) -> tuple[bool, str, list[int] | None]:
    """Whether an imported head is one of the task, what it is, and its row of each of the task's classes."""
    if benchmark.head is not HeadKind.CLASSIFICATION or kind != benchmark.head:
        return kind == benchmark.head and not from_scratch, kind, None
    theirs, ours = (", ".join(names) for names in (classes, benchmark.classes))
    text = f"the classes {theirs}, not {ours} (`id2label` of its config.json names them for a new import)"
    if sorted(classes) != sorted(benchmark.classes) or from_scratch:
        return False, text, None
    return True, text, [classes.index(name) for name in benchmark.classes]


def _find_tokenizer(run: FinetuneConfig, checkpoint: Path, beside: Path, config: TransformerConfig) -> Tokenizer:
    path = run.tokenizer.path
    saved = load_tokenizer_at(beside, config.family) if beside.is_dir() else None
    if path is None and saved is None:
        raise ValueError(f"`tokenizer.path` must be given if the checkpoint has none in {beside}")
    requested = load_tokenizer_at(path, config.family) if path is not None else None
    return choose_tokenizer(requested, saved, config, str(checkpoint))
