"""What a finished preparation says in the terminal."""

import json
from pathlib import Path

from .finishing import MANIFEST

_LABELS = {
    "clean": "cleaned",
    "sort": "sorted",
    "candidates": "candidates",
    "resolve": "near-duplicates",
    "tokenize": "tokenized",
}


def summary(output: Path) -> str:
    """Counts of every stage, sizes of every part and the leakage table of the dataset in `output`, as lines."""
    manifest = json.loads((output / MANIFEST).read_text(encoding="utf-8"))
    lines = [f"wrote {output}"]
    for stage, label in _LABELS.items():
        for step, counts in manifest["stages"].get(stage, {}).items():
            if counts:
                text = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in counts.items())
                lines.append(f"  {label:<16} {step}: {text}")
    for name, held in manifest["sources"].items():
        for split in ("train", "validation"):
            if split in held:
                part = held[split]
                lines.append(f"  {name} {split}: {part['documents']:,} documents, {part['tokens']:,} tokens")
    for name, held in manifest["reports"].get("leakage", {}).items():
        text = ", ".join(
            f"{key.replace('_', ' ')} {value:.4g}" if isinstance(value, float) else f"{key.replace('_', ' ')} {value:,}"
            for key, value in held.items()
        )
        lines.append(f"  leakage of {name}: {text}")
    return "\n".join(lines)
