"""Corpora for tests of `src/prepare_data.py`, and the command."""

import gzip
import hashlib
import json
import random
import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import warm
from entry_points import REPOSITORY, environment

from lmscale.data.indexed_dataset import IndexedDataset
from lmscale.data.tokenizer import read_tokenizer

SMALL = ("tokenizer.vocab_size=600", "shard_mb=1", "evaluation=none", "launcher.workers=1")


def prepare(*overrides: str, **limits: int) -> subprocess.CompletedProcess:
    """Run `python src/prepare_data.py OVERRIDES`."""
    command = [str(REPOSITORY / "src" / "prepare_data.py"), *overrides]
    return warm.run(command, REPOSITORY, environment(), timeout=300, **limits)


def passages(shared_data: Path, count: int) -> list[str]:
    """The first distinct passages of RACE's development set."""
    with gzip.open(shared_data / "race" / "race_dev.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(next(file)) for _ in range(count)]
    return list(dict.fromkeys(row["article"] for row in rows))


def write_lines(path: Path, texts: list[str], **more: list) -> Path:
    """A JSONL file of `texts` under the key `text`; gzipped if the name ends in .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        for number, text in enumerate(texts):
            row = {"text": text} | {key: values[number] for key, values in more.items()}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


def edited(text: str, share: float, seed: int = 7) -> str:
    """`text` with a fraction of its words replaced by shorter ones."""
    generator, words = random.Random(seed), text.split(" ")
    for place in generator.sample(range(len(words)), round(share * len(words))):
        words[place] = "o"
    return " ".join(words)


def manifest_of(output: Path) -> dict:
    """The manifest of a finished dataset."""
    return json.loads((output / "manifest.json").read_text(encoding="utf-8"))


def digests(output: Path) -> dict[str, str]:
    """sha256 of every file of a finished dataset except the manifest, which names the inputs."""
    return {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(output.rglob("*"))
        if path.is_file() and path.name != "manifest.json" and ".work" not in path.parts
    }


def read_documents(output: Path, name: str = "local", split: str = "train") -> list[str]:
    """The texts of a GPT dataset, decoded, without end-of-text."""
    tokenizer = read_tokenizer(output / "tokenizer.json")
    dataset = IndexedDataset(output / f"{name}_{split}_text_document")
    bounds = dataset.document_starts(np.arange(len(dataset) + 1)).tolist()
    return [tokenizer.decode(dataset.tokens[start : end - 1]) for start, end in pairwise(bounds)]
