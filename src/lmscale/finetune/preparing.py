"""A checked finetuning job, and its data: each file is encoded once and cached under a hash of what it depends on."""

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import tokenizers

from ..config import Layout
from ..config.finetune import FinetuneConfig, TaskConfig
from ..data.prepare import note_unknown
from ..data.tokenizer import Tokenizer
from ..shared_files import build_folder
from .features import Features, load_features, save_features
from .initial_checkpoint import InitialCheckpoint
from .sources import fingerprint
from .tasks import benchmark_of, read_examples

FEATURES_VERSION = 6  # incremented when the same rows give other features or notes
_SETTINGS = ("name", "max_seq_length", "max_qa_length", "doc_stride", "max_query_length", "columns", "labels")


@dataclass(frozen=True, kw_only=True)
class FinetuneJob:
    """A finetuning that has passed every check; its data stay in the cache until a rank loads them."""

    run: FinetuneConfig
    layout: Layout
    accelerator: Literal["cpu", "gpu"]
    start: InitialCheckpoint
    train: Path | None
    sets: dict[str, Path]
    files: dict[str, str] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether the ranks compute on GPUs."""
        return self.accelerator == "gpu"

    def training_features(self) -> Features | None:
        """The training set; None if nothing is trained."""
        if self.train is None:
            return None
        return _load(self.train, self.run.task.train).first(self.run.trainer.max_train_examples)

    def scored_features(self) -> dict[str, Features]:
        """The sets to score, by name."""
        return {name: _load(self.sets[name], place) for name, place in self.run.task.scored_sets().items()}


def _load(folder: Path, place: str) -> Features:
    """Load a set, whose notes get the place of this run: the cache may have encoded the same rows from another."""
    features = load_features(folder)
    return replace(features, notes=[f"{place}: {note}" for note in features.notes])


def prepare_features(task: TaskConfig, place: str, tokenizer: Tokenizer, cache_dir: Path) -> Path:
    """Read and encode the rows at `place`, unless they are cached.

    Returns:
        folder for `load_features`.

    Raises:
        ValueError: the rows cannot be used; see `read_examples`. What the cache has is damaged.
    """
    settings = [getattr(task, name) for name in _SETTINGS]
    facts = (FEATURES_VERSION, tokenizers.__version__, tokenizer.fingerprint, settings, fingerprint(task, place))
    folder = cache_dir / f"{task.name}_{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}"
    if folder.is_dir():
        try:
            load_features(folder)
        except (FileNotFoundError, EOFError, ValueError, TypeError):  # of torn files
            raise ValueError(f"{folder} is damaged; remove it to have it built again") from None
        return folder
    try:
        examples, report = read_examples(task, place)
    except ValueError as error:
        key = "train" if place == task.train else "validation" if place in task.validation.values() else "test"
        raise ValueError(f"`task.{key}`: {error}") from None
    features = benchmark_of(task).encode(task, examples, tokenizer)
    num_unknown = tokenizer.count_unknown(features.tokens)
    features = replace(features, notes=report.notes() + note_unknown(num_unknown, len(features.tokens), None))
    try:
        with build_folder(folder) as building:
            save_features(features, building)
    except OSError as error:
        raise ValueError(f"`cache_dir` must be a writable folder with free space, but {cache_dir}: {error}") from None
    return folder
