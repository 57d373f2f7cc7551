"""The cases of `analysis/scaling/measure.py`: the scaling study, scaled down."""

import dataclasses

from lmscale.config import TransformerConfig

WIDTH, LAYERS, VOCAB, SEQUENCE, BATCH = 384, 4, 8192, 128, 8
# Studies with a scaling efficiency: the work is constant, or grows with the number of ranks.
SCALING = ("strong", "weak, tp", "weak, dp")


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: a study, a model and a layout. On a CPU, `attention_dropout` is 0 to keep the fused attention kernel.

    Args:
        study: what varies; efficiencies are relative to its first row with the same `subject`.
        label: the varied value of this row.
        subject: the model, if a study has several.
    """

    study: str
    label: str
    config: TransformerConfig
    tp_size: int
    dp_size: int
    micro_batch_size: int
    dtype: str = "fp32"
    subject: str = ""


def small_gpt(num_layers: int, hidden_size: int, heads: int, recompute: str = "full") -> TransformerConfig:
    """A GPT of the study, scaled down."""
    return TransformerConfig(
        family="gpt",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        vocab_size=VOCAB,
        max_position_embeddings=SEQUENCE,
        attention_dropout=0.0,
        recompute=recompute,
    )


def cpu_cases(largest: int) -> list[Case]:
    """The study on up to `largest` ranks with one thread each."""
    sizes = [n for n in (1, 2, 4) if n <= largest]
    fixed = small_gpt(LAYERS, WIDTH, 8)
    cases = [Case("strong", f"tp {n}", fixed, n, 1, BATCH) for n in sizes]
    weak = {1: small_gpt(4, 384, 8), 2: small_gpt(5, 480, 8), 4: small_gpt(6, 624, 8)}
    cases += [Case("weak, tp", f"tp {n}", weak[n], n, 1, BATCH) for n in sizes]
    cases += [Case("weak, dp", f"dp {n}", fixed, 1, n, BATCH) for n in sizes]
    heads = [
        Case("heads", f"{n} heads, tp {sizes[-1]}", small_gpt(LAYERS, WIDTH, n), sizes[-1], 1, BATCH)
        for n in (4, 8, 16)
    ]
    modes = [
        Case("recompute", mode, small_gpt(LAYERS, WIDTH, 8, mode), 1, 1, BATCH)
        for mode in ("none", "selective", "full")
    ]
    return cases + heads + modes


def gpu_cases(num_gpus: int) -> list[Case]:
    """Batch and recomputation sweeps of three paper models on one GPU, and strong scaling over several."""
    sizes = {"gpt_355m": (24, 1024, 16, 1024), "gpt_1.2b": (40, 1536, 16, 1024), "bert_336m": (24, 1024, 16, 512)}
    cases = []
    for name, (layers, hidden, heads, seq_length) in sizes.items():
        architecture = name.split("_")[0]
        vocab = 50257 if architecture == "gpt" else 30522
        for mode in ("none", "selective", "full"):
            config = TransformerConfig(architecture, layers, hidden, heads, vocab, seq_length, recompute=mode)
            for b in (4, 8, 16):
                cases.append(Case("sweep", f"{name}, {mode}, b {b}", config, 1, 1, b, "bf16", name))
        for tp_size in (1, 2, 4, 8):
            if 1 < num_gpus >= tp_size:
                cases.append(Case("strong", f"{name}, tp {tp_size}", config, tp_size, 1, 8, "bf16", name))
    return cases
