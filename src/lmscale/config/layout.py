"""How a run is divided over ranks: the grid, and the sequences of a step."""

from dataclasses import dataclass

from .checks import require_positive


@dataclass(frozen=True)
class ParallelConfig:
    """The grid of ranks: `tp_size` neighbours share one model, `dp_size` such groups share the batch (Figure 8).

    Args:
        sequence_parallel: the tensor ranks share the work outside the parallel region too, each on its own positions
            (Korthikanti et al. 2022); with one tensor rank there is nothing to share.
        zero1: each data rank keeps the optimizer's state of the parameters it owns alone (ZeRO stage 1, Rajbhandari et
            al. 2020); with one data rank it keeps all.

    Raises:
        ValueError: a size below 1.
    """

    tp_size: int = 1
    dp_size: int = 1
    sequence_parallel: bool = False
    zero1: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "tp_size", "dp_size")

    @property
    def cuts_sequence(self) -> bool:
        """Whether tensors outside the parallel region are cut over the sequence."""
        return self.sequence_parallel and self.tp_size > 1

    @property
    def cuts_optimizer(self) -> bool:
        """Whether the optimizer's state is cut over the data ranks."""
        return self.zero1 and self.dp_size > 1

    @property
    def world_size(self) -> int:
        """Number of ranks, tp_size x dp_size."""
        return self.tp_size * self.dp_size


@dataclass(frozen=True)
class BatchConfig:
    """How one optimizer step's sequences are dealt out.

    Args:
        micro_batch_size: sequences a rank handles in one forward pass.
        global_batch_size: sequences of one optimizer step over all data-parallel ranks.

    Raises:
        ValueError: a global batch that is not a whole number of micro-batches on every data rank.
    """

    micro_batch_size: int
    global_batch_size: int
    dp_size: int = 1

    def __post_init__(self) -> None:
        require_positive(self, "micro_batch_size", "global_batch_size", "dp_size")
        if self.global_batch_size % (self.micro_batch_size * self.dp_size):
            raise ValueError(
                "`global_batch_size` must be a multiple of `micro_batch_size` x `dp_size` "
                f"({self.micro_batch_size} x {self.dp_size}), but is {self.global_batch_size}"
            )

    @property
    def num_micro_batches(self) -> int:
        """Forward passes a rank makes in one step (gradient accumulation)."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    @property
    def rank_batch_size(self) -> int:
        """Sequences a data rank handles in one step."""
        return self.global_batch_size // self.dp_size
