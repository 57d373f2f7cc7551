"""Memory that one rank needs to train, by formula, before anything is allocated.

Legend: b micro-batch, s sequence, h hidden, f MLP width, n heads, v padded vocabulary, L layers, p tensor ranks, N
parameters of the rank, e bytes of a weight. Left out: the framework and its device context, fragmentation,
temporaries of single kernels, the padding of the gradient buffer.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ..config import Layout
from ..partition import UPDATED_AT_ONCE_ON_GPU, rows_at_once
from .params import copied_parameters, distinct_stages, num_rank_parameters, rank_parameters
from .workload import FP32_BYTES, HALF_BYTES, Workload

GIB = 2**30
Candidate = tuple[Workload, Layout]  # a job, with its micro-batch and recomputation mode, in a layout
# Memory used by the framework, its context and fragmentation: an allowance on a GPU; on a CPU the 0.3 GiB of a process
# that has imported torch and Lightning, plus some.
GPU_RESERVED_GIB, CPU_RESERVED_GIB = 2.0, 0.5
# In fp32: both moments, their random bits and their temporaries. A compiled update is one kernel and has none, one on
# a CPU has those of a small block.
MOMENT_TENSORS_IN_FLIGHT = 6.5
# Tensors of the scores' size, in fp32, that the backward pass of an attention core holds besides the kept ones, without
# and with attention dropout: counted as in `tests/planner/test_peak_memory.py`, at 384 positions.
SCORES_IN_FLIGHT = {
    ("fp32", False): 2.0,
    ("fp32", True): 2.75,
    ("half", False): 1.4,
    ("half", True): 3.1,
    ("sdpa", True): 1.0,
}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank.

    Args:
        weights: N e.
        gradients: N e; of half types summed in fp32, 4 N.
        optimizer_state: two moments, 2 N e; for half types in fp32 with masters, 12 N; with moments in bf16 4 N less.
        activations: what the forward pass keeps for the backward pass until the end of a micro-batch.
        logits: of the rows that are projected together, with the sum of the projection's gradient, [v/p, h].
        recomputed_layer: what is recomputed at a time, the activations of one layer or of one attention core; the
            logits are freed by then.
        gradient_copy: the word embedding's gradient until it is in the optimizer's buffer.
        projection_gradient: of the word embedding from the loss, until that of the embedding is added.
        first_layer: activations of one layer, and the mask of the embedding: those left when the backward pass reaches
            the first layer.
        gradient_in_flight: gradients of the widest tensors of a layer.
        update: with bf16 moments on a GPU that no compiled kernel updates, temporaries of a part.
        teacher: weights of the teacher, N_t e.
        teacher_rows: what the loss reads of the teacher, [m, h_t], or of its cache; kept through both passes.
        teacher_forward: activations at the peak of the teacher's forward pass, which precedes the student's.
    """

    weights: int
    gradients: int
    optimizer_state: int
    activations: int
    logits: int
    recomputed_layer: int
    gradient_copy: int
    projection_gradient: int
    first_layer: int
    gradient_in_flight: int
    update: int
    teacher: int = 0
    teacher_rows: int = 0
    teacher_forward: int = 0

    @property
    def total(self) -> int:
        """Peak bytes: in the teacher's forward pass, in the backward pass of the loss, of the last layer or of the
        first, or in the update.

        Between the layers activations are freed, so the peak is at one of the ends.
        """
        last_layer = self.projection_gradient + self.recomputed_layer + self.gradient_in_flight
        at_end = self.activations + max(self.logits, last_layer)
        at_start = self.gradient_copy + self.first_layer + self.gradient_in_flight
        in_student = self.teacher_rows + max(at_end, at_start)
        state = self.weights + self.optimizer_state + self.gradients + self.teacher
        return state + max(self.teacher_forward, in_student, self.update)


def estimate_memory(job: Workload, layout: Layout) -> MemoryEstimate:
    """Memory of a rank in one training step, of several stages of that which needs most; see `stage_memory`."""
    return max(
        (stage_memory(job, layout, stage) for stage in distinct_stages(job.config, layout)), key=lambda each: each.total
    )


def first_that_fits(candidates: Iterable[Candidate], usable: int) -> tuple[Workload, Layout, int] | None:
    """The first candidate whose rank needs at most `usable` bytes, and what it needs; None if there is none."""
    needs = ((*each, estimate_memory(*each).total) for each in candidates)
    return next((each for each in needs if each[-1] <= usable), None)


def stage_memory(job: Workload, layout: Layout, stage: int = 0) -> MemoryEstimate:
    """Memory of a rank in one training step, in bytes: within 5 % of the peak of all its tensors.

    A layer keeps, of replicated tensors, 4 b s h e: inputs of its two LayerNorms (another placement may have more), of
    QKV and of the MLP; and 2 b s h of dropout masks. Of tensors cut over p it keeps (4 h + 2 f) b s e / p: Q, K, V,
    input of the output projection, input and output of the GELU. With f = 4h and e = 2 that is b s h (10 + 24 / p), 34
    b s h at p = 1. Exact attention keeps besides, for each of the b n s^2 / p scores, the softmax (fp32 at least), and
    with dropout mask and result. Sequence parallelism cuts the replicated tensors of a layer over p too.

    A compiled layer of a GPU keeps one of the two masks and hashes the other again, and of exact attention the softmax
    alone. In float8 it keeps both masks, but computes the outputs of LayerNorm and GELU again, and with sequence
    parallelism those of LayerNorm in every type: counted from generated code, `tests/cuda/test_layer_bytes.py`.

    SDPA keeps no scores if its kernel is a flash kernel. On a CPU there is none with attention dropout: softmax, noise
    and product stay, in fp32 at least.

    Full recomputation keeps only the layer's input, b s h e. Selective recomputation drops the scores and the output of
    the GELU, f b s e / p; the last layer has one of the two again in its backward pass.

    Around the layers: input of the LayerNorm outside them, dropout mask of the embedding, gradient of the rows that are
    projected: b s h (e + 1) + m h e for m scored tokens; for BERT three tensors of the masked-LM head more, 3 m h e.

    Logits: those of `rows_at_once` rows, overwritten by their gradient, and a temporary wide copy; with the gradient of
    the projection, summed in fp32 at least where there are several pieces (on a CPU more than two), and a piece's part.

    Stage i of P keeps the activations of P - i micro-batches, with the hidden states that it has sent, b s h e each.
    Only the first has what belongs to the embedding, only the last what belongs to the loss.

    Raises:
        ValueError: `layout.tp_size` does not divide the model.

    Source: Korthikanti et al. 2022, section 4.1, for the shape of the formula; the terms are those of this code.
    """
    config, e, h, own = job.config, job.weight_bytes, job.config.hidden_size, job.own_tokens(layout)
    is_first, is_last, is_half = stage == 0, stage == layout.pp_size - 1, e < FP32_BYTES
    num_parameters = num_rank_parameters(config, layout, stage)
    num_updated = -(-num_parameters // (layout.dp_size if layout.cuts_optimizer else 1))
    num_parameters += copied_parameters(config, layout, stage)
    layer, input_bytes = _layer_bytes(job, layout), own * h * e
    mask = own * h if is_first and config.input_dropout > 0 else 0
    placement, head, num_scored = config.placement, config.traits.head, job.num_scored if is_last else 0
    num_outer = is_first * placement.after_embedding + is_last * placement.after_stack
    around = num_outer * input_bytes + num_scored * h * e * (1 + head.num_tensors) + mask
    if is_half and not job.on_gpu:  # the input of a LayerNorm in fp32
        around += (num_outer * own + head.num_norms * num_scored) * h * (FP32_BYTES - e)
    if not is_last:  # what it has sent
        around += input_bytes
    kept, recomputed = {
        "none": (layer, 0),
        "selective": (layer, max(_core_bytes(job, layout), _mlp_bytes(job, layout))),
        "full": (input_bytes, layer - input_bytes),
    }[config.recompute]
    embedding = config.padded_vocab_size // layout.tp_size * h * e if is_first or is_last else 0
    num_kept = min(layout.pp_size - stage, job.num_micro_batches(layout))
    moment = HALF_BYTES if job.half_moments else job.wide_bytes
    is_widened = job.half_moments and job.on_gpu and not job.compiles
    widened = min(num_updated, UPDATED_AT_ONCE_ON_GPU) if is_widened else 0
    return MemoryEstimate(
        weights=num_parameters * e,
        gradients=num_parameters * job.wide_bytes,
        optimizer_state=num_updated * (2 * moment + (FP32_BYTES if is_half else 0)),
        activations=num_kept * (around + len(config.stages(layout.pp_size)[stage]) * kept),
        logits=_loss_bytes(job, layout) if is_last else 0,
        recomputed_layer=recomputed,
        gradient_copy=embedding,
        projection_gradient=embedding if is_last else 0,
        first_layer=layer + mask,
        gradient_in_flight=_in_flight_bytes(job, layout),
        update=int(MOMENT_TENSORS_IN_FLIGHT * widened * FP32_BYTES),
        **_teacher_bytes(job, layout),
    )


def _loss_bytes(job: Workload, layout: Layout) -> int:
    """Peak of `linear_cross_entropy`, without the gradient of the rows."""
    columns, e, wide = job.config.padded_vocab_size // layout.tp_size, job.weight_bytes, job.wide_bytes
    at_once, weight = rows_at_once(columns, job.on_gpu), columns * job.config.hidden_size
    piece = min(job.num_scored, at_once) * columns
    buffers, temporary = logits_bytes(job)
    kept = e if job.num_scored <= 2 * at_once and not job.on_gpu else wide  # a CPU adds two pieces without fp32
    total = weight * kept if job.num_scored > at_once else 0  # a single piece needs no sum
    return total + max(piece * (buffers + temporary), piece * buffers + weight * e)


def logits_bytes(job: Workload) -> tuple[int, int]:
    """Bytes per logit of the loss: of the student's and the teacher's, and of temporaries.

    A teacher's logits have the weights' type, those that a cache gives are wide. Eager code needs a wide temporary for
    each of the two distributions, and a mask.
    """
    e, wide = job.weight_bytes, job.wide_bytes
    if job.teacher is None and job.top_k is None:
        return e, wide
    return 2 * e if job.teacher is not None else e + wide, wide if _is_compiled(job) else 2 * wide + 1


def _teacher_bytes(job: Workload, layout: Layout) -> dict[str, int]:
    """The parts of `MemoryEstimate` that a teacher adds; of a cache int64 ids and wide log-probabilities.

    In a layer without a backward pass the most is alive at the end of the MLP: the sums before and after attention, the
    embedding, the MLP's input and output, 5 b s h e, and input and output of the GELU; or in the softmax of exact
    attention, whose scores are there twice in fp32 at least, and of half types once more.
    """
    teacher, k = job.teacher_job, job.top_k
    if teacher is None:
        return {"teacher_rows": job.num_scored * (8 * k + (k + 1) * job.wide_bytes)} if k else {}
    config, e, wide, p = teacher.config, teacher.weight_bytes, teacher.wide_bytes, layout.tp_size
    row = teacher.tokens * config.hidden_size * e
    forward = 5 * row + 2 * config.ffn_size * teacher.tokens * e // p
    if keeps_scores(teacher):
        scores = teacher.tokens * teacher.seq_length * config.padded_heads(p) * (2 * wide + (e if e < wide else 0))
        forward = max(forward, 4 * row + (3 * config.padded_width(p) * teacher.tokens * e + scores) // p)
    rows = job.num_scored * config.hidden_size * e
    return {"teacher": num_rank_parameters(config, layout) * e, "teacher_rows": rows, "teacher_forward": forward}


def _is_compiled(job: Workload) -> bool:
    """Whether Inductor chooses what a layer keeps on a GPU."""
    return job.on_gpu and job.compiles


def _mlp_bytes(job: Workload, layout: Layout) -> int:
    """Input and output of the GELU that a layer keeps; only the input where the output is computed again."""
    gelu_again = job.config.recompute == "selective" or (_is_compiled(job) and job.dtype == "fp8")
    number = 1 if gelu_again else 2
    return number * job.config.ffn_size * job.tokens * job.weight_bytes // layout.tp_size


def _layer_bytes(job: Workload, layout: Layout) -> int:
    """Activations that one layer keeps without full recomputation."""
    config, e, own = job.config, job.weight_bytes, job.own_tokens(layout) * job.config.hidden_size
    num_norms, width = config.placement.num_layer_norms, config.padded_width(layout.tp_size)
    norms_again = _is_compiled(job) and (job.dtype == "fp8" or layout.cuts_sequence)
    num_inputs = (0 if config.placement.before else 1) if norms_again else 2  # of QKV and MLP, beside the LayerNorms'
    num_bytes = (num_norms + num_inputs) * own * e
    num_bytes += 4 * width * job.tokens * e // layout.tp_size + _mlp_bytes(job, layout)
    if e < FP32_BYTES and not job.on_gpu:
        num_bytes += num_norms * own * (FP32_BYTES - e)
    if config.qk_norm:  # of Q and K as the projection gave them
        num_bytes += 2 * width * job.tokens * (e if job.on_gpu else job.wide_bytes) // layout.tp_size
    if config.hidden_dropout > 0:
        num_masks = 1 if _is_compiled(job) and job.dtype != "fp8" else 2
        num_bytes += num_masks * own  # one byte per element
    return num_bytes + (0 if config.recompute == "selective" else _core_bytes(job, layout))


def keeps_scores(job: Workload) -> bool:
    """Whether the attention core keeps its scores for the backward pass; a flash kernel does not."""
    return job.config.attention == "exact" or not (job.on_gpu or job.config.attention_dropout == 0)


def _core_bytes(job: Workload, layout: Layout) -> int:
    """Bytes that the attention core of a layer keeps for its backward pass; none with a flash kernel."""
    config, e, wide = job.config, job.weight_bytes, job.wide_bytes
    if not keeps_scores(job):
        return 0
    scores = job.tokens * job.seq_length * config.padded_heads(layout.tp_size)  # b n s^2
    if config.attention != "exact":  # half types are widened, Q, K, V too
        widened = 3 * job.tokens * config.padded_width(layout.tp_size) * (wide - e)
        return (scores * 3 * wide + widened) // layout.tp_size
    if _is_compiled(job):
        return scores * wide // layout.tp_size
    if config.attention_dropout > 0:
        return scores * (wide + 1 + e) // layout.tp_size
    return scores * (wide if e == wide else wide + e) // layout.tp_size


def _in_flight_bytes(job: Workload, layout: Layout) -> int:
    """Temporary gradients in the last layer at its peak, beyond the activations of the whole layer.

    In the MLP b s f e / p; in the attention core SCORES_IN_FLIGHT tensors of its scores in fp32, when the MLP's
    activations are freed already.
    """
    config, e, wide = job.config, job.weight_bytes, job.wide_bytes
    of_mlp = job.tokens * config.ffn_size * e // layout.tp_size
    if not keeps_scores(job):
        return of_mlp
    kind = "sdpa" if config.attention != "exact" else "fp32" if e == wide else "half"
    b, s, heads = job.micro_batch_size, job.seq_length, config.padded_heads(layout.tp_size)
    scores = SCORES_IN_FLIGHT[kind, config.attention_dropout > 0] * b * heads * s * s * wide
    own = job.own_tokens(layout) * config.hidden_size
    freed = 2 * own * e + _mlp_bytes(job, layout) + (own if config.hidden_dropout > 0 else 0)
    return max(of_mlp, int(scores / layout.tp_size) - freed)


def checkpoint_bytes(job: Workload, layout: Layout) -> int:
    """Bytes of a checkpoint that one rank writes, about: its weights, in fp32 at least, and their moments.

    With `checkpoint.async`, and with ZeRO stage 1, the rank holds them in host memory. Left out: tensors that all
    tensor ranks have are written by one of them, a fraction of a per cent.
    """
    moment, found = HALF_BYTES if job.half_moments else job.wide_bytes, []
    for stage in range(layout.pp_size):
        sizes = [each.size for each in rank_parameters(job.config, layout, stage)]
        found += [sum(sizes) * (job.wide_bytes + 2 * moment) // layout.dp_size, max(sizes) * job.wide_bytes]
    return max(found)


def usable_bytes(memory_bytes: int, on_gpu: bool, num_ranks: int = 1) -> int:
    """Bytes for the tensors of each rank on a device that `num_ranks` share; negative if nothing is left."""
    return memory_bytes // num_ranks - int((GPU_RESERVED_GIB if on_gpu else CPU_RESERVED_GIB) * GIB)
