"""The dropout of the embedding sum has its own setting."""

import torch
from sharding import random_batch, random_model, small_config

from lmscale.parallel import ParallelContext, sample_dropout_keys, site_keys


def embedded(config) -> torch.Tensor:
    model, batch = random_model(config, ParallelContext()), random_batch(config)
    return model.transformer.embed(
        batch["tokens"], None, site_keys(sample_dropout_keys(1, batch["sample_numbers"]), 1)[0]
    )


def test_it_follows_hidden_dropout_unless_set() -> None:
    def zeros(**dropout):
        return (embedded(small_config("gpt", **dropout)) == 0).double().mean().item()

    assert zeros() == 0.0
    assert 0.3 < zeros(hidden_dropout=0.4) < 0.5
    assert zeros(hidden_dropout=0.4, embedding_dropout=0.0) == 0.0
    assert 0.3 < zeros(hidden_dropout=0.0, embedding_dropout=0.4) < 0.5
