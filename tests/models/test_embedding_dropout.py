"""The dropout of the embedding sum has its own setting."""

import pytest
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


@pytest.mark.parametrize("architecture, norm_order", [("gpt", "pre"), ("bert", "post")])
def test_what_follows_the_lookups_is_one_graph_in_training_and_one_in_evaluation(architecture, norm_order) -> None:
    config = small_config(architecture, norm_order=norm_order, hidden_dropout=0.3)
    model, graphs = random_model(config, ParallelContext()), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    transformer, batch = model.transformer, random_batch(config)
    names = list(transformer.state_dict())
    types = batch["token_types"] if architecture == "bert" else None
    keys = site_keys(sample_dropout_keys(1, batch["sample_numbers"]), 1)[0]
    eager = transformer.embed(batch["tokens"], types, keys)
    transformer._combine = torch.compile(transformer._combine, dynamic=False, fullgraph=True, backend=count)
    for _ in range(2):
        assert torch.equal(transformer.embed(batch["tokens"], types, keys), eager)
    assert len(graphs) == 1 and list(transformer.state_dict()) == names
    model.eval()
    for _ in range(2):
        transformer.embed(batch["tokens"], types, None)
    assert len(graphs) == 2
