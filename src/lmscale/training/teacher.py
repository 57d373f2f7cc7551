"""The teacher of a run: checked before the ranks start, loaded on each of them, and asked in every training step."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import METADATA, Checkpoint, find_given, model_differences
from ..config import TransformerConfig
from ..config.checks import list_some, refuse
from ..config.family import load
from ..config.from_dict import keys_of
from ..config.pretrain import RunConfig
from ..config.teacher import TeacherConfig
from ..data.prepare import PreparedCorpus
from ..data.teacher_cache import TeacherCache, sample_facts
from ..parallel import CachedTargets, ProjectedTargets, SoftTargets
from ..trained_model import LoadedModel, check_saved_tokenizer, describe_checkpoint, load_model
from .run import Run
from .session import RankSession
from .step.training_module import DTYPES

TERM = "teacher"  # the name of the divergence among the loss terms
_LAYER = re.compile(r"transformer\.layers\.(\d+)\.(.*)")


class Teacher:
    """What a training step asks of a teacher.

    Args:
        settings: temperature, weight and the layers that the model starts with.
        model: in evaluation mode and without gradients, of the same family, on the same ranks and with the same padded
            vocabulary; None: micro-batches have cached log-probabilities.
        vocab_size: ids that `model` predicts.
    """

    def __init__(self, settings: TeacherConfig, model: nn.Module | None = None, vocab_size: int = 0) -> None:
        self.settings, self.model, self.vocab_size = settings, model, vocab_size

    def targets(self, micro_batch: dict[str, Any]) -> SoftTargets:
        """The teacher's distribution for the scored positions; communicates as the model's forward pass."""
        mix = self.settings.temperature, self.settings.weight
        if self.settings.cache is not None:
            return CachedTargets(*mix, micro_batch["teacher_log_p"], micro_batch["teacher_ids"])
        project = load(self.model.config.traits.loss).output_projection
        with torch.no_grad():
            return ProjectedTargets(*mix, *project(self.model, micro_batch), self.vocab_size)

    def mix(self, terms: Sequence[Any] | Tensor) -> Any:
        """The loss of terms of which the first is that of the labels and the last the divergence."""
        weight = self.settings.weight
        return (1 - weight) * terms[0] + sum(terms[1:-1]) + weight * terms[-1]

    def initialize(self, model: nn.Module) -> None:
        """Copy the chosen layers, and all that is not in layers, into a new model."""
        if self.settings.layers is None:
            return
        theirs = dict(self.model.named_parameters())
        layers = self.settings.source_layers(model.config.num_layers, self.model.config.num_layers)
        for name, param in model.named_parameters():
            found = _LAYER.fullmatch(name)
            source = name if found is None else f"transformer.layers.{layers[int(found[1])]}.{found[2]}"
            param.detach().copy_(theirs[source])
        if self.settings.cache is not None:
            self.model = None


@dataclass(frozen=True)
class CheckedTeacher:
    """A teacher that fits its run, before it is loaded; picklable.

    Args:
        config: of the model in `settings.path`; None without one.
        folder: of its tokenizer.
        origin: 16 digits that tell teachers apart, wherever and at whatever layout they are stored; those of the cache,
            if there is one.
        cache: what predicts in place of the model.
    """

    settings: TeacherConfig
    config: TransformerConfig | None
    folder: Path
    origin: str
    cache: TeacherCache | None = None

    @property
    def workload(self) -> dict[str, Any]:
        """The fields of a `Workload` with this teacher."""
        return {"teacher": self.config} if self.cache is None else {"top_k": self.cache.facts["top_k"]}

    @property
    def identity(self) -> dict[str, Any]:
        """What a run that goes on must have in common with the one before."""
        settings = self.settings
        return {"origin": self.origin, "temperature": settings.temperature, "weight": settings.weight}

    def check_corpus(self, corpus: PreparedCorpus, model: TransformerConfig) -> None:
        """Refuse a teacher with another vocabulary than the run's, and the cache of another corpus.

        Raises:
            ValueError: its tokenizer is missing or differs; the corpus of the cache differs, or `model` has fewer ids.
        """
        if self.cache is not None:
            self.cache.check({"tokenizer": corpus.manifest["tokenizer"][:16], "data": corpus.content_hash})
            fewest = self.cache.facts["vocab_size"]
            if model.vocab_size < fewest:
                refuse("model.vocab_size", f"at least {fewest}, the ids of `teacher.cache`", model.vocab_size)
        if self.config is not None:
            place = self.settings.path, self.folder, self.config
            check_saved_tokenizer("teacher.path", *place, corpus.load_tokenizer())

    def load(self, run: Run, session: RankSession) -> Teacher:
        """The teacher on this rank; communicates as `load_model`."""
        if self.config is None or (self.cache is not None and run.start.checkpoint is not None):
            return Teacher(self.settings)
        session.watchdog.mark("the loading of the teacher")
        shared = {name: getattr(run.model, name) for name in ("vocab_size", "vocab_multiple", "attention")}
        place = session.strategy.parallel, DTYPES[run.request.precision.dtype], session.strategy.root_device
        loaded = load_model(
            self.settings.path,
            *place,
            session.strategy.ranks,
            adapt=lambda config: replace(config, recompute="none", **shared),
            kernels=replace(run.kernels, float8=False, cuda_graphs=False),
        )
        session.strategy.ranks.agree(partial(_check_finite, loaded))
        return Teacher(self.settings, loaded.model, min(self.config.vocab_size, run.model.vocab_size))


def check_teacher(run: RunConfig) -> CheckedTeacher:
    """Check all of a teacher that needs no corpus.

    Raises:
        ValueError: it is missing, damaged, finetuned, of another family or has too few positions; `teacher.layers` are
            of a model of other sizes; or the cache does not fit the run.
    """
    settings, path = run.teacher, run.teacher.path
    cache = None if settings.cache is None else _open_cache(run)
    if path is None:
        return CheckedTeacher(settings, None, Path(), cache.origin, cache)
    config, folder = describe_checkpoint(path, "teacher.path")
    if config.family != run.model.family:
        refuse("teacher.path", f"of the model's family ({run.model.family})", config.family)
    if not hasattr(load(config.traits.loss), "output_projection"):
        raise ValueError(f"`teacher.path` must be null for the family {config.family}, whose loss takes no teacher")
    if config.max_position_embeddings < run.data.seq_length:
        rule = f"at most the {config.max_position_embeddings} positions of the teacher"
        refuse("data.seq_length", rule, run.data.seq_length)
    if settings.layers is not None:
        student = run.model.resolve(config.vocab_size)
        with keys_of(TeacherConfig, "teacher."):
            settings.source_layers(student.num_layers, config.num_layers)
        differences = model_differences(student, config, {"num_layers", "vocab_multiple"})
        if differences:
            raise ValueError(
                f"`teacher.layers` must be null where more than the depth differs: {'; '.join(differences)}"
            )
    return CheckedTeacher(settings, config, folder, _origin(path, config) if cache is None else cache.origin, cache)


def _check_finite(loaded: LoadedModel) -> None:
    """Refuse a teacher that has diverged, before its first loss looks like that of the student."""
    for name, param in loaded.model.named_parameters():
        if not param.isfinite().all():
            raise ValueError(f"`teacher.path` must have finite weights, but {name} in {loaded.path} has others")


def _open_cache(run: RunConfig) -> TeacherCache:
    """The cache of a run, complete and of its samples; a sample does not depend on the batch that it is in."""
    cache, size = TeacherCache.open(run.teacher.cache), run.global_batch_size
    with keys_of(TeacherConfig, "teacher."):
        cache.check(sample_facts(run, run.model.family) | {"temperature": run.teacher.temperature})
    there, is_exact, needed = cache.facts["num_samples"], cache.facts["shuffled_for_all"], run.trainer.max_steps * size
    if needed > there or (is_exact and needed < there):
        rule = f"{'' if is_exact else 'at most '}{there // size}, as `teacher.cache` has {there:,} samples"
        refuse("trainer.max_steps", rule + ", shuffled for that number" * is_exact, run.trainer.max_steps)
    if missing := [cache.path(part).name for part in cache.missing()]:
        where = f"in {cache.folder} parts are missing or cut short: {list_some(missing)}"
        raise ValueError(f"`teacher.cache` must be complete, but {where}; the command that began it writes them")
    return cache


def _origin(path: str, config: TransformerConfig) -> str:
    """A hash of the model's configuration and of weights: of ours those that no rank cuts, of others the files."""
    found = find_given("teacher.path", path)
    if (found / METADATA).is_file():
        tensors = Checkpoint.open(found).metadata.tensors.items()
        sums = {key: [piece.checksum for piece in each.pieces] for key, each in tensors if each.shard_dim is None}
        sums = {key: value for key, value in sums.items() if key.startswith("model/")}
    else:
        files = sorted(file for file in found.iterdir() if file.suffix in (".safetensors", ".bin"))
        sums = {file.name: hashlib.file_digest(file.open("rb"), "sha256").hexdigest() for file in files}
    text = json.dumps([config.to_dict() | {"vocab_multiple": None}, sums], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
