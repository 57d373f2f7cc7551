"""The collectives of a step, by formula: each with its group, count and bytes.

Legend: b micro-batch, s sequence, h hidden, L layers, N parameters of the rank, e bytes of a weight.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass

from ..config import Layout, TransformerConfig
from ..partition import rows_at_once
from .flops import num_recomputed_whole
from .params import copied_parameters, rank_buffer, rank_parameters, stage_placements
from .workload import Workload

OUTPUTS, INPUTS, INPUTS_AGAIN = (f"attention and MLP {what}" for what in ("outputs", "inputs", "inputs, again"))
OUTPUT_GRADIENTS, INPUT_GRADIENTS = (f"gradients of attention and MLP {what}" for what in ("outputs", "inputs"))
HIDDEN_STATES, HIDDEN_GRADIENTS = "hidden states", "gradients of the hidden states"
TIED_GRADIENT, TIED_WEIGHT = "gradient of the copied word embedding", "word embedding"
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
    """A number of equal collectives of one rank, or of messages to another stage.

    Args:
        what: what is sent.
        kind: `all_reduce`, `all_gather`, `reduce_scatter`, `broadcast` or `send`.
        group: `tensor`, `pipeline` or `data`.
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


def micro_batch_collectives(job: Workload, layout: Layout, stage: int = 0) -> list[Collective]:
    """Messages of one rank of a stage in the forward and backward pass of one micro-batch; none for one rank.

    Those of the tensor group:

    Forward: 2 all-reduces per layer (g after attention and MLP) and 1 of the embedding. Backward: 2 per layer (f) and 1
    of the output projection. All of b s h e bytes, the last for BERT of m h e, m its scored tokens. Full recomputation
    repeats the forward's, except that in eager layers without hidden dropout torch's checkpoint stops once it has what
    the backward pass needs: in a pre-norm layer that is before the last all-reduce. Layers on a GPU count as compiled,
    which are recomputed to their end. The loss: 3 of b s (BERT: m) numbers in fp32 (maximum, sum, picked logit), never
    of b s v, for the `rows_at_once` of the device.

    With sequence parallelism each g is a reduce-scatter and, backward, an all-gather; each f an all-gather and,
    backward, the same all-gather again and a reduce-scatter; and one all-gather follows the last layer. With
    `batch_halves` those of the layers are twice as many and half as large.

    Of several stages only the first has those of the embedding, and only the last those after the layers. Each sends
    the hidden states [b, s, h] to the next, with sequence parallelism [b, s/p, h], and their gradient back.

    A teacher has those of its forward pass up to its projection. The loss then sends two maxima and five sums of a row
    in 2 all-reduces; with a cache also maximum and sum of the student's logits that are not in it.

    Raises:
        ValueError: `layout.tp_size` does not divide the model.

    Source: section 3, Figures 3 and 4; Korthikanti et al. 2022, section 4.2.2; those of the recomputation were counted
    in a traced run.
    """
    config, parts, width = job.config, layout.batch_parts, job.config.hidden_size * job.weight_bytes
    config.check_tensor_parallel(layout.tp_size, layout.pad_heads)
    is_first, is_last = stage == 0, stage == layout.pp_size - 1
    found, recomputed, placements = [], [], stage_placements(config, layout, stage)
    for what, phase, sends in ((HIDDEN_STATES, "forward", not is_last), (HIDDEN_GRADIENTS, "backward", not is_first)):
        if sends:
            found.append(Collective(what, "send", "pipeline", phase, 1, job.own_tokens(layout) * width))
    if layout.tp_size == 1:
        return found
    for each in micro_batch_collectives(job.teacher_job, layout) if job.teacher is not None else ():
        if each.phase == "forward" and each.what != "loss":
            found.append(dataclasses.replace(each, what=f"teacher: {each.what}"))
    per_layer = 2 * parts * len(placements)
    for what, kind, phase, is_of_layers in _SEQUENCE if layout.cuts_sequence else _PLAIN:
        if not (is_of_layers or is_first) and "embedding" in what:
            continue
        if not (is_of_layers or is_last) and "last layer" in what:
            continue
        number, num_bytes = (per_layer, job.tokens * width // parts) if is_of_layers else (1, job.tokens * width)
        found.append(Collective(what, kind, "tensor", phase, number, num_bytes))
        if is_of_layers and phase == "forward" and config.recompute == "full":
            if what == OUTPUTS and not job.on_gpu:  # the last one of a layer, of the second half, may not be needed
                number -= len(placements) - num_recomputed_whole(config, placements)
            recomputed.append(Collective(f"{what}, recomputed", kind, "tensor", "backward", number, num_bytes))
    if not is_last:
        return [*found, *recomputed]
    at_once = rows_at_once(config.padded_vocab_size // layout.tp_size, job.on_gpu)
    pieces = [(job.num_scored // at_once, at_once), (1, job.num_scored % at_once)]
    sizes = Counter((2, 5) if job.teacher is not None else (1, 1, 2, 5) if job.top_k else (1, 1, 1))  # per row
    loss = [
        Collective("loss", "all_reduce", "tensor", "forward", times * number, size * rows * job.wide_bytes)
        for number, rows in pieces
        if number * rows
        for size, times in sizes.items()
    ]
    what, num_bytes = "gradient of the output projection", job.num_scored * width
    return [*found, *recomputed, *loss, Collective(what, "all_reduce", "tensor", "backward", 1, num_bytes)]


def step_collectives(job: Workload, layout: Layout, dp_rank: int | None = None, stage: int = 0) -> list[Collective]:
    """Messages of one rank of a stage in one optimizer step.

    Those of every micro-batch; the pieces of the gradient buffer (`plan_buffer`) over the data group, 4 N bytes for
    half types (added in fp32) and N e for others, and with ZeRO stage 1 those of the updated weights; the gradients of
    the `replicated_parameters` over the tensor group, and where some are partial (sequence parallelism, `qk_norm`) and
    without ZeRO also over the data group; the gradient norm over the tensor group and the stages; the tied word
    embedding, whose gradient the last stage sends to the first, which sends the weight back. Left out: the few numbers
    of loss terms and counts, of the watchdog and of the replica check.

    Args:
        dp_rank: of the rank; with ZeRO stage 1 data ranks update different parameters. None: the one that sends most.

    Raises:
        ValueError: `layout.tp_size` does not divide the model.
    """
    number = job.num_micro_batches(layout)
    found = [dataclasses.replace(c, count=c.count * number) for c in micro_batch_collectives(job, layout, stage)]
    if layout.dp_size > 1:
        buffer = rank_buffer(job.config, layout, job.on_gpu, stage)
        kind = "reduce_scatter" if layout.cuts_optimizer else "all_reduce"
        num_bytes = buffer.piece_size * job.wide_bytes
        found.append(Collective("gradients", kind, "data", "gradients", buffer.num_pieces, num_bytes))
        if layout.cuts_optimizer:
            num_bytes = buffer.piece_size * job.weight_bytes
            found.append(Collective("weights", "all_gather", "data", "optimizer", buffer.num_pieces, num_bytes))
    by_rank = [0] * layout.dp_size
    if layout.tp_size > 1:
        by_rank = replicated_parameters(job.config, layout, job.on_gpu, stage)
    replicated = (max(by_rank) if dp_rank is None else by_rank[dp_rank]) * job.wide_bytes
    if replicated:
        what = "gradients of replicated parameters"
        found.append(Collective(what, "all_reduce", "tensor", "gradients", 1, replicated))
        are_partial = layout.cuts_sequence or job.config.qk_norm
        if are_partial and layout.dp_size > 1 and not layout.cuts_optimizer:
            found.append(Collective(f"{what}, from data rank 0", "broadcast", "data", "gradients", 1, replicated))
    table = copied_parameters(job.config, layout, layout.pp_size - 1)
    if layout.pp_size > 1 and stage == layout.pp_size - 1:
        found.append(Collective(TIED_GRADIENT, "send", "pipeline", "gradients", 1, table * job.wide_bytes))
    elif layout.pp_size > 1 and stage == 0:
        found.append(Collective(TIED_WEIGHT, "send", "pipeline", "optimizer", 1, table * job.weight_bytes))
    groups = ("tensor", layout.tp_size > 1), ("pipeline", layout.pp_size > 1), ("data", layout.cuts_optimizer)
    for group, cuts in groups:
        if cuts:
            found.append(Collective("gradient norm", "all_reduce", group, "optimizer", 1, _GRADIENT_NORM_BYTES))
    return found


def replicated_parameters(config: TransformerConfig, layout: Layout, on_gpu: bool, stage: int = 0) -> list[int]:
    """Parameters that every tensor rank holds whole.

    Per layer the LayerNorms and two row biases; outside the layers the LayerNorms, the position and type embeddings,
    and what the heads do not shard.

    Returns:
        by data rank the number of elements: of all, with ZeRO stage 1 of those that it updates.
    """
    buffer = rank_buffer(config, layout, on_gpu, stage)
    cut, found = buffer.piece_size // buffer.num_cuts, [0] * buffer.num_cuts
    for each, start in zip(rank_parameters(config, layout, stage), buffer.starts, strict=True):
        for first in () if each.is_sharded else range(start // cut * cut, start + each.size, cut):
            found[first // cut % buffer.num_cuts] += min(start + each.size, first + cut) - max(start, first)
    return found if layout.cuts_optimizer else found * layout.dp_size
