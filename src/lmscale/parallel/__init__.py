"""Tensor parallelism as in section 3 of the paper, by hand on plain tensors; imports torch and nothing of lmscale."""

from .collectives import copy_to_tensor_parallel_region, reduce_from_tensor_parallel_region
from .context import ParallelContext
from .cross_entropy import IGNORE_LABEL, vocab_parallel_cross_entropy
from .fingerprint import fingerprint, first_difference
from .grad_norm import GradientNorm, global_gradient_norm
from .init import initialize_parameters
from .layers import (
    ColumnParallelLinear,
    LayerNorm,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    embedding_lookup,
    vocab_parallel_logits,
)
from .rng import counter_dropout, counter_keep_mask, sample_dropout_keys, seed_rank_generator
from .shard_spec import ShardSpec, parameter

__all__ = [
    "IGNORE_LABEL",
    "ColumnParallelLinear",
    "GradientNorm",
    "LayerNorm",
    "ParallelContext",
    "ReplicatedLinear",
    "RowParallelLinear",
    "ShardSpec",
    "VocabParallelEmbedding",
    "copy_to_tensor_parallel_region",
    "counter_dropout",
    "counter_keep_mask",
    "embedding_lookup",
    "fingerprint",
    "first_difference",
    "global_gradient_norm",
    "initialize_parameters",
    "parameter",
    "reduce_from_tensor_parallel_region",
    "sample_dropout_keys",
    "seed_rank_generator",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_logits",
]
