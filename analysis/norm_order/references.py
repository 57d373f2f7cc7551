"""Losses that the runs of the norm-order study are compared with, from the samples they are trained on."""

import itertools
from typing import Any

import numpy as np

from lmscale.config.data import DataConfig, TokenizerConfig
from lmscale.config.from_dict import build
from lmscale.config.model import from_file
from lmscale.data.bert_dataset import IGNORE_LABEL, BERTDataset
from lmscale.data.gpt_dataset import GPTDataset
from lmscale.data.prepare import prepare_corpus

REFERENCE_EPOCHS = 4  # of the sweep's corpus: 226,000 scored tokens, which give the entropy within 0.001 nats
MAX_SAMPLES = 2**17  # per epoch; the sweep's corpus has fewer


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
    share, inputs = joint.sum(axis=0), joint.sum(axis=1, keepdims=True)
    conditional = np.divide(joint, inputs, out=np.zeros_like(joint), where=inputs > 0)
    return {
        "scored_entropy": float(-(share * np.log(np.where(share > 0, share, 1.0))).sum()),
        "context_free_loss": float(-(joint * np.log(np.where(joint > 0, conditional, 1.0))).sum()),
    }


def training_samples(config: dict[str, Any]) -> tuple[BERTDataset | GPTDataset, int]:
    """The samples of the training text of a run, and the number of ids of its tokenizer."""
    data = build(DataConfig, config["data"], "data.")
    tokenizer = build(TokenizerConfig, config["tokenizer"], "tokenizer.")
    family = family_of_run(config)
    corpus = prepare_corpus(data, tokenizer, family, config["model"]["vocab_size"])
    (part,) = corpus.parts["train"]
    if family == "gpt":
        return GPTDataset(part, corpus.vocab_size, data.seq_length, "train"), corpus.vocab_size
    return BERTDataset(corpus, part, data, seed=0, name="train"), corpus.vocab_size
