"""Floating-point operations of a training step, and the dense peaks of devices."""

import re
from collections.abc import Sequence
from typing import Any

from ..config import TransformerConfig

TERA = 1e12

# Dense peaks in TFLOP/s, never the figure with structured sparsity, which is twice as high. Columns: fp16 and bf16 with
# fp32 accumulation on tensor cores; TF32; plain fp32; fp64 (on tensor cores where there are any); float8. None: the
# device cannot, or its sheet does not say. A device is recognised by these words of its name, so a variant that is not
# listed (MIG slice, laptop, "Ti") stays unknown. First match counts.
#                  words               fp16    bf16    TF32    fp32   fp64  fp8
_PEAKS: tuple[tuple[tuple[str, ...], tuple[float | None, ...]], ...] = (
    # The V100 of 450 W in a DGX-2H, "V100-SXM3-32GB-H": 30 % of its peak are the paper's 39 TFLOP/s (section 5.1); the
    # other types in the proportion of NVIDIA's data sheets
    (("V100", "SXM3", "H"), (130.0, None, None, 16.4, 8.2, None)),
    # NVIDIA V100 data sheet, 2020
    (("V100", "SXM2"), (125.0, None, None, 15.7, 7.8, None)),
    (("V100", "SXM3"), (125.0, None, None, 15.7, 7.8, None)),
    (("V100", "PCIE"), (112.0, None, None, 14.0, 7.0, None)),
    (("V100S", "PCIE"), (130.0, None, None, 16.4, 8.2, None)),
    # NVIDIA T4 data sheet
    (("T4",), (65.0, None, None, 8.1, None, None)),
    # NVIDIA A100, A30, A40 and A10 data sheets, 2021 and 2022
    (("A100",), (312.0, 312.0, 156.0, 19.5, 19.5, None)),
    (("A30",), (165.0, 165.0, 82.0, 10.3, 10.3, None)),
    (("A40",), (149.7, 149.7, 74.8, 37.4, None, None)),
    (("A10",), (125.0, 125.0, 62.5, 31.2, None, None)),
    # NVIDIA H100 and H200 data sheets (tensor figures there are with sparsity, halved here); PCIe: architecture paper
    (("H100", "PCIE"), (756.0, 756.0, 378.0, 51.0, 51.0, 1513.0)),
    (("H100", "NVL"), (835.5, 835.5, 417.5, 60.0, 60.0, 1670.5)),
    (("H100", "HBM3"), (989.4, 989.4, 494.7, 67.0, 67.0, 1978.9)),
    (("H200", "NVL"), (835.5, 835.5, 417.5, 60.0, 60.0, 1670.5)),
    (("H200",), (989.4, 989.4, 494.7, 67.0, 67.0, 1978.9)),
    (("GH200",), (989.4, 989.4, 494.7, 67.0, 67.0, 1978.9)),
    # NVIDIA Blackwell architecture brief, HGX B200 (36 PFLOP/s fp16 with sparsity over 8 GPUs)
    (("B200",), (2250.0, 2250.0, 1125.0, 75.0, 37.0, 4500.0)),
    # NVIDIA L40S and L4 data sheets
    (("L40S",), (362.0, 362.0, 183.0, 91.6, None, 733.0)),
    (("L4",), (121.0, 121.0, 60.0, 30.3, None, 242.5)),
    # NVIDIA Ada and Ampere GA102 architecture papers; GeForce halves the fp16 rate when it accumulates in fp32
    (("RTX", "4090"), (165.2, 165.2, 82.6, 82.6, None, 330.3)),
    (("RTX", "3090"), (71.0, 71.0, 35.6, 35.6, None, None)),
    (("RTX", "A6000"), (154.8, 154.8, 77.4, 38.7, None, None)),
)
_COLUMNS = ("fp16", "bf16", "tf32", "fp32", "fp64", "fp8")
_SLOWER_VARIANTS = {"MIG", "LAPTOP", "TI", "D", "SUPER", "MAX", "DGXS", "FHHL"}  # same model word, another rate


def model_flops_per_step(config: TransformerConfig, seq_length: int, global_batch_size: int) -> int:
    """FLOPs of one optimizer step: forward and backward once, nothing recomputed. The F of the model FLOPs
    utilisation, MFU = F / (step time x ranks x peak).

    With f = 4h this is 72 B s L h^2 (1 + s / 6h + V / 12 L h), V = `padded_vocab_size`. Only matrix products count, a
    multiply-add as two; attention is counted dense, all s^2 scores, although a causal kernel may skip half of them. The
    same definition serves BERT, with its output projection on the `scored_tokens` alone, as it is computed; pooler,
    sentence order and the masked-LM dense layer (h^2 a scored token) are left out, as in the paper.

    Args:
        seq_length: tokens s of a sequence.
        global_batch_size: sequences B of a step.

    Source: section 5.1 counts so; the closed form is Narayanan et al. 2021, equation 3, without its recomputation.
    """
    layers, logits = _forward_flops(config, seq_length, global_batch_size, config.hidden_size)
    return 3 * (layers + logits)  # backward costs twice the forward: gradients of input and of weight


def hardware_flops_per_step(
    config: TransformerConfig, seq_length: int, global_batch_size: int, tp_size: int = 1
) -> int:
    """FLOPs that the devices execute in one optimizer step, including the recomputation of `config.recompute` and the
    dummy heads of a `tp_size` that does not divide the heads.

    Full: one more forward pass of the layers, not of the logits; with f = 4h, 96 B s L h^2 (1 + s / 6h + V / 16 L h).
    Selective: the matrix products of the attention core, 4 B s^2 L h (none of them on a GPU, whose fused core is left
    alone: there this is an upper bound); half of it in exact attention, where torch's checkpoint stops before the last
    product because the backward pass does not need its result. Full recomputation
    stops before the last linear in the same way if `hidden_dropout` is 0; that is not counted here. What a fused
    attention kernel recomputes inside its backward pass is not counted either.

    Source: section 4.2; Narayanan et al. 2021, equation 3; Korthikanti et al. 2022 (selective).
    """
    width = config.padded_width(tp_size)
    layers, logits = _forward_flops(config, seq_length, global_batch_size, width)
    flops = 3 * (layers + logits)
    if config.recompute == "full":
        return flops + layers
    if config.recompute == "selective":
        num_products = 1 if config.attention == "exact" else 2
        return flops + num_products * 2 * global_batch_size * seq_length**2 * config.num_layers * width
    return flops


def teacher_flops(teachers: list[TransformerConfig], seq_length: int, global_batch_size: int, tp_size: int = 1) -> int:
    """FLOPs of a teacher's forward pass in one optimizer step: its layers, and its logits of the scored tokens.

    Model FLOPs, so that the MFU counts what the method needs; a cache has none.

    Args:
        teachers: one or none, as it is built: with the student's `vocab_multiple`.
        tp_size: with which dummy heads count, as hardware FLOPs; 1: none.
    """
    return sum(sum(_forward_flops(t, seq_length, global_batch_size, t.padded_width(tp_size))) for t in teachers)


def scored_tokens(config: TransformerConfig, seq_length: int) -> int:
    """Positions of a sequence whose logits a training step needs: GPT all, BERT the masked ones, 15 % of s.

    How many are masked differs from sequence to sequence with the length of its text; 15 % is the most of a full one.

    Source: section 4.1 for GPT; Devlin et al. 2018.
    """
    return max(1, round(config.traits.scored_share * seq_length))


def num_recomputed_whole(config: TransformerConfig, placements: Sequence[Any]) -> int:
    """Number of layers with these placements that full recomputation repeats to their end if they are eager, as it does
    all compiled ones.

    torch's checkpoint stops once it has what the backward pass needs. Behind the last linear that is the dropout's
    mask, or the input of a LayerNorm that follows; without either the last product and its all-reduce are not repeated.
    """
    return sum(config.hidden_dropout > 0 or bool(placement.after) for placement in placements)


def _forward_flops(config: TransformerConfig, seq_length: int, global_batch_size: int, width: int) -> tuple[int, int]:
    """FLOPs of one forward pass, whose heads are `width` wide together: of the layers, of the logits."""
    h, num_tokens = config.hidden_size, global_batch_size * seq_length
    linears = 8 * h * width + 4 * h * config.ffn_size  # QKV 6 h^2, attention output 2 h^2, both MLP linears
    scores = 4 * seq_length * width  # QK^T and its product with V
    num_scored = global_batch_size * scored_tokens(config, seq_length)
    return num_tokens * config.num_layers * (linears + scores), num_scored * 2 * h * config.padded_vocab_size


def dense_peak_flops_per_s(device_name: str, dtype: str, matmul_precision: str = "highest") -> float | None:
    """Dense matrix-product peak of one device in FLOP/s, from the maker's data sheet; None if unknown.

    Args:
        device_name: from `torch.cuda.get_device_name`.
        dtype: fp16, bf16, fp32, fp64 or fp8: the float8 peak, although attention and heads of such a run are in bf16.
            Its MFU is relative to the highest peak; use tokens/s to compare it with bf16.
        matmul_precision: torch's setting for fp32 products; `high` and `medium` let them run in TF32 where the device
            has it, so the peak is TF32's there.

    Returns:
        None for a CPU, a device that is not in the table, and a type without a figure: MFU is then not reported.
    """
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if words & _SLOWER_VARIANTS:
        return None
    for required, rates in _PEAKS:
        if words.issuperset(required):
            by_type = dict(zip(_COLUMNS, rates, strict=True))
            uses_tf32 = dtype == "fp32" and matmul_precision != "highest" and by_type["tf32"] is not None
            rate = by_type["tf32" if uses_tf32 else dtype]
            return None if rate is None else rate * TERA
    return None
