"""README.md of an exported model."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from ..checkpoint import Checkpoint, CheckpointMetadata
from ..config import TransformerConfig
from .finetuned_head import PublishedHead

CARD = "README.md"


def model_card(
    metadata: CheckpointMetadata,
    config: TransformerConfig,
    model_class: str,
    dtype: str,
    name: str,
    has_tokenizer: bool,
    losses: dict[str, float],
    head: PublishedHead | None = None,
) -> str:
    """The model card in Markdown: sizes, data, training, losses, and how to use the model.

    Args:
        metadata: metadata of the checkpoint; an imported one knows no data.
        model_class: name of the class in transformers.
        dtype: type of the written weights.
        name: of the folder, to load the model by.
        has_tokenizer: whether its files are in the folder; where they are not, AutoTokenizer makes one of five tokens.
        losses: of the validation after the last step, see `losses_of`.
        head: of a finetuned model.
    """
    tag = "text-generation" if config.traits.is_causal else "fill-mask"
    example, training = _example(model_class, name), _training(metadata)
    sizes = {
        "architecture": f"{config.family.upper()}, {config.norm_order}-norm",
        "layers": config.num_layers,
        "hidden size": config.hidden_size,
        "attention heads": config.num_attention_heads,
        "positions": config.max_position_embeddings,
        "vocabulary": f"{config.vocab_size:,}",
        "weights": dtype,
    }
    scores = {key: f"{value:.4f}" for key, value in losses.items()}
    if head is not None:
        tag, training, scores = head.pipeline_tag, head.training, head.scores
        example = f"```python\n{head.example.replace('FOLDER', name)}\n```"
    tables = [_table("Sizes", sizes), _table("Training", training), _table("Validation", scores)]
    return f"""---
{ModelCardData(library_name="transformers", pipeline_tag=tag).to_yaml()}
# license: choose one, see https://huggingface.co/docs/hub/repositories-licenses
---

# {metadata.run.get("name", name)}

Trained with lmscale, a re-implementation of Megatron-LM ([arXiv:1909.08053](https://arxiv.org/abs/1909.08053)), and
exported after {metadata.step:,} steps.

{"".join(tables)}## Use

{example if has_tokenizer else _example_without_tokenizer(model_class, name)}

## Licence and limits

The publisher has not stated a licence, the intended use or the limits of this model.
"""


def losses_of(checkpoint: Checkpoint) -> dict[str, float]:
    """The validation losses of a checkpoint's step: its own, or its run's record has them, since a run saves its last
    step before it validates; empty if there are none."""
    metadata = checkpoint.metadata
    if "validation" in metadata.state:
        return metadata.state["validation"]
    try:
        record = json.loads((checkpoint.path.parent.parent / "record.json").read_text(encoding="utf-8"))
        metrics = record["metrics"] if record["steps"][1] == metadata.step else {}
        found = {name: metric["value"] for name, metric in metrics.items() if name.startswith("val/")}
        return {name: float(value) for name, value in found.items() if name.endswith(("loss", "perplexity"))}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _example(model_class: str, name: str) -> str:
    return f"""```python
from transformers import AutoTokenizer, {model_class}

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = {model_class}.from_pretrained("{name}")
outputs = model(**tokenizer("The", return_tensors="pt"))
```"""


def _example_without_tokenizer(model_class: str, name: str) -> str:
    return f"""```python
from transformers import {model_class}

model = {model_class}.from_pretrained("{name}")
```

The tokenizer is not in this folder. The token ids are those of the training data."""


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
