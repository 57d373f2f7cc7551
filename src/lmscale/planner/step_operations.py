"""Every operation of one optimizer step of one rank: FLOPs, bytes and launches, counted from this project's code.

Legend: b micro-batch, s sequence, h hidden, f MLP width, v padded vocabulary, L layers, p tensor ranks, N parameters of
the rank, e bytes of a weight, m scored tokens.

The rows of a layer are the kernels that torch.compile generates for it on a GPU; `tests/cuda/test_layer_bytes.py`
compares both. Around the layers operations run one by one. Collectives are in `communication.py`.
"""

from collections import Counter

from ..config import Layout
from ..partition import rows_at_once
from .layer_operations import LayerCounts
from .memory import logits_bytes
from .operation import Operation, product, times
from .params import rank_buffer, rank_parameters, stage_placements
from .workload import FP32_BYTES, HALF_BYTES, Workload

OPTIMIZER_LAUNCHES = 38  # of the norm, the counters, the groups' rates and the update
HOST_SYNCS = 0  # per step
LAUNCHES_OF_A_LOSS_CHUNK = 44  # besides its three products
OF_HEAD = ("token head", "sequence head", "logits", "loss", "sum of the chunks")  # begin the names of `_head`
_NOT_OF_A_TEACHER = ("sequence head", "logits, gradient", "loss", "sum of the chunks")  # in a forward pass
ELEMENTS_PER_LAUNCH = 320 * 65536  # of torch's multi-tensor kernels


def step_operations(job: Workload, layout: Layout, stage: int = 0) -> list[Operation]:
    """The operations of one rank of a stage in one optimizer step on a GPU with compiled layers.

    Their FLOPs are those of `hardware_flops_per_step`, over p, and of the family's dense heads, which every rank
    computes whole, except that selective recomputation leaves a fused attention core alone.

    With a teacher also those of its forward pass, as far as the loss needs them. The loss then reads both logits twice.

    Raises:
        ValueError: `layout.tp_size` does not divide the model.
    """
    config, parts, once = job.config, layout.batch_parts, []
    for placement, number in Counter(stage_placements(config, layout, stage)).items():
        layer = LayerCounts(job, layout, placement)
        in_layer = layer.forward("forward") + layer.backward()
        if config.recompute == "full":
            in_layer += layer.forward("recomputation")
        elif config.recompute == "selective":
            in_layer += layer.core_again()
        once += [times(number * parts, operation) for operation in in_layer]
        if parts > 1:
            once.append(times(number, layer.gradients_read_again()))
    is_first, is_last = stage == 0, stage == layout.pp_size - 1
    once += [*(_embedding(job, layout) if is_first else ()), *(_after_stack(job, layout) if is_last else ())]
    once += _head(job, layout) if is_last else []
    number = job.num_micro_batches(layout)
    found = [*(times(number, operation) for operation in once), *_update(job, layout, stage)]
    for each in step_operations(job.teacher_job, layout) if job.teacher is not None else ():
        if each.phase == "forward" and not each.name.startswith(_NOT_OF_A_TEACHER):
            found.append(each._replace(name=f"teacher: {each.name}"))
    return found


def _embedding(job: Workload, layout: Layout) -> list[Operation]:
    """The embeddings. The lookups run one by one; what follows them is compiled."""
    config, h, e = job.config, job.config.hidden_size, job.weight_bytes
    whole, own = job.tokens * h, job.own_tokens(layout) * h
    table = config.padded_vocab_size // layout.tp_size * h * e
    has_types, has_norm = config.traits.num_token_types > 0, config.placement.after_embedding
    found = [
        Operation("embedding", "forward", int(2.5 * whole * e), 2 * whole * e, 7),
        # the lookup's gradient is added to that of the output projection
        Operation("embedding", "backward", 2 * whole * e + 2 * table, whole * e + 2 * table, 4),
    ]
    if has_types:
        found.append(Operation("token types", "forward", own * e, own * e))
        found.append(Operation("token types", "backward", own * e, 0))
    name, changes = "embedding sum, dropout", has_norm or config.input_dropout > 0
    found.append(Operation(name, "forward", (1 + has_types) * own * e, (1 + has_norm) * own * e))
    # The gradient of the positions is summed in the same kernel, but with a LayerNorm in one of its own.
    read, launches = (3, 4) if has_norm else (1, 1)
    found.append(Operation(name, "backward", read * own * e, changes * own * e, launches))
    return found


def _after_stack(job: Workload, layout: Layout) -> list[Operation]:
    """The LayerNorm after the last layer, and the gathering of its output."""
    whole, own = (tokens * job.config.hidden_size * job.weight_bytes for tokens in (job.tokens, job.own_tokens(layout)))
    found = []
    if layout.cuts_sequence and layout.batch_parts > 1:  # gathered rank by rank, each with tokens of both halves
        found.append(Operation("output of the last layer, gathered", "forward", whole, whole))
        found.append(Operation("gradient of this rank's tokens", "backward", own, own))
    if job.config.placement.after_stack:
        found.append(Operation("final LayerNorm", "forward", own, own))
        found.append(Operation("final LayerNorm", "backward", 4 * own, own, 3))
    return found


def _head(job: Workload, layout: Layout) -> list[Operation]:
    """The family's dense heads, then projection and loss in chunks, with their gradients in the forward pass."""
    h, columns, e = job.config.hidden_size, job.config.padded_vocab_size // layout.tp_size, job.weight_bytes
    rows, sizes, found = job.num_scored, job.config.traits.head, []
    heads = ("token head", rows), ("sequence head", job.micro_batch_size)
    for (name, num), multiply_adds in zip(heads, sizes.multiply_adds(h), strict=True):
        if multiply_adds:
            n = multiply_adds // h
            found.append(product(name, "forward", num, n, h, e))
            found.append(product(name, "backward", num, h, n, e))
            found.append(product(name, "backward", n, h, num, e))
    if sizes.num_tensors:  # rows picked, activation, LayerNorm
        found.append(Operation("token head, GELU and LayerNorm", "forward", 3 * rows * h * e, 3 * rows * h * e, 3))
        passes = 8 * rows * h * e
        found.append(Operation("token head, GELU and LayerNorm", "backward", passes, (rows + job.tokens) * h * e, 7))
    at_once = rows_at_once(columns, on_gpu=True)
    several, (both, _) = rows > at_once, logits_bytes(job)
    for num, chunk in ((rows // at_once, at_once), (1, rows % at_once)):
        if num * chunk == 0:
            continue
        logits, table = chunk * columns, columns * h
        cached = 0 if job.top_k is None else logits * job.wide_bytes  # eager passes add what the cache leaves out
        biased = logits * e if sizes.num_tensors else 0  # its gradient is a sum of its own
        read = 2 * logits * both + 6 * cached + biased
        found += [
            times(num, product("logits", "forward", chunk, columns, h, e)),
            times(num, product("logits, gradient of the input", "forward", chunk, h, columns, e)),
            times(num, product("logits, gradient of the weight", "forward", columns, h, chunk, e)),
            times(num, Operation("loss", "forward", read, logits * e + 5 * cached, LAUNCHES_OF_A_LOSS_CHUNK)),
        ]
        if several:
            found.append(times(num, Operation("sum of the chunks", "forward", table * (4 + e), table * 4)))
    weight = columns * h
    rounded = (4 * weight, e * weight) if several else (0, 0)
    scaled = (weight + rows * h) * e  # by the gradient of the loss
    return [*found, Operation("loss", "backward", scaled + rounded[0], scaled + rounded[1], 3)]


def _update(job: Workload, layout: Layout, stage: int) -> list[Operation]:
    """The gradient buffer, once per micro-batch, and the optimizer."""
    e, wide, parameters = job.weight_bytes, job.wide_bytes, rank_parameters(job.config, layout, stage)
    n, num_added = sum(each.size for each in parameters), job.num_micro_batches(layout) - 1
    added = Operation("gradient buffer", "gradients", n * (e + wide), n * wide, len(parameters))
    found = [added._replace(read=n * e)]  # the first micro-batch is copied, the others are added
    if num_added:
        found.append(times(num_added, added))
    n //= rank_buffer(job.config, layout, job.on_gpu, stage).num_cuts
    # Per parameter the norm reads the gradient; one kernel reads gradient, master and moments, and writes master,
    # moments and the weight of a half type (`tests/cuda/test_optimizer_kernels.py`).
    moments = 2 * (HALF_BYTES if job.half_moments else wide)
    read, written = 3 * wide + moments, wide + moments + (e if e < FP32_BYTES else 0)
    launches = OPTIMIZER_LAUNCHES + -(-n // ELEMENTS_PER_LAUNCH)
    return [*found, Operation("AdamW", "optimizer", n * read, n * written, launches)]
