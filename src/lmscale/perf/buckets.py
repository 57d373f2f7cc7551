"""The pieces in which gradients are added over the data ranks: torch's DDP's buckets, or the optimizer's.

Legend: s positions, h hidden, f MLP width, v padded vocabulary, p tensor ranks.
"""

from ..config import NormOrder, TransformerConfig
from .memory import BYTES, FP32_BYTES
from .params import NUM_TOKEN_TYPES, count_parameters

GRADIENT_ALL_REDUCE_ELEMENTS = 2**26  # of half types, in fp32, the optimizer adds at most so many at a time
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20  # torch's defaults


def gradient_pieces(config: TransformerConfig, tp_size: int, dtype: str) -> list[int]:
    """Bytes of each all-reduce of the gradients, in order, from the second step on.

    Half types: 4 N bytes in the optimizer's pieces. fp32 and fp64: N e in DDP's buckets, which are filled in the order
    the backward pass makes the gradients and sent once they hold BUCKET_BYTES (the first FIRST_BUCKET_BYTES) or more.
    In the first step, where DDP does not know the order yet, there is one bucket.

    Raises:
        ValueError: `tp_size` does not divide the model.

    Source: torch/csrc/distributed/c10d/reducer.cpp, `compute_bucket_assignment_by_size` and `rebuild_buckets`.
    """
    if BYTES[dtype] < FP32_BYTES:
        whole, rest = divmod(count_parameters(config, tp_size).per_rank, GRADIENT_ALL_REDUCE_ELEMENTS)
        return [FP32_BYTES * GRADIENT_ALL_REDUCE_ELEMENTS] * whole + [FP32_BYTES * rest] * (rest > 0)
    buckets, held, limit = [], 0, FIRST_BUCKET_BYTES
    for size in gradient_sizes(config, tp_size):
        held += size * BYTES[dtype]
        if held >= limit:
            buckets.append(held)
            held, limit = 0, BUCKET_BYTES
    return buckets + [held] * (held > 0)


def gradient_sizes(config: TransformerConfig, tp_size: int) -> list[int]:
    """Elements of each parameter of a rank, in the order in which the backward pass finishes their gradients.

    From the heads to the embeddings; a linear's bias before its weight, but where f belongs to the linear, which makes
    both at once, the weight first; the word embedding last, for it is the output projection too.

    Raises:
        ValueError: `tp_size` does not divide the model.
    """
    config.check_tensor_parallel(tp_size)
    h, f, v = config.hidden_size, config.ffn_size // tp_size, config.padded_vocab_size // tp_size
    up, qkv, norm = [f, f * h], [3 * h // tp_size, 3 * h * h // tp_size], [h, h]
    mlp, attention = [h, f * h, *(up[::-1] if tp_size > 1 else up)], [h, h * h // tp_size]
    attention += qkv[::-1] if tp_size > 1 else qkv
    is_bert, is_post = config.architecture == "bert", config.norm_order is NormOrder.POST
    heads = [v, *norm, h, h * h, 2, 2 * h, h, h * h] if is_bert else []  # masked LM, sentence order, pooler
    layer = [*norm, *mlp, *norm, *attention] if is_post else [*mlp, *norm, *attention, *norm]
    layers = config.num_layers * layer
    types = [NUM_TOKEN_TYPES * h] if is_bert else []
    around = [*layers, *norm] if is_post else [*norm, *layers]
    return [*heads, *around, *types, config.max_position_embeddings * h, v * h]
