"""Tensor parallelism as in section 3 of the paper, by hand on plain tensors.

It imports torch, and of lmscale only `partition`. Read `collectives.py` (f and g), then `layers.py`, then
`cross_entropy.py`. The other files are faster forms of these (`fast_linear.py`, `chunked_cross_entropy.py`), the
communication backends (`communicator.py`), and what surrounds them.
"""

from .chunked_cross_entropy import linear_cross_entropy
from .collectives import copy_to_tensor_parallel_region, reduce_from_tensor_parallel_region
from .communicator import Communicator, ProcessGroupCommunicator, SingleRankCommunicator
from .context import ParallelContext, choose_communicator, make_context
from .cross_entropy import IGNORE_LABEL, vocab_parallel_cross_entropy, vocab_parallel_logits
from .data_collectives import begin_gather_from_data_ranks, begin_sum_over_data_ranks, sum_over_data_ranks
from .distillation import CachedTargets, ProjectedTargets, SoftTargets
from .fingerprint import fingerprint, first_difference
from .grad_norm import GradientNorm, global_gradient_norm, gradient_norms_of_parts, sync_replicated_gradients
from .init import initialize_parameters
from .layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from .replicated_layers import HeadNorm, LayerNorm, ReplicatedLinear, embedding_lookup
from .rng import (
    counter_dropout,
    counter_keep_mask,
    keys_from_row,
    sample_dropout_keys,
    seed_rank_generator,
    site_keys,
)
from .sequence_parallel import (
    gather_sequence,
    gather_tokens,
    keys_of_own_tokens,
    positions_of_own_tokens,
    sequence_shard,
)
from .shard_spec import ShardSpec, describe_parameters, padding_of, parameter
from .shared_memory import SharedMemoryChannel, open_channel
