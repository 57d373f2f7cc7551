"""What the ranks send one another in a step, by formula: every all-reduce, its group, its count and its bytes.

Legend: b micro-batch, s sequence, h hidden, L layers, N parameters of the rank, e bytes of a weight.
"""

from dataclasses import dataclass

from ..config import ParallelConfig, Recompute, TransformerConfig
from .flops import recomputes_whole_layer
from .memory import BYTES, FP32_BYTES
from .params import count_parameters

GRADIENT_ALL_REDUCE_ELEMENTS = 2**26  # fp32 gradients are added over the data ranks in pieces of at most this many
_GRADIENT_NORM_BYTES = 24  # sums of squares of sharded and replicated gradients, and a flag, in fp64


@dataclass(frozen=True)
class AllReduce:
    """Equal all-reduces of one rank.

    Args:
        what: is added up.
        group: `tensor` or `data`.
        phase: `forward`, `backward` (with the recomputation), `gradients` or `optimizer`.
        count: how often in one micro-batch or step, see the function that made it.
        num_bytes: of the rank's tensor in one of them: the payload, not what a ring algorithm sends for it.
    """

    what: str
    group: str
    phase: str
    count: int
    num_bytes: int

    @property
    def total_bytes(self) -> int:
        """count x num_bytes."""
        return self.count * self.num_bytes


def micro_batch_all_reduces(
    config: TransformerConfig, tp_size: int, micro_batch_size: int, seq_length: int, dtype: str
) -> tuple[AllReduce, ...]:
    """All-reduces over the tensor group in the forward and backward pass of one micro-batch; none for one rank.

    Forward: 2 a layer (g after attention and MLP) and 1 of the embedding; backward: 2 a layer (f) and 1 of the output
    projection; all of b s h e bytes. Full recomputation repeats the forward's, except that without hidden dropout
    torch's checkpoint stops once it has what the backward pass needs: in a pre-norm layer that is before the last
    all-reduce. The loss: 3 of b s numbers in fp32 (maximum, picked logit, sum), never of b s v.

    Args:
        micro_batch_size: sequences b.
        seq_length: tokens s.
        dtype: of the activations: fp64, fp32, bf16 or fp16.

    Raises:
        ValueError: `tp_size` does not divide the model.

    Source: section 3, Figures 3 and 4; the recomputation's part is counted in the traced world.
    """
    config.check_tensor_parallel(tp_size)
    if tp_size == 1:
        return ()
    num_tokens, num_layers = micro_batch_size * seq_length, config.num_layers
    large = num_tokens * config.hidden_size * BYTES[dtype]
    found = [
        AllReduce("embedding", "tensor", "forward", 1, large),
        AllReduce("attention and MLP outputs", "tensor", "forward", 2 * num_layers, large),
        AllReduce("loss", "tensor", "forward", 3, num_tokens * max(FP32_BYTES, BYTES[dtype])),
        AllReduce("gradient of the output projection", "tensor", "backward", 1, large),
        AllReduce("gradients of attention and MLP inputs", "tensor", "backward", 2 * num_layers, large),
    ]
    if config.recompute is Recompute.FULL:
        repeated = num_layers * (2 if recomputes_whole_layer(config) else 1)
        found.append(AllReduce("attention and MLP outputs, recomputed", "tensor", "backward", repeated, large))
    return tuple(found)


def step_all_reduces(
    config: TransformerConfig,
    layout: ParallelConfig,
    micro_batch_size: int,
    num_micro_batches: int,
    seq_length: int,
    dtype: str,
) -> tuple[AllReduce, ...]:
    """All-reduces of one rank in one optimizer step.

    Those of every micro-batch; 4 N bytes of gradients over the data group for half types (added in fp32), N e for
    others (in DDP's buckets, counted here as one); the gradient norm over the tensor group. Left out: the few numbers
    of loss counts, of the watchdog and of the replica check.

    Args:
        num_micro_batches: forward passes of a step.

    Raises:
        ValueError: `layout.tp_size` does not divide the model.
    """
    once = micro_batch_all_reduces(config, layout.tp_size, micro_batch_size, seq_length, dtype)
    found = [AllReduce(a.what, a.group, a.phase, a.count * num_micro_batches, a.num_bytes) for a in once]
    if layout.dp_size > 1:
        found += _gradient_all_reduces(count_parameters(config, layout.tp_size).per_rank, dtype)
    if layout.tp_size > 1:
        found.append(AllReduce("gradient norm", "tensor", "optimizer", 1, _GRADIENT_NORM_BYTES))
    return tuple(found)


def _gradient_all_reduces(num_parameters: int, dtype: str) -> list[AllReduce]:
    if BYTES[dtype] >= FP32_BYTES:
        return [AllReduce("gradients", "data", "gradients", 1, num_parameters * BYTES[dtype])]
    whole, rest = divmod(num_parameters, GRADIENT_ALL_REDUCE_ELEMENTS)
    sizes = [(whole, GRADIENT_ALL_REDUCE_ELEMENTS), (1, rest)]
    return [AllReduce("gradients", "data", "gradients", n, size * FP32_BYTES) for n, size in sizes if n and size]
