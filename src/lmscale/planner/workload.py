"""A training without its layout; with a `Layout`, every count of the planner follows from it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..config import RECOMPUTE_MODES, Layout, Recompute, TransformerConfig
from ..config.from_dict import keys_of
from ..config.layout import ParallelConfig
from ..config.plan import PlanConfig
from ..config.pretrain import RunConfig
from .flops import scored_tokens

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}  # fp8: bf16 numbers, rounded within a product
FP32_BYTES = 4
HALF_BYTES = 2
STAND_IN_VOCAB_SIZE = 2000  # ids, used before the tokenizer is known; padding makes the exact number unimportant


@dataclass(frozen=True)
class Workload:
    """The training of every rank and its length, without the grid of ranks.

    Args:
        config: the model, with its vocabulary and recomputation mode.
        micro_batch_size: sequences b of a rank's forward pass.
        global_batch_size: sequences of a step.
        seq_length: tokens s.
        dtype: of weights, activations and gradients: fp64, fp32, bf16, fp16, or fp8, which counts as bf16.
        num_steps: optimizer steps of the run.
        half_moments: AdamW's moments are kept in bf16, and converted to fp32 tensor by tensor.
        compiles: the layers and the optimizer are compiled.
        on_gpu: a GPU has a flash kernel with attention dropout, LayerNorms in half types and larger pieces of the loss.
        teacher: the model that `config` is distilled from, with the same vocabulary.
        top_k: log-probabilities per scored token, read from a cache in place of a teacher.
    """

    config: TransformerConfig
    micro_batch_size: int
    global_batch_size: int
    seq_length: int
    dtype: str
    num_steps: int = 1
    half_moments: bool = False
    compiles: bool = False
    on_gpu: bool = True
    teacher: TransformerConfig | None = None
    top_k: int | None = None

    @classmethod
    def of(cls, request: PlanConfig | RunConfig, attention: str = "sdpa", **machine: Any) -> "Workload":
        """The training of a configuration; until `model.recompute=auto` is resolved, nothing is recomputed.

        Args:
            attention: in place of `model.attention=auto`.
            machine: `compiles` and `on_gpu`.
        """
        return cls(
            request.model.resolve(STAND_IN_VOCAB_SIZE, attention),
            request.micro_batch_size,
            request.global_batch_size,
            request.data.seq_length,
            request.precision.dtype,
            request.trainer.max_steps,
            request.optimizer.moments == "bf16",
            **machine,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes e of a weight."""
        return BYTES[self.dtype]

    @property
    def wide_bytes(self) -> int:
        """Bytes of a number where gradients are summed, e and at least 4."""
        return max(self.weight_bytes, FP32_BYTES)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, b s."""
        return self.micro_batch_size * self.seq_length

    @property
    def num_scored(self) -> int:
        """Scored tokens m of a micro-batch."""
        return self.micro_batch_size * scored_tokens(self.config, self.seq_length)

    @property
    def teacher_job(self) -> "Workload | None":
        """The teacher's forward pass as a job: without dropout and recomputation, with the run's attention kernel and
        the student's padding of the vocabulary; bf16 where the student has float8 products."""
        if self.teacher is None:
            return None
        own = dict.fromkeys(("hidden_dropout", "attention_dropout", "embedding_dropout"), 0.0) | {"recompute": "none"}
        shared = {name: getattr(self.config, name) for name in ("attention", "vocab_size", "vocab_multiple")}
        config = dataclasses.replace(self.teacher, **own, **shared)
        dtype = "bf16" if self.dtype == "fp8" else self.dtype
        return dataclasses.replace(self, config=config, dtype=dtype, teacher=None)

    @property
    def models(self) -> list[TransformerConfig]:
        """The model that is trained, and its teacher if there is one."""
        return [each.config for each in (self, self.teacher_job) if each is not None]

    def own_tokens(self, layout: Layout) -> int:
        """Tokens of a rank outside the parallel region: b s, with sequence parallelism b s / p."""
        return self.tokens // layout.tp_size if layout.cuts_sequence else self.tokens

    def num_micro_batches(self, layout: Layout) -> int:
        """Forward passes of a rank in a step."""
        return self.global_batch_size // (self.micro_batch_size * layout.dp_size)

    def check_layout(self, layout: Layout) -> None:
        """Raise the ValueError of `Layout.divide` unless a grid divides this training and the teacher."""
        layout.divide(self.config, self.micro_batch_size, self.global_batch_size, self.seq_length, self.dtype)
        for teacher in self.models[1:]:
            with keys_of(TransformerConfig, "teacher.model."):
                teacher.check_tensor_parallel(layout.tp_size, layout.pad_heads)

    def change(self, micro_batch_size: int | None = None, recompute: Recompute | None = None) -> "Workload":
        """The same training with a different micro-batch or recomputation mode."""
        config = self.config if recompute is None else dataclasses.replace(self.config, recompute=recompute)
        return dataclasses.replace(self, config=config, micro_batch_size=micro_batch_size or self.micro_batch_size)

    def in_each_mode(self) -> list["Workload"]:
        """The same training in every recomputation mode, least recomputation first."""
        return [self.change(recompute=mode) for mode in RECOMPUTE_MODES]

    def overrides(self, layout: Layout) -> str:
        """This job on a grid as overrides of `train.py` and `plan.py`."""
        words = {f"parallel.{name}": size for name, size in layout.sizes.items() if name != "pp_size" or size > 1}
        words |= {"micro_batch_size": self.micro_batch_size, "model.recompute": self.config.recompute}
        options = [name for name in ("sequence_parallel", "zero1", "batch_halves") if getattr(layout, name)]
        if self.config.num_attention_heads % layout.tp_size:
            options.append("pad_heads")
        words |= {f"parallel.{name}": "true" for name in options}
        return " ".join(f"{key}={value}" for key, value in words.items())


def divisors(number: int, largest: int) -> list[int]:
    """The divisors of a number up to `largest`, ascending."""
    return [n for n in range(1, min(number, largest) + 1) if number % n == 0]


def largest_dp_size(num_micro_batches: int, largest: int) -> int:
    """The largest number of data ranks, up to `largest`, that divides the micro-batches of a step; at least 1."""
    return max(divisors(num_micro_batches, largest), default=1)


def layout_at(job: Workload, request: ParallelConfig, tp_size: int, pp_size: int, num_devices: int) -> Layout:
    """The requested layout at these sizes; `dp_size=auto`: as many data ranks as batch and devices allow."""
    dp_size = request.dp_size
    if dp_size == "auto":
        dp_size = largest_dp_size(job.global_batch_size // job.micro_batch_size, num_devices // (tp_size * pp_size))
    return request.layout(tp_size=tp_size, pp_size=pp_size, dp_size=dp_size)


def tensor_sizes(job: Workload, pad_heads: bool, largest: int) -> list[int]:
    """Every `tp_size` up to `largest` and the heads that cuts the job's models into equal shards, ascending."""
    sizes = (set(m.tensor_parallel_sizes(pad_heads)) & set(range(m.num_attention_heads + 1)) for m in job.models)
    return [size for size in sorted(set.intersection(*sizes)) if size <= largest]


def auto_tp_sizes(job: Workload, pad_heads: bool, largest: int | None = None) -> list[int]:
    """The `tensor_sizes` that `tp_size=auto` tries, ascending."""
    return [p for p in tensor_sizes(job, pad_heads, largest or job.config.num_attention_heads) if p.bit_count() == 1]


def model_sizes(
    job: Workload, tp_size: int | str, pp_size: int | str, pad_heads: bool, largest: int | None = None
) -> list[tuple[int, int]]:
    """(tp_size, pp_size) to try in their order where one or both are `auto`: the fewest ranks first, then stages.

    Args:
        largest: number of ranks; None: as many as the model has heads, per stage.
    """
    tp_sizes = auto_tp_sizes(job, pad_heads, largest) if tp_size == "auto" else [tp_size]
    pp_sizes = stage_numbers(job) if pp_size == "auto" else [pp_size]
    pairs = [(p, s) for p in tp_sizes for s in pp_sizes if largest is None or p * s <= largest]
    return sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[1]))


def no_size_fits(request: ParallelConfig, why: str) -> ValueError:
    """The refusal of sizes that are `auto`; `why` begins with what is true of no layout or `tp_size` that was tried."""
    name, tried = ("pp_size", "layout") if request.num_stages == "auto" else ("tp_size", "power of two")
    return ValueError(f"no {name} fits (`parallel.{name}`=auto): no {tried} {why}")


def stage_numbers(job: Workload) -> list[int]:
    """The `pp_size` that `auto` and a search try, ascending: powers of two, and those that divide the layers; 1 with a
    teacher or its cache."""
    most = 1 if job.teacher or job.top_k or job.config.traits.transformer_inputs is None else job.config.num_layers
    return [s for s in range(1, most + 1) if s.bit_count() == 1 or most % s == 0]


def with_other_stages(job: Workload, layout: Layout) -> list[Layout]:
    """The layout, then with every power of two as its number of stages, for messages."""
    powers = [n for n in stage_numbers(job) if n.bit_count() == 1 and n != layout.pp_size]
    return [layout, *(dataclasses.replace(layout, pp_size=n) for n in powers)]
