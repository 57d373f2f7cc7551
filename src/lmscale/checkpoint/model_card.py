"""README.md of an exported model."""

from pathlib import Path
from typing import Any

from ..config import TransformerConfig
from ..config.family import family_of
from .metadata import CheckpointMetadata

CARD = "README.md"


def model_card(metadata: CheckpointMetadata, config: TransformerConfig, model_class: str, dtype: str, name: str) -> str:
    """The model card in Markdown: sizes, data, training, losses, and how to load the model.

    Args:
        metadata: metadata of the checkpoint; an imported one knows neither data nor losses.
        model_class: name of the class in transformers.
        dtype: type of the written weights.
        name: of the folder, to load the model by.
    """
    causal = family_of(config.family).is_causal
    sizes = {
        "architecture": f"{config.family.upper()}, {config.norm_order}-norm",
        "layers": config.num_layers,
        "hidden size": config.hidden_size,
        "attention heads": config.num_attention_heads,
        "positions": config.max_position_embeddings,
        "vocabulary": f"{config.vocab_size:,}",
        "weights": dtype,
    }
    losses = {key: f"{value:.4f}" for key, value in metadata.state.get("validation", {}).items()}
    tables = [_table("Sizes", sizes), _table("Training", _training(metadata)), _table("Validation", losses)]
    return f"""---
library_name: transformers
pipeline_tag: {"text-generation" if causal else "fill-mask"}
# license: choose one, see https://huggingface.co/docs/hub/repositories-licenses
---

# {metadata.run.get("name", name)}

Trained with lmscale, a re-implementation of Megatron-LM ([arXiv:1909.08053](https://arxiv.org/abs/1909.08053)), and
exported after {metadata.step:,} steps.

{"".join(tables)}## Use

```python
from transformers import AutoTokenizer, {model_class}

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = {model_class}.from_pretrained("{name}")
```

## Licence and limits

The publisher has not stated a licence, the intended use or the limits of this model.
"""


def _training(metadata: CheckpointMetadata) -> dict[str, Any]:
    """What the run's configuration says of data and recipe."""
    run = metadata.run
    if "converted_from" in run:
        return {"imported from": Path(run["converted_from"]).name}
    data = run.get("data", {})
    place = data.get("name") or (Path(data["path"]).name if data.get("path") else None)
    batch, length = run.get("global_batch_size"), data.get("seq_length")
    rows = {
        "data": f"{data.get('kind')}{f', {place}' if place else ''}",
        "steps": f"{metadata.step:,} of {run.get('trainer', {}).get('max_steps', metadata.step):,}",
        "batch": f"{batch:,} sequences of {length:,} tokens" if batch and length else None,
        "learning rate": run.get("optimizer", {}).get("lr"),
        "precision": run.get("precision", {}).get("dtype"),
        "seed": run.get("seed"),
    }
    return {key: value for key, value in rows.items() if value is not None}


def _table(title: str, rows: dict[str, Any]) -> str:
    if not rows:
        return ""
    lines = [f"## {title}", "", "| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())]
    return "\n".join(lines) + "\n\n"
