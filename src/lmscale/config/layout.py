"""How a run is divided over ranks: the grid, and the sequences of a step."""

import dataclasses
import math
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from .checks import Checked, Positive, Rule, refuse, require
from .model import FLOAT8_MULTIPLE

# torch counts milliseconds in 32 bits.
_Timeout = Annotated[
    float,
    Rule("at least 0.0167 (a second) and at most 10080 (a week)", lambda minutes: 1 / 60 <= minutes <= 7 * 24 * 60),
]


@dataclass(frozen=True, kw_only=True)
class LayoutOptions(Checked):
    """What the ranks of a grid share besides their axes.

    Args:
        sequence_parallel: tensor ranks share the work outside the parallel region too, each on its own tokens
            (Korthikanti et al. 2022).
        zero1: each data rank keeps the optimizer state of an equal part of the parameters (ZeRO stage 1, Rajbhandari et
            al. 2020).
        batch_halves: compiled layers compute one half of a micro-batch while the other half's messages travel (Wang et
            al. 2024).
        pad_heads: allow a `tp_size` that does not divide the heads: dummy heads of zeros change no result and are in no
            checkpoint.
    """

    sequence_parallel: bool = False
    zero1: bool = False
    batch_halves: bool = False
    pad_heads: bool = False

    def refuse_stages(self) -> None:
        """Refuse a pipeline outside pretraining.

        Raises:
            ValueError: `pp_size` is above 1.
        """
        if self.pp_size not in (None, 1):
            rule = "1 outside src/train.py, which reads a checkpoint of any layout (parallel.tp_size divides the model)"
            refuse("parallel.pp_size", rule, self.pp_size)


def _axis(name: str) -> int:
    """A field with the size of an axis of the grid."""
    return field(default=1, metadata={"axis": name})


@dataclass(frozen=True, kw_only=True)
class Layout(LayoutOptions):
    """The grid of ranks: `tp_size` neighbours share every layer, `pp_size` such groups each have some layers, and
    `dp_size` models share the batch (Figure 8).

    A new axis is a field here, and its group in `make_context` (`parallel/context.py`).

    Args:
        dp_size: data-parallel ranks.
        pp_size: stages of the pipeline.
        tp_size: tensor-parallel ranks.

    Raises:
        ValueError: a size below 1.
    """

    # The outermost axis first: ranks of the last one are neighbours.
    dp_size: Positive = _axis("data")
    pp_size: Positive = _axis("pipeline")
    tp_size: Positive = _axis("tensor")

    @property
    def axes(self) -> dict[str, int]:
        """The size of each axis by its name, the outermost first."""
        return {each.metadata["axis"]: getattr(self, each.name) for each in fields(self) if each.metadata}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.axes.values())

    def over(self, world_size: int) -> "Layout":
        """This layout with as many data ranks as `world_size` ranks have.

        Raises:
            ValueError: the other axes do not divide `world_size`.
        """
        others = self.world_size // self.dp_size
        if world_size % others:
            of_stages = f" x `pp_size` ({self.tp_size} x {self.pp_size})" if self.pp_size > 1 else ""
            raise ValueError(f"`tp_size`{of_stages} must divide the {world_size} ranks, but is {others}")
        return dataclasses.replace(self, dp_size=world_size // others)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis by its key, the innermost first."""
        return {each.name: getattr(self, each.name) for each in reversed(fields(self)) if each.metadata}

    @property
    def formula(self) -> str:
        """The keys of the sizes and their values, for messages; a single stage is left out."""
        sizes = {f"`parallel.{name}`": size for name, size in self.sizes.items() if name != "pp_size" or size > 1}
        return f"{' x '.join(sizes)} ({' x '.join(map(str, sizes.values()))})"

    def __str__(self) -> str:
        stages = f"{self.pp_size} stages x " if self.pp_size > 1 else ""
        return f"{self.dp_size} data x {stages}{self.tp_size} tensor"

    @property
    def cuts_sequence(self) -> bool:
        """Whether the tokens of tensors outside the parallel region are cut over the tensor ranks."""
        return self.sequence_parallel and self.tp_size > 1

    @property
    def cuts_optimizer(self) -> bool:
        """Whether the optimizer's state is cut over the data ranks."""
        return self.zero1 and self.dp_size > 1

    @property
    def cuts_batch(self) -> bool:
        """Whether layers compute a micro-batch in two halves."""
        return self.batch_halves and self.tp_size > 1

    @property
    def batch_parts(self) -> int:
        """Parts in which layers compute a micro-batch, 1 or 2."""
        return 2 if self.cuts_batch else 1

    def divide(
        self, model: Any, micro_batch_size: int, global_batch_size: int, seq_length: int, dtype: str
    ) -> "BatchConfig":
        """Check that this grid divides a model and its batch; returns how it divides the batch.

        Args:
            model: a `ModelConfig`.
            dtype: of `PrecisionConfig`.

        Raises:
            ValueError: `tp_size` does not cut the model, or with `sequence_parallel` the sequence, into equal shards;
                there are fewer layers than stages; with `batch_halves` a micro-batch has no equal halves; the batch is
                not a whole number of micro-batches; or fp8, whose products do not take these sizes.
        """
        model.check_tensor_parallel(self.tp_size, self.pad_heads)
        model.check_stages(self.pp_size)
        if self.cuts_batch and micro_batch_size % 2:
            refuse("micro_batch_size", "even with `batch_halves`", micro_batch_size)
        if self.cuts_sequence and seq_length % self.tp_size:
            rule = f"a multiple of `tp_size` ({self.tp_size}) with `sequence_parallel`"
            refuse("data.seq_length", rule, seq_length)
        if dtype == "fp8":
            model.check_float8(self.tp_size)
            multiple = FLOAT8_MULTIPLE * self.batch_parts
            if micro_batch_size * seq_length % multiple:
                raise ValueError(
                    f"`micro_batch_size` x `data.seq_length` must be a multiple of {multiple} with "
                    f"precision=fp8{' and `batch_halves`' if self.cuts_batch else ''}, "
                    f"but is {micro_batch_size} x {seq_length}"
                )
        return BatchConfig(micro_batch_size, global_batch_size, self.dp_size)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(LayoutOptions):
    """`parallel=`: the requested grid of ranks.

    Args:
        tp_size: ranks that share every layer; `auto`: the smallest power of two that fits.
        pp_size: stages of a pipeline, each with some of the layers; `auto`: the fewest ranks per model that fit; None:
            1, except that a search by `src/plan.py` compares the powers of two and the divisors of the layers.
        dp_size: models that share the batch; `auto`: number of ranks / (tp_size x pp_size), or as many as GPUs and
            batch allow, on a CPU 1.
        timeout_minutes: time without progress after which a rank reports where it waits and ends the job.
        shared_memory: tensor ranks on one host without a GPU reduce through shared memory instead of gloo's TCP.
    """

    tp_size: Literal["auto"] | Positive = 1
    pp_size: Literal["auto"] | Positive | None = None
    dp_size: Literal["auto"] | Positive = "auto"
    timeout_minutes: _Timeout = 30.0
    shared_memory: bool = True

    @property
    def num_stages(self) -> Literal["auto"] | int:
        """`pp_size` outside a search."""
        return 1 if self.pp_size is None else self.pp_size

    def layout(self, **sizes: int) -> Layout:
        """The grid of these sizes, with all else as requested; a size that is `auto` must be given."""
        requested = {each.name: getattr(self, each.name) for each in fields(Layout)} | {"pp_size": self.num_stages}
        return Layout(**requested | sizes)


@dataclass(frozen=True)
class BatchConfig(Checked):
    """How the sequences of an optimizer step are divided.

    Args:
        micro_batch_size: sequences per rank and forward pass.
        global_batch_size: sequences of one optimizer step over all data-parallel ranks.

    Raises:
        ValueError: a global batch that is not a whole number of micro-batches on every data rank.
    """

    micro_batch_size: Positive
    global_batch_size: Positive
    dp_size: Positive = 1

    def check_rules(self) -> None:
        rule = f"a multiple of `micro_batch_size` x `dp_size` ({self.micro_batch_size} x {self.dp_size})"
        is_multiple = self.global_batch_size % (self.micro_batch_size * self.dp_size) == 0
        require(self, "global_batch_size", rule, is_multiple)

    @property
    def num_micro_batches(self) -> int:
        """Forward passes of a rank per step (gradient accumulation)."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)
