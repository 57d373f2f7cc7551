"""Distillation: `teacher.*` of a run."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from .checks import AboveZero, Checked, Count, PathText, Rule, check, require

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
    temperature: AboveZero = 1.0
    weight: Weight = 0.5
    layers: Literal["spread"] | list | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for index in self.layers if isinstance(self.layers, list) else ():
            check(Count, index, "layers")
        for each in fields(self) if not self.is_given else ():
            rule = "left alone without `path` or `cache`"
            require(self, each.name, rule, getattr(self, each.name) == each.default)
        require(
            self,
            "path",
            "null with `cache`, unless `layers` reads it",
            not self.cache or bool(self.layers or not self.path),
        )
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
