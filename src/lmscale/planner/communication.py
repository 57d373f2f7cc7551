"""The collectives of a step, by formula: each with its group, count and bytes.

Legend: b micro-batch, s sequence, h hidden, L layers, N parameters of the rank, e bytes of a weight.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass

from ..config import Layout, Recompute, TransformerConfig
from ..partition import assign_owners, buffer_pieces, part_sizes, rows_at_once
from .flops import num_recomputed_whole, scored_tokens
from .memory import BYTES, FP32_BYTES
from .params import count_parameters, parameter_sizes, parameters_in_order

OUTPUTS, INPUTS, INPUTS_AGAIN = (f"attention and MLP {what}" for what in ("outputs", "inputs", "inputs, again"))
OUTPUT_GRADIENTS, INPUT_GRADIENTS = (f"gradients of attention and MLP {what}" for what in ("outputs", "inputs"))
# In the order of a step: what, kind, phase, and whether each layer sends it, for attention and for the MLP.
_PLAIN = (
    ("embedding", "all_reduce", "forward", False),
    (OUTPUTS, "all_reduce", "forward", True),
    (INPUT_GRADIENTS, "all_reduce", "backward", True),
)
_SEQUENCE = (
    ("embedding", "reduce_scatter", "forward", False),
    (INPUTS, "all_gather", "forward", True),
    (OUTPUTS, "reduce_scatter", "forward", True),
    ("output of the last layer", "all_gather", "forward", False),
    (OUTPUT_GRADIENTS, "all_gather", "backward", True),
    (INPUTS_AGAIN, "all_gather", "backward", True),
    (INPUT_GRADIENTS, "reduce_scatter", "backward", True),
    ("gradient of the embedding", "all_gather", "backward", False),
)
_GRADIENT_NORM_BYTES = 24  # sums of squares of sharded and replicated gradients, and a flag, in fp64


@dataclass(frozen=True)
class Collective:
    """A number of equal collectives of one rank.

    Args:
        what: what is sent.
        kind: `all_reduce`, `all_gather`, `reduce_scatter`, `reduce` or `broadcast`.
        group: `tensor` or `data`.
        phase: `forward`, `backward` (with the recomputation), `gradients` or `optimizer`.
        count: how often per micro-batch or step, see the function that returns it.
        num_bytes: of the larger of input and output: the payload, not the bytes that a ring algorithm sends.
    """

    what: str
    kind: str
    group: str
    phase: str
    count: int
    num_bytes: int

    @property
    def total_bytes(self) -> int:
        """count x num_bytes."""
        return self.count * self.num_bytes


def micro_batch_collectives(
    config: TransformerConfig,
    layout: Layout,
    micro_batch_size: int,
    seq_length: int,
    dtype: str,
    on_gpu: bool = False,
) -> tuple[Collective, ...]:
    """Collectives of the tensor group in the forward and backward pass of one micro-batch; none for one rank.

    Forward: 2 all-reduces per layer (g after attention and MLP) and 1 of the embedding. Backward: 2 per layer (f) and 1
    of the output projection. All of b s h e bytes, the last for BERT of m h e, m its scored tokens. Full recomputation
    repeats the forward's, except that in eager layers without hidden dropout torch's checkpoint stops once it has what
    the backward pass needs: in a pre-norm layer that is before the last all-reduce. The loss: 3 of b s (BERT: m)
    numbers in fp32 (maximum, sum, picked logit), never of b s v, for the `rows_at_once` of the device.

    With sequence parallelism each g is a reduce-scatter and, backward, an all-gather; each f an all-gather and,
    backward, the same all-gather again and a reduce-scatter; and one all-gather follows the last layer. With
    `batch_halves` those of the layers are twice as many and half as large.

    Args:
        micro_batch_size: sequences b.
        seq_length: tokens s.
        dtype: of the activations: fp64, fp32, bf16, fp16 or fp8, which travels as bf16.
        on_gpu: the loss has larger pieces there, and layers are compiled, so that they are recomputed to their end.

    Raises:
        ValueError: `layout.tp_size` does not divide the model.

    Source: section 3, Figures 3 and 4; Korthikanti et al. 2022, section 4.2.2; those of the recomputation were counted
    in a traced run.
    """
    config.check_tensor_parallel(layout.tp_size, layout.pad_heads)
    if layout.tp_size == 1:
        return ()
    large = micro_batch_size * seq_length * config.hidden_size * BYTES[dtype]
    num_scored = micro_batch_size * scored_tokens(config, seq_length)
    scored = num_scored * config.hidden_size * BYTES[dtype]
    columns = config.padded_vocab_size // layout.tp_size
    return (
        *_model_collectives(config, layout, large, on_gpu),
        *_loss_all_reduces(num_scored, rows_at_once(columns, on_gpu), max(FP32_BYTES, BYTES[dtype])),
        Collective("gradient of the output projection", "all_reduce", "tensor", "backward", 1, scored),
    )


def _model_collectives(config: TransformerConfig, layout: Layout, num_bytes: int, compiled: bool) -> list[Collective]:
    """Those of embedding and layers, whose whole tensor has `num_bytes`."""
    parts, recomputed, found = layout.batch_parts, [], []
    for what, kind, phase, is_of_layers in _SEQUENCE if layout.cuts_sequence else _PLAIN:
        if not is_of_layers:
            found.append(Collective(what, kind, "tensor", phase, 1, num_bytes))
            continue
        count = 2 * parts * config.num_layers
        found.append(Collective(what, kind, "tensor", phase, count, num_bytes // parts))
        if phase == "forward" and config.recompute is Recompute.FULL:
            if what == OUTPUTS and not compiled:  # the last one of a layer, of the second half, may not be needed
                count -= config.num_layers - num_recomputed_whole(config)
            recomputed.append(Collective(f"{what}, recomputed", kind, "tensor", "backward", count, num_bytes // parts))
    return found + recomputed


def step_collectives(
    config: TransformerConfig,
    layout: Layout,
    micro_batch_size: int,
    num_micro_batches: int,
    seq_length: int,
    dtype: str,
    on_gpu: bool = False,
    dp_rank: int | None = None,
) -> tuple[Collective, ...]:
    """Collectives of one rank in one optimizer step.

    Those of every micro-batch; the gradients over the data group in `buffer_pieces`, 4 N bytes for half types (added
    in fp32) and N e for others, or with ZeRO stage 1 to their owners, each owner's in pieces, who send the weights
    back; the gradients of the `replicated_parameters` over the tensor group, with sequence parallelism and without ZeRO
    also over the data group; the gradient norm over the tensor group. Left out: the few numbers of loss counts, of the
    watchdog and of the replica check.

    Args:
        num_micro_batches: forward passes of a step.
        dp_rank: of the rank; with ZeRO stage 1 data ranks own different parameters. None: the one that sends most.

    Raises:
        ValueError: `layout.tp_size` does not divide the model.
    """
    once = micro_batch_collectives(config, layout, micro_batch_size, seq_length, dtype, on_gpu)
    found = [dataclasses.replace(c, count=c.count * num_micro_batches) for c in once]
    if layout.cuts_optimizer:
        found += _to_owners_and_back(config, layout, dtype)
    elif layout.dp_size > 1:
        num_parameters = count_parameters(config, layout.tp_size, layout.pad_heads).per_rank
        for size, n in Counter(buffer_pieces(num_parameters)).items():
            num_bytes = size * max(FP32_BYTES, BYTES[dtype])
            found.append(Collective("gradients", "all_reduce", "data", "gradients", n, num_bytes))
    return (*found, *_small_collectives(config, layout, dtype, dp_rank))


def _small_collectives(config: TransformerConfig, layout: Layout, dtype: str, dp_rank: int | None) -> list[Collective]:
    """Those of a step besides its micro-batches' and the gradients over the data group: replicated gradients, norm."""
    found, by_rank = [], replicated_parameters(config, layout) if layout.tp_size > 1 else [0] * layout.dp_size
    num_replicated = max(by_rank) if dp_rank is None else by_rank[dp_rank]
    if num_replicated:
        num_bytes = num_replicated * max(FP32_BYTES, BYTES[dtype])
        found.append(
            Collective("gradients of replicated parameters", "all_reduce", "tensor", "gradients", 1, num_bytes)
        )
        if layout.cuts_sequence and layout.dp_size > 1 and not layout.cuts_optimizer:
            what = "gradients of replicated parameters, from data rank 0"
            found.append(Collective(what, "broadcast", "data", "gradients", 1, num_bytes))
    for group, cuts in (("tensor", layout.tp_size > 1), ("data", layout.cuts_optimizer)):
        if cuts:
            found.append(Collective("gradient norm", "all_reduce", group, "optimizer", 1, _GRADIENT_NORM_BYTES))
    return found


def _to_owners_and_back(config: TransformerConfig, layout: Layout, dtype: str) -> list[Collective]:
    """ZeRO stage 1: gradients to their owners, in fp32 at least and in pieces; weights from each owner, at once."""
    sizes = parameter_sizes(config, layout.tp_size, layout.pad_heads)
    parts = [size for size in part_sizes(sizes, layout.dp_size) if size]
    pieces = [piece for size in parts for piece in buffer_pieces(size)]
    ways = (
        ("gradients to their owners", "reduce", "gradients", pieces, max(FP32_BYTES, BYTES[dtype])),
        ("weights from their owners", "broadcast", "optimizer", parts, BYTES[dtype]),
    )
    return [
        Collective(what, kind, "data", phase, count, size * num_bytes)
        for what, kind, phase, sizes, num_bytes in ways
        for size, count in Counter(sizes).items()
    ]


def replicated_parameters(config: TransformerConfig, layout: Layout) -> list[int]:
    """Parameters of each data rank's update that every tensor rank holds whole.

    Per layer the LayerNorms and two row biases; outside the layers the LayerNorms, the position and type embeddings,
    and what the heads do not shard.

    Returns:
        by data rank the number of elements: of all, with ZeRO stage 1 of those that it owns.
    """
    parameters = parameters_in_order(config, layout.tp_size)
    if not layout.cuts_optimizer:
        return [sum(size for size, is_replicated in parameters if is_replicated)] * layout.dp_size
    numbers = [0] * layout.dp_size
    owners = assign_owners([size for size, _ in parameters], layout.dp_size)
    for owner, (size, is_replicated) in zip(owners, parameters, strict=True):
        numbers[owner] += size * is_replicated
    return numbers


def _loss_all_reduces(num_rows: int, at_once: int, num_bytes: int) -> list[Collective]:
    pieces = [(num_rows // at_once, at_once), (1, num_rows % at_once)]
    return [
        Collective("loss", "all_reduce", "tensor", "forward", 3 * n, rows * num_bytes) for n, rows in pieces if n * rows
    ]
