"""The memory that a rank of a job needs and that its device offers, for the planner and for a run's own check."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from ..config import Layout, Recompute, TransformerConfig
from ..partition import part_sizes
from .memory import BYTES, FP32_BYTES, GIB, HALF_BYTES, MemoryEstimate, estimate_memory
from .params import parameter_sizes

# Memory used by the framework, its context and fragmentation: an allowance on a GPU; on a CPU the 0.3 GiB of a process
# that has imported torch and Lightning, plus some.
GPU_RESERVED_GIB, CPU_RESERVED_GIB = 2.0, 0.5
STAND_IN_VOCAB_SIZE = 2000  # ids, used before the tokenizer is known; padding makes the exact number unimportant


@dataclass(frozen=True)
class Workload:
    """The training of every rank and its length, without the grid of ranks.

    Args:
        config: the model, with its vocabulary and recomputation mode.
        micro_batch_size: sequences of a rank's forward pass.
        global_batch_size: sequences of a step.
        seq_length: tokens.
        dtype: of weights, activations and gradients.
        num_steps: optimizer steps of the run.
        half_moments: AdamW's moments are kept in bf16.
        compiles: the layers and the optimizer are compiled.
    """

    config: TransformerConfig
    micro_batch_size: int
    global_batch_size: int
    seq_length: int
    dtype: str
    num_steps: int
    half_moments: bool = False
    compiles: bool = False

    def change(self, micro_batch_size: int | None = None, recompute: Recompute | None = None) -> "Workload":
        """The same training with a different micro-batch or recomputation mode."""
        config = self.config if recompute is None else dataclasses.replace(self.config, recompute=recompute)
        return dataclasses.replace(self, config=config, micro_batch_size=micro_batch_size or self.micro_batch_size)

    def num_micro_batches(self, layout: Layout) -> int:
        """Forward passes of a rank in a step."""
        return self.global_batch_size // (self.micro_batch_size * layout.dp_size)

    def overrides(self, layout: Layout) -> str:
        """This job on a grid as overrides of `train.py` and `plan.py`."""
        return (
            f"parallel.tp_size={layout.tp_size} parallel.dp_size={layout.dp_size} "
            f"micro_batch_size={self.micro_batch_size} model.recompute={self.config.recompute.value}"
            + (" parallel.sequence_parallel=true" if layout.sequence_parallel else "")
            + (" parallel.zero1=true" if layout.zero1 else "")
            + (" parallel.batch_halves=true" if layout.batch_halves else "")
            + (" parallel.pad_heads=true" if self.config.num_attention_heads % layout.tp_size else "")
        )


def rank_memory(job: Workload, layout: Layout, on_gpu: bool) -> MemoryEstimate:
    """Bytes of one rank, see `estimate_memory`.

    Raises:
        ValueError: `layout.tp_size` does not divide the model.
    """
    return estimate_memory(
        job.config,
        layout.tp_size,
        job.micro_batch_size,
        job.seq_length,
        job.dtype,
        layout.dp_size,
        on_gpu,
        accumulates=job.num_micro_batches(layout) > 1,
        cuts_sequence=layout.cuts_sequence,
        zero1=layout.cuts_optimizer,
        half_moments=job.half_moments,
        compiles=job.compiles,
        pad_heads=layout.pad_heads,
    )


def checkpoint_bytes(job: Workload, layout: Layout) -> int:
    """Bytes of a checkpoint that one rank writes, at most: its weights, in fp32 at least, and their moments.

    With `checkpoint.async` the rank holds them in host memory. Left out: tensors that all tensor ranks have are written
    by one of them, a fraction of a per cent.
    """
    weight = max(BYTES[job.dtype], FP32_BYTES)
    moment = HALF_BYTES if job.half_moments else weight
    largest = max(part_sizes(parameter_sizes(job.config, layout.tp_size, layout.pad_heads), layout.dp_size))
    return largest * (weight + 2 * moment)


def usable_bytes(memory_bytes: int, on_gpu: bool, num_ranks: int = 1) -> int:
    """Bytes for the tensors of each rank on a device that `num_ranks` share; negative if nothing is left."""
    return memory_bytes // num_ranks - int((GPU_RESERVED_GIB if on_gpu else CPU_RESERVED_GIB) * GIB)


def largest_dp_size(num_micro_batches: int, largest: int) -> int:
    """The largest number of data ranks, up to `largest`, that divides the micro-batches of a step; at least 1."""
    return next((dp for dp in range(min(num_micro_batches, largest), 1, -1) if num_micro_batches % dp == 0), 1)


def smallest_layout(
    job: Workload, layout_at: Callable[[int], Layout | None], usable: int, on_gpu: bool, largest: int | None = None
) -> Layout | None:
    """The layout with the smallest power of two as `tp_size` that divides the model and whose rank fits.

    Args:
        layout_at: the layout for a `tp_size`; None if there is none.
        usable: bytes of a device for a rank's tensors.
        largest: largest tp_size to try; None: the number of heads.

    Returns:
        None if no such size fits.
    """
    tp_size, largest = 1, min(largest or job.config.num_attention_heads, job.config.num_attention_heads)
    while tp_size <= largest:
        layout = layout_at(tp_size)
        try:
            if layout is not None and rank_memory(job, layout, on_gpu).total <= usable:
                return layout
        except ValueError:  # does not divide, and so does no larger power of two
            return None
        tp_size *= 2
    return None


def first_mode_that_fits(job: Workload, layout: Layout, usable: int, on_gpu: bool) -> Recompute | None:
    """The mode that recomputes least among those with at most `usable` bytes per rank; None if there is none."""
    fits = (mode for mode in Recompute if rank_memory(job.change(recompute=mode), layout, on_gpu).total <= usable)
    return next(fits, None)
