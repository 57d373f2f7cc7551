"""Memory that one rank needs to train, by formula, before anything is allocated.

Legend: b micro-batch, s sequence, h hidden, f MLP width, n heads, v padded vocabulary, L layers, p tensor ranks, N
parameters of the rank, e bytes of a weight. Left out: the framework and its device context, fragmentation,
temporaries of single kernels.
"""

from dataclasses import dataclass

from ..config import Recompute, TransformerConfig
from ..partition import part_sizes, rows_at_once
from .flops import scored_tokens
from .params import count_parameters, parameter_sizes

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}  # fp8: bf16 numbers, rounded within a product
FP32_BYTES = 4
HALF_BYTES = 2
# In fp32: both moments, their random bits and their temporaries. A compiled update is one kernel and has none, one on
# a CPU has those of a small block.
MOMENT_TENSORS_IN_FLIGHT = 6.5
GIB = 2**30
# Tensors of the scores' size, in fp32, that the backward pass of an attention core holds besides the kept ones, without
# and with attention dropout: counted as in `tests/planner/test_peak_memory.py`, at 384 positions.
SCORES_IN_FLIGHT = {
    ("fp32", False): 2.0,
    ("fp32", True): 2.75,
    ("half", False): 1.4,
    ("half", True): 3.1,
    ("sdpa", True): 1.0,
}
PARTS = (  # of a `MemoryEstimate`, for tables
    "weights",
    "gradients",
    "optimizer_state",
    "activations",
    "logits",
    "recomputed_layer",
    "gradient_copy",
)


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
        early_gradients: gradients that exist before the backward pass begins.
        first_layer: activations of one layer, and the mask of the embedding: those left when the backward pass reaches
            the first layer.
        gradient_in_flight: gradients of the widest tensors of a layer.
        update: with bf16 moments on a GPU that no compiled kernel updates, temporaries of the largest parameter.
    """

    weights: int
    gradients: int
    optimizer_state: int
    activations: int
    logits: int
    recomputed_layer: int
    gradient_copy: int
    projection_gradient: int
    early_gradients: int
    first_layer: int
    gradient_in_flight: int
    update: int = 0

    @property
    def total(self) -> int:
        """Peak bytes: in the backward pass of the loss, of the last layer or of the first, or in the update.

        Between the layers activations are freed as gradients are added, so the peak is at one of the ends.
        """
        last_layer = self.projection_gradient + self.recomputed_layer + self.gradient_in_flight
        at_end = self.early_gradients + self.activations + max(self.logits, last_layer)
        at_start = self.gradients + self.gradient_copy + self.first_layer + self.gradient_in_flight
        return self.weights + self.optimizer_state + max(at_end, at_start, self.gradients + self.update)


def estimate_memory(
    config: TransformerConfig,
    tp_size: int,
    micro_batch_size: int,
    seq_length: int,
    dtype: str,
    dp_size: int = 1,
    on_gpu: bool = True,
    accumulates: bool = True,
    cuts_sequence: bool = False,
    zero1: bool = False,
    half_moments: bool = False,
    compiles: bool = False,
    pad_heads: bool = False,
) -> MemoryEstimate:
    """Memory of a rank in one training step, in bytes: within 5 % of the peak of all its tensors.

    A layer keeps, of replicated tensors, 4 b s h e: inputs of its two LayerNorms (another placement may have more), of
    QKV and of the MLP; and 2 b s h of dropout masks. Of tensors cut over p it keeps (4 h + 2 f) b s e / p: Q, K, V,
    input of the output projection, input and output of the GELU. With f = 4h and e = 2 that is b s h (10 + 24 / p), 34
    b s h at p = 1. Exact attention keeps besides, for each of the b n s^2 / p scores, the softmax (fp32 at least), and
    with dropout mask and result.

    SDPA keeps no scores if its kernel is a flash kernel. On a CPU there is none with attention dropout: softmax, noise
    and product stay, in fp32 at least.

    Full recomputation keeps only the layer's input, b s h e. Selective recomputation drops the scores and the output of
    the GELU, f b s e / p.

    Around the layers: input of the LayerNorm outside them, dropout mask of the embedding, gradient of the rows that are
    projected: b s h (e + 1) + m h e for m scored tokens; for BERT three tensors of the masked-LM head more, 3 m h e.

    Logits: those of `rows_at_once` rows, overwritten by their gradient, and a temporary wide copy; with the gradient of
    the projection, summed in fp32 at least where there are several pieces (on a CPU more than two), and a piece's part.

    Args:
        micro_batch_size: sequences b of one forward pass.
        seq_length: tokens s of a sequence.
        dtype: of weights, activations and gradients: fp64, fp32, bf16, fp16, or fp8, which counts as bf16.
        dp_size: data-parallel ranks; with several, gradients of all types are summed in a buffer.
        on_gpu: a GPU has a flash kernel with attention dropout and LayerNorms in half types, a CPU neither.
        accumulates: a step has several micro-batches, so gradients exist before the last backward pass. With one,
            on one data rank, fp32 and fp64 gradients are allocated as the backward pass frees activations.
        cuts_sequence: sequence parallelism: replicated tensors of a layer are cut over p too.
        zero1: a data rank has the optimizer state of the parameters it owns.
        half_moments: the moments are bf16, converted to fp32 tensor by tensor.
        compiles: the update of a tensor is one kernel, which converts them without temporaries.
        pad_heads: see `Layout`; dummy heads take memory as others do.

    Raises:
        ValueError: `tp_size` does not divide the model.

    Source: Korthikanti et al. 2022, section 4.1, for the shape of the formula; the terms are those of this code.
    """
    num_parameters = count_parameters(config, tp_size, pad_heads).per_rank
    sizes = parameter_sizes(config, tp_size, pad_heads)
    num_owned = max(part_sizes(sizes, dp_size)) if zero1 else num_parameters
    e, b, s, h = BYTES[dtype], micro_batch_size, seq_length, config.hidden_size
    num_scored, head = b * scored_tokens(config, s), config.traits.head
    is_half = e < FP32_BYTES
    own = b * s // tp_size if cuts_sequence else b * s  # tokens of a rank outside the parallel region
    layer = _layer_bytes(config, tp_size, b, s, own, e, on_gpu)
    mask = own * h if config.input_dropout > 0 else 0
    num_outer = config.placement.num_outer_norms
    around = num_outer * own * h * e + num_scored * h * e * (1 + head.num_tensors) + mask
    if is_half and not on_gpu:  # the input of a LayerNorm in fp32
        around += (num_outer * own + head.num_norms * num_scored) * h * (FP32_BYTES - e)
    is_full = config.recompute is Recompute.FULL
    recomputed = layer - own * h * e if is_full else 0
    if config.recompute is Recompute.SELECTIVE:
        recomputed = _core_bytes(config, tp_size, b, s, e, on_gpu)
    gradients = num_parameters * max(e, FP32_BYTES)
    columns = config.padded_vocab_size // tp_size
    moment = HALF_BYTES if half_moments else max(e, FP32_BYTES)
    has_buffer = is_half or zero1 or dp_size > 1
    widens_whole = half_moments and on_gpu and not compiles
    return MemoryEstimate(
        weights=num_parameters * e,
        gradients=gradients,
        optimizer_state=num_owned * (2 * moment + (FP32_BYTES if is_half else 0)),
        activations=around + config.num_layers * (own * h * e if is_full else layer),
        logits=_loss_bytes(num_scored, columns, h, e, on_gpu),
        recomputed_layer=recomputed,
        gradient_copy=columns * h * e if has_buffer else 0,
        projection_gradient=columns * h * e,
        early_gradients=gradients if has_buffer or accumulates else 0,
        first_layer=layer + mask,
        gradient_in_flight=_in_flight_bytes(config, tp_size, b, s, own, e, on_gpu),
        update=int(MOMENT_TENSORS_IN_FLIGHT * max(sizes) * FP32_BYTES) if widens_whole else 0,
    )


def _loss_bytes(num_rows: int, columns: int, h: int, e: int, on_gpu: bool) -> int:
    """Peak of `linear_cross_entropy`, without the gradient of the rows."""
    wide, at_once = max(e, FP32_BYTES), rows_at_once(columns, on_gpu)
    piece, weight = min(num_rows, at_once) * columns, columns * h
    kept = e if num_rows <= 2 * at_once and not on_gpu else wide  # a CPU adds two pieces without fp32
    total = weight * kept if num_rows > at_once else 0  # a single piece needs no sum
    return total + max(piece * (e + wide), piece * e + weight * e)


def _layer_bytes(config: TransformerConfig, tp_size: int, b: int, s: int, own: int, e: int, on_gpu: bool) -> int:
    """Activations that one layer keeps without full recomputation."""
    h, f = config.hidden_size, config.ffn_size
    mlp_width = f if config.recompute is Recompute.SELECTIVE else 2 * f
    num_norms = config.placement.num_layer_norms
    num_bytes = (2 + num_norms) * own * h * e + (4 * config.padded_width(tp_size) + mlp_width) * b * s * e // tp_size
    if e < FP32_BYTES and not on_gpu:
        num_bytes += num_norms * own * h * (FP32_BYTES - e)
    if config.hidden_dropout > 0:
        num_bytes += 2 * own * h  # masks, one byte per element
    kept = 0 if config.recompute is Recompute.SELECTIVE else _core_bytes(config, tp_size, b, s, e, on_gpu)
    return num_bytes + kept


def keeps_scores(config: TransformerConfig, on_gpu: bool) -> bool:
    """Whether the attention core keeps its scores for the backward pass; a flash kernel does not."""
    return config.attention == "exact" or not (on_gpu or config.attention_dropout == 0)


def _core_bytes(config: TransformerConfig, tp_size: int, b: int, s: int, e: int, on_gpu: bool) -> int:
    """Bytes that the attention core of a layer keeps for its backward pass; none with a flash kernel."""
    width, n, wide = config.padded_width(tp_size), config.padded_heads(tp_size), max(e, FP32_BYTES)
    if not keeps_scores(config, on_gpu):
        return 0
    if config.attention != "exact":
        scores = b * n * s * s * 3 * wide
        return (scores + 3 * b * s * width * (wide - e)) // tp_size  # half types are widened, Q, K, V too
    if config.attention_dropout > 0:
        return b * n * s * s * (wide + 1 + e) // tp_size
    return b * n * s * s * (wide if e == wide else wide + e) // tp_size


def _in_flight_bytes(config: TransformerConfig, tp_size: int, b: int, s: int, own: int, e: int, on_gpu: bool) -> int:
    """Temporary gradients in the last layer at its peak, beyond the activations of the whole layer.

    In the MLP b s f e / p; in the attention core SCORES_IN_FLIGHT tensors of its scores in fp32, when the MLP's
    activations are freed already.
    """
    h, f, wide = config.hidden_size, config.ffn_size, max(e, FP32_BYTES)
    of_mlp = b * s * f * e // tp_size
    if not keeps_scores(config, on_gpu):
        return of_mlp
    kind = "sdpa" if config.attention != "exact" else "fp32" if e == wide else "half"
    scores = SCORES_IN_FLIGHT[kind, config.attention_dropout > 0] * b * config.padded_heads(tp_size) * s * s * wide
    mlp_width = f if config.recompute is Recompute.SELECTIVE else 2 * f
    freed = 2 * own * h * e + mlp_width * b * s * e // tp_size + (own * h if config.hidden_dropout > 0 else 0)
    return max(of_mlp, int(scores / tp_size) - freed)
