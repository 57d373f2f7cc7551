"""What a run of the norm-order studies left in its folder, and the losses that it is compared with."""

import csv
import hashlib
import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from lmscale.config.data import DataConfig, TokenizerConfig
from lmscale.config.from_dict import build
from lmscale.config.model import from_file
from lmscale.data.bert_dataset import IGNORE_LABEL, BERTDataset
from lmscale.data.gpt_dataset import GPTDataset
from lmscale.data.prepare import prepare_corpus

NATS, NATS_PER_TOKEN = "nats/masked token", "nats/token"  # of BERT and of GPT
WINDOW = 25  # steps averaged into one point of a curve
NORM_WINDOW = 10  # steps averaged into one gradient norm, except at step 1
REFERENCE_EPOCHS = 4  # of the sweep's corpus: 226,000 scored tokens, which give the entropy within 0.001 nats
MAX_SAMPLES = 2**17  # per epoch; the sweep's corpus has fewer


def read_rows(run_dir: Path) -> list[dict[str, float]]:
    """The rows of metrics.csv with a finite loss and gradient; a run that diverged has others after them."""
    with open(run_dir / "metrics.csv", encoding="utf-8", newline="") as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    for row in rows:
        if "train/lm_loss" not in row:  # GPT has one term
            row["train/lm_loss"] = row["train/loss"]
    return [row for row in rows if math.isfinite(row["train/lm_loss"] + row["grad_norm"])]


def digest(rows: list[dict[str, float]]) -> str:
    """sha256 of the loss and the gradient norm of every step, equal only if all are equal in every bit."""
    text = repr([(row["train/lm_loss"], row["grad_norm"]) for row in rows])
    return hashlib.sha256(text.encode()).hexdigest()


def read_statistics(run_dir: Path) -> dict[str, dict[str, list[float | None]]]:
    """Statistics of the sublayers by step, name and `attention` or `mlp`, one number per layer, to six digits.

    A number that is not finite is None.

    Returns:
        `{"10": {"variance_ratio/mlp": [...], ...}, ...}`; empty if the run recorded none.
    """
    path, found = run_dir / "layer_statistics.jsonl", {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        at_step = json.loads(line)
        columns = found.setdefault(str(at_step["step"]), {})
        for entry in at_step["sublayers"]:
            for name in entry.keys() - {"layer", "sublayer"}:
                value = entry[name]
                shown = float(f"{value:.6g}") if math.isfinite(value) else None
                columns.setdefault(f"{name}/{entry['sublayer']}", []).append(shown)
    return {step: dict(sorted(columns.items())) for step, columns in found.items()}


def describe_losses(
    rows: list[dict[str, float]], diverged: bool, warmup_steps: int, unit: str = NATS
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Metrics and curves of a run that logged every step, as `cells.py` reads them.

    Returns:
        metrics of the record; window, curve, validation and gradient_norms of its configuration.
    """
    losses, num_steps = [row["train/lm_loss"] for row in rows] or [math.nan], len(rows)
    curve = [statistics.fmean(losses[i : i + WINDOW]) for i in range(0, len(losses) - WINDOW + 1, WINDOW)]
    metrics = {
        "train_loss": {"value": statistics.fmean(losses[-2 * WINDOW :]), "unit": unit},
        "lowest_loss": {"value": min(curve or losses), "unit": unit},
        "non_finite": {"value": int(diverged), "unit": "runs"},
        "steps": {"value": num_steps, "unit": "steps"},
    }
    # Norms of the first step, the end of the warm-up, the middle and the last.
    steps = sorted({1, min(max(warmup_steps, 1), num_steps), max(num_steps // 2, 1), num_steps})
    config = {
        "window": WINDOW,
        "curve": curve,
        "validation": [[int(row["step"]), row["val/lm_loss"]] for row in rows if "val/lm_loss" in row],
        "gradient_norms": {str(step): norms_at(rows, step) for step in steps if rows},
    }
    return metrics, config


def norms_at(rows: list[dict[str, float]], step: int) -> dict[str, float]:
    """Gradient norm per part of the model, averaged over the last `NORM_WINDOW` steps up to `step`."""
    some = rows[max(step - NORM_WINDOW, 0) : step]
    parts = [key for key in some[0] if key.startswith("grad_norm/")]
    return {key.split("/", 1)[1]: statistics.fmean(row[key] for row in some) for key in parts}


def reference_losses(config: dict[str, Any]) -> dict[str, float]:
    """Compute reference losses in nats per masked token, from the scored tokens of `REFERENCE_EPOCHS` epochs.

    Scored tokens are distributed differently from the corpus, because long words are skipped or truncated.

    Returns:
        scored_entropy: unigram entropy of the scored tokens, the loss of a model that ignores its input.
        context_free_loss: lowest loss possible from the input token at the scored position alone. For BERT that is
        [MASK] with probability 0.8, the original token with 0.1 and a random token with 0.1; for GPT it is the token
        before the scored one.
    """
    dataset, vocab_size = training_samples(config)
    chosen = np.array_split(np.arange(min(len(dataset), MAX_SAMPLES)), 16)
    if family_of_run(config) == "gpt":
        joint = np.zeros((vocab_size, vocab_size))  # [input, scored]
        for indices in chosen:
            batch = dataset.batch(np.zeros(len(indices)), indices)
            np.add.at(joint, (batch["tokens"].ravel(), batch["labels"].ravel()), 1.0)
        return _entropies(joint / joint.sum())
    counts = np.zeros(vocab_size)
    for epoch, indices in itertools.product(range(REFERENCE_EPOCHS), chosen):
        labels = dataset.batch(np.full(len(indices), epoch), indices)["labels"]
        counts += np.bincount(labels[labels != IGNORE_LABEL], minlength=vocab_size)
    share = counts / counts.sum()
    seen = 0.1 * share[None, :] * (1 / len(share) + np.eye(len(share)))  # [input, scored]: random or original
    return _entropies(np.concatenate([0.8 * share[None, :], seen]))


def family_of_run(config: dict[str, Any]) -> str:
    """The family of a run's configuration, in a record `architecture`."""
    return from_file(config["model"])["family"]


def _entropies(joint: np.ndarray) -> dict[str, float]:
    """Entropy of the scored token, alone and given the input token, from the probabilities [input, scored]."""
    share, inputs = joint.sum(axis=0), joint.sum(axis=1)
    given_input = stats.entropy(joint, axis=None) - stats.entropy(inputs)
    return {"scored_entropy": float(stats.entropy(share)), "context_free_loss": float(given_input)}


def training_samples(config: dict[str, Any]) -> tuple[BERTDataset | GPTDataset, int]:
    """The samples of the training text of a run, and the number of ids of its tokenizer."""
    data = build(DataConfig, config["data"], "data.")
    tokenizer = build(TokenizerConfig, config["tokenizer"], "tokenizer.")
    family = family_of_run(config)
    corpus = prepare_corpus(data, tokenizer, family, config["model"]["vocab_size"])
    (part,) = corpus.parts["train"]
    if family == "gpt":
        return GPTDataset(part, corpus.vocab_size, data.seq_length, "train"), corpus.vocab_size
    return BERTDataset(corpus, "train", part, data, seed=0), corpus.vocab_size
