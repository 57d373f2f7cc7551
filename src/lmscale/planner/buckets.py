"""The pieces in which gradients are added over the data ranks: the buckets of torch's DDP, or the optimizer's own.

Legend: N parameters of the rank, e bytes of a weight.
"""

from ..config import TransformerConfig
from ..partition import buffer_pieces
from .memory import BYTES, FP32_BYTES
from .params import count_parameters, parameter_sizes

FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20  # torch's defaults


def gradient_pieces(config: TransformerConfig, tp_size: int, dtype: str, pad_heads: bool = False) -> list[int]:
    """Bytes of each all-reduce of the gradients, in order, from the second step on.

    Half types: 4 N bytes in `buffer_pieces`. fp32 and fp64: N e in DDP's buckets, which are filled in the order
    of the backward pass and sent once they hold BUCKET_BYTES (the first FIRST_BUCKET_BYTES) or more.
    In the first step DDP does not know the order yet and uses one bucket.

    Raises:
        ValueError: `tp_size` does not divide the model.

    Source: torch/csrc/distributed/c10d/reducer.cpp, `compute_bucket_assignment_by_size` and `rebuild_buckets`.
    """
    if BYTES[dtype] < FP32_BYTES:
        return [FP32_BYTES * size for size in buffer_pieces(count_parameters(config, tp_size, pad_heads).per_rank)]
    buckets, held, limit = [], 0, FIRST_BUCKET_BYTES
    for size in parameter_sizes(config, tp_size, pad_heads):
        held += size * BYTES[dtype]
        if held >= limit:
            buckets.append(held)
            held, limit = 0, BUCKET_BYTES
    return buckets + [held] * (held > 0)
