"""Tensor parallelism as in section 3 of the paper, by hand on plain tensors; imports torch and nothing of lmscale."""

from .collectives import (
    begin_sum_over_data_ranks,
    broadcast_from_data_ranks,
    copy_to_tensor_parallel_region,
    first_position,
    gather_sequence,
    reduce_from_tensor_parallel_region,
    sequence_shard,
)
from .context import ParallelContext
from .cross_entropy import IGNORE_LABEL, linear_cross_entropy, vocab_parallel_cross_entropy, vocab_parallel_logits
from .fingerprint import fingerprint, first_difference
from .grad_norm import GradientNorm, global_gradient_norm, gradient_norms_of_parts, sum_partial_gradients
from .init import initialize_parameters
from .layers import (
    ColumnParallelLinear,
    LayerNorm,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    embedding_lookup,
)
from .rng import counter_dropout, counter_keep_mask, sample_dropout_keys, seed_rank_generator, site_keys
from .shard_spec import ShardSpec, describe_parameters, parameter
from .shared_memory import SharedMemoryChannel, open_channel

__all__ = [
    "IGNORE_LABEL",
    "ColumnParallelLinear",
    "GradientNorm",
    "LayerNorm",
    "ParallelContext",
    "ReplicatedLinear",
    "RowParallelLinear",
    "ShardSpec",
    "SharedMemoryChannel",
    "VocabParallelEmbedding",
    "begin_sum_over_data_ranks",
    "broadcast_from_data_ranks",
    "copy_to_tensor_parallel_region",
    "counter_dropout",
    "counter_keep_mask",
    "describe_parameters",
    "embedding_lookup",
    "fingerprint",
    "first_difference",
    "first_position",
    "gather_sequence",
    "global_gradient_norm",
    "gradient_norms_of_parts",
    "initialize_parameters",
    "linear_cross_entropy",
    "open_channel",
    "parameter",
    "reduce_from_tensor_parallel_region",
    "sample_dropout_keys",
    "seed_rank_generator",
    "sequence_shard",
    "site_keys",
    "sum_partial_gradients",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_logits",
]
