"""Distillation: `teacher.*` of a run."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from .checks import Accelerator, Checked, Count, PathText, Positive, Rule, Seed, check, require
from .data import DataConfig, TokenizerConfig
from .from_dict import EntryConfig
from .generate import GenerateParallel
from .training import PrecisionConfig

# Far beyond what is used, 1 to 20; 1e-40 and 1e300 overflow.
Temperature = Annotated[float, Rule("at least 0.001 and at most 1000", lambda number: 0.001 <= number <= 1000)]
Weight = Annotated[float, Rule("at least 0 and at most 1", lambda number: 0 <= number <= 1)]


@dataclass(frozen=True)
class TeacherConfig(Checked):
    """`teacher.*`: a trained model, or a cache of what one predicts, from which the run's model learns besides the
    labels.

    Args:
        path: a checkpoint at any layout, a run folder (its newest one) or a folder with a Hugging Face model, of the
            same family and vocabulary; with `cache` only `layers` reads it.
        cache: a folder that `src/cache_logits.py` has written for this run's data.
        temperature: T; the divergence from the teacher is T^2 KL(softmax(t / T) || softmax(s / T)).
        weight: alpha; the loss of the tokens is (1 - alpha) x the labels' + alpha x the divergence.
        layers: of the teacher, copied into the model's layers before its first step, with all that is not in layers;
            `spread` takes layer floor(i L / l) for layer i of l. None: the model's weights are drawn.

    Source: Hinton et al. 2015; `spread` of every other layer is that of Sanh et al. 2019 (DistilBERT).
    """

    path: PathText | None = None
    cache: PathText | None = None
    temperature: Temperature = 1.0
    weight: Weight = 0.5
    layers: Literal["spread"] | list | None = None

    def check_rules(self) -> None:
        for index in self.layers if isinstance(self.layers, list) else ():
            check(Count, index, "layers")
        for each in fields(self) if not self.is_given else ():
            rule = "left alone without `path` or `cache`"
            require(self, each.name, rule, getattr(self, each.name) == each.default)
        is_read = self.cache is None or self.layers is not None
        require(self, "path", "null with `cache`, unless `layers` reads it", is_read or self.path is None)
        require(self, "layers", "null without `path`", self.layers is None or self.path is not None)

    @property
    def is_given(self) -> bool:
        """Whether the run has a teacher, a model or a cache."""
        return self.path is not None or self.cache is not None

    def source_layers(self, num_layers: int, num_teacher_layers: int) -> list[int]:
        """The teacher's layer for each of the model's.

        Raises:
            ValueError: the list has not one layer of the teacher for each.
        """
        if self.layers == "spread":
            return [index * num_teacher_layers // num_layers for index in range(num_layers)]
        fits = len(self.layers) == num_layers and max(self.layers) < num_teacher_layers
        rule = f"a list of {num_layers} layers, all below the teacher's {num_teacher_layers}"
        require(self, "layers", rule, fits)
        return self.layers


@dataclass(frozen=True)
class CacheTrainer(Checked):
    """`trainer=`: of the run to come.

    Args:
        max_steps: its length.
    """

    max_steps: Positive


@dataclass(frozen=True)
class CacheParallel(GenerateParallel):
    """`parallel=`: the ranks that compute the cache, of any number.

    Args:
        dp_size: data-parallel ranks, which share the samples.
    """

    dp_size: Positive = 1


@dataclass(frozen=True, kw_only=True)
class CacheConfig(EntryConfig):
    """One cache of what a teacher predicts for the samples of a run to come, whose keys have the same names.

    Args:
        ckpt: the teacher: a checkpoint at any layout, a run folder (its newest one) or a folder with a Hugging Face
            model.
        output: a new folder, or that of the same command, which continues.
        top_k: log-probabilities per scored token; all others are one number.
        temperature: T of softmax(t / T), as `teacher.temperature` of the run.
        global_batch_size: times `trainer.max_steps`, how many samples there are; the run may have other steps.
        seed: of the order of the samples, and of BERT's masks.
        micro_batch_size: sequences per rank and forward pass.
        precision: its `dtype` is that of weights and arithmetic; half types are stored as fp16.
        accelerator: `auto`: a GPU if there is one.
    """

    ckpt: PathText
    output: PathText
    top_k: Positive = 64
    temperature: Temperature = 1.0
    data: DataConfig
    tokenizer: TokenizerConfig
    trainer: CacheTrainer
    global_batch_size: Positive
    seed: Seed = 1234
    micro_batch_size: Positive = 8
    precision: PrecisionConfig = PrecisionConfig("fp32")
    accelerator: Accelerator = "auto"
    parallel: CacheParallel = CacheParallel()

    def check_rules(self) -> None:
        self.precision.refuse_float8()
        require(self, "data.num_workers", "0 for a cache, whose ranks read their samples", not self.data.num_workers)


def cache_record_bytes(rows: int, top_k: int, vocab_size: int, value_bytes: int) -> int:
    """Bytes of one sample in a cache of a teacher's log-probabilities on disk.

    Per row the ids of the `top_k` most probable tokens, in 2 bytes where the vocabulary allows, their log-probabilities
    and that of the rest; and a checksum of 8 bytes.

    Args:
        rows: scored positions of the sample.
        value_bytes: of a log-probability: 2 (fp16) for half types, 4 for fp32, 8 for fp64.
    """
    id_bytes = 2 if vocab_size <= 2**16 else 4
    return rows * (top_k * id_bytes + (top_k + 1) * value_bytes) + 8
