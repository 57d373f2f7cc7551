"""The checkpoint that a finetuning begins with: what it is, what it lacks, and whose tokenizer it needs."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint import TOKENIZER_FOLDER
from ..checkpoint.reshard import open_source
from ..config import TransformerConfig
from ..config.data import TokenizerConfig
from ..config.family import family_of
from ..config.finetune import FinetuneConfig
from ..data.tokenizer import Tokenizer, load_published_tokenizer
from .tasks import HeadKind, benchmark_of


@dataclass(frozen=True)
class StartingPoint:
    """A checkpoint fit for the run's task.

    Args:
        path: of the checkpoint.
        config: of its model, with the run's dropout.
        tokenizer_path: file or folder of its tokenizer.
        has_head: it was finetuned on this task before; its head is taken too.
    """

    path: str
    config: TransformerConfig
    tokenizer_path: str
    has_head: bool


def check_starting_point(run: FinetuneConfig) -> tuple[StartingPoint, Tokenizer]:
    """Look at the run's checkpoint and its tokenizer.

    Raises:
        ValueError: no checkpoint, a damaged one, one of a GPT; too few positions; no trained pooler where the task
            needs it, or a new one asked for where there is one; no tokenizer, or another than the checkpoint's; nothing
            to train and no head.
    """
    path, metadata, config = open_source(run.ckpt)
    task = run.task
    if not family_of(config.family).has_pooler:
        raise ValueError(f"`ckpt` must be of a BERT, but {path} is of a {config.family}")
    if task.max_seq_length > config.max_position_embeddings:
        raise ValueError(
            f"`task.max_seq_length` must be at most the {config.max_position_embeddings} positions of the checkpoint, "
            f"but is {task.max_seq_length}"
        )
    fresh = set(metadata.run.get("initialized", ()))
    has_pooler = "model/pooler.weight" in metadata.tensors and "pooler.weight" not in fresh
    needs_pooler = benchmark_of(task).head is not HeadKind.SPAN
    if needs_pooler and not (has_pooler or run.new_pooler or run.from_scratch):
        raise ValueError(
            f"`ckpt` must have a trained pooler for task {task.name}, but {path.name} has none; new_pooler=true draws "
            "one from the seed"
        )
    if run.new_pooler and has_pooler and not run.from_scratch:
        raise ValueError(
            f"`new_pooler` must be false where the checkpoint has a trained pooler, as {path.name}, but is true"
        )
    before = metadata.state.get("finetune", {}).get("task")
    has_head = before == task.name and not run.from_scratch
    if not has_head and run.trainer.num_epochs == 0:
        raise ValueError(
            f"`ckpt` must have been finetuned on {task.name} where `trainer.num_epochs` is 0, but {path.name} was "
            + (f"finetuned on {before}" if before else "not finetuned")
        )
    tokenizer_path, tokenizer = _find_tokenizer(run, path, config)
    dropout = {name: getattr(run, name) for name in ("hidden_dropout", "attention_dropout")}
    changes = {name: value for name, value in dropout.items() if value is not None}
    config = dataclasses.replace(config, **changes, attention=run.attention, recompute=run.recompute)
    return StartingPoint(str(path), config, tokenizer_path, has_head), tokenizer


def load_tokenizer(path: str | Path, family: str) -> Tokenizer:
    """A WordPiece with the special tokens that inputs need.

    Raises:
        ValueError: it cannot be read or lacks one.
    """
    tokenizer = load_published_tokenizer(TokenizerConfig(family_of(family).corpus.tokenizer, path=str(path)), family)
    for token in ("[CLS]", "[SEP]"):
        tokenizer.id_of(token)
    return tokenizer


def _find_tokenizer(run: FinetuneConfig, checkpoint: Path, config: TransformerConfig) -> tuple[str, Tokenizer]:
    beside = checkpoint.parent / TOKENIZER_FOLDER
    own = load_tokenizer(beside, config.family) if beside.is_dir() else None
    if run.tokenizer.path is None and own is None:
        raise ValueError(f"`tokenizer.path` must be given where the checkpoint has none beside it, in {beside}")
    chosen = own if run.tokenizer.path is None else load_tokenizer(run.tokenizer.path, config.family)
    path = run.tokenizer.path or str(beside)
    if own is not None and _rules(chosen) != _rules(own):
        raise ValueError(f"`tokenizer.path` must be the checkpoint's tokenizer, that of {beside}, but is {path}")
    if chosen.vocab_size != config.vocab_size:
        raise ValueError(
            f"the tokenizer must be the one the checkpoint was trained with, of {config.vocab_size} ids, "
            f"but {path} has {chosen.vocab_size}"
        )
    return path, chosen


def _rules(tokenizer: Tokenizer) -> tuple:
    """What decides a text's ids: the vocabulary, how letters are changed before, and where words end."""
    parts = json.loads(tokenizer.inner.to_str())
    return tokenizer.inner.get_vocab(), parts["normalizer"], parts["pre_tokenizer"]
