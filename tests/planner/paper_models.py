"""The nine sizes of Tables 1, 2 and 4 and Figure 7, and trainings of them."""

from lmscale.config import Layout, TransformerConfig
from lmscale.planner.workload import Workload

SIZES = {  # layers, hidden, heads
    "gpt_355m": (24, 1024, 16),
    "gpt_1.2b": (40, 1536, 16),
    "gpt_2.5b": (54, 1920, 20),
    "gpt_4.2b": (64, 2304, 24),
    "gpt_8.3b": (72, 3072, 32),
    "bert_336m": (24, 1024, 16),
    "bert_752m": (36, 1280, 20),
    "bert_1.3b": (24, 2048, 32),
    "bert_3.9b": (48, 2560, 40),
}


def paper_model(name: str, **changes: object) -> TransformerConfig:
    """A model of the paper with `changes`."""
    num_layers, hidden_size, num_attention_heads = SIZES[name]
    is_gpt = name.startswith("gpt")
    fields = {
        "family": "gpt" if is_gpt else "bert",
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "vocab_size": 50257 if is_gpt else 30522,
        "max_position_embeddings": 1024 if is_gpt else 512,
    }
    return TransformerConfig(**(fields | changes))


def training(
    config: TransformerConfig, b: int, layout: Layout | None = None, n: int = 1, dtype: str = "bf16", **more: object
) -> Workload:
    """Steps of n micro-batches of b sequences on each data rank of a layout, each as long as the positions."""
    batch = b * n * (layout.dp_size if layout else 1)
    return Workload(config, b, batch, **({"seq_length": config.max_position_embeddings, "dtype": dtype} | more))
