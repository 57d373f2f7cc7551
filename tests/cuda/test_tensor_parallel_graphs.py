"""Layers of several tensor ranks, compiled for a GPU that is not there: graphs, collectives and what hides them.

What NCCL does with them on a GPU is not covered.
"""

from collections import Counter

import fake_gpu
import pytest

from lmscale.config import Layout, TransformerConfig
from lmscale.planner.communication import micro_batch_collectives
from lmscale.planner.workload import Workload

pytestmark = pytest.mark.slow
KINDS = {"all_reduce": "all_reduce", "all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
LAYERS = {
    "gpt, first of 2": {"tp_size": 2, "tp_rank": 0},
    "gpt, last of 8, selective": {"tp_size": 8, "tp_rank": 7, "model": {"recompute": "selective"}},
    "gpt, last of 2, sequence": {"tp_size": 2, "tp_rank": 1, "sequence_parallel": True},
    "gpt, float8, 3 of 8, sequence": {"tp_size": 8, "tp_rank": 3, "sequence_parallel": True, "float8": True},
    "bert, post, 3 of 8": {"family": "bert", "tp_size": 8, "tp_rank": 3, "model": {"norm_order": "post"}},
    "bert, post, first of 8, sequence, selective": {
        "family": "bert",
        "tp_size": 8,
        "tp_rank": 0,
        "sequence_parallel": True,
        "model": {"norm_order": "post", "recompute": "selective"},
    },
    "gpt, 3 of 8, halves": {"tp_size": 8, "tp_rank": 3, "batch_halves": True},
    "gpt, 3 of 8, sequence, halves": {"tp_size": 8, "tp_rank": 3, "sequence_parallel": True, "batch_halves": True},
    "bert, post, 3 of 8, halves": {
        "family": "bert",
        "tp_size": 8,
        "tp_rank": 3,
        "batch_halves": True,
        "model": {"norm_order": "post"},
    },
}
# How many messages of a layer travel beside a product, and how many there are: forward, backward.
HIDDEN = {
    "gpt, first of 2": ((0, 2), (2, 2)),
    "gpt, last of 2, sequence": ((0, 4), (4, 6)),
    "gpt, 3 of 8, halves": ((3, 4), (4, 4)),
    "gpt, 3 of 8, sequence, halves": ((4, 8), (11, 12)),
    "bert, post, 3 of 8, halves": ((3, 4), (4, 4)),
}


def is_halved(case: dict) -> bool:
    return case.get("batch_halves", False)


def planned(case: dict) -> dict[str, Counter]:
    """The collectives of one layer by direction, as the planner counts them."""
    config = TransformerConfig(case.get("family", "gpt"), 1, 512, 8, 50257, 256, **case.get("model", {}))
    layout = Layout(
        tp_size=case["tp_size"],
        dp_size=1,
        sequence_parallel=case.get("sequence_parallel", False),
        zero1=False,
        batch_halves=is_halved(case),
    )
    found = {"forward": Counter(), "backward": Counter()}
    for sent in micro_batch_collectives(Workload(config, 2, 2, 256, "bf16"), layout):
        if "attention and MLP" in sent.what:
            found[sent.phase][KINDS[sent.kind]] += sent.count
    return found


@pytest.fixture(scope="module")
def layers(guard) -> dict[str, dict]:
    found = fake_gpu.run("compiled_layer.py", guard, [case | {"cubins": False} for case in LAYERS.values()])
    return dict(zip(LAYERS, found, strict=True))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_one_graph_per_direction_with_the_planned_collectives(layers, name: str) -> None:
    found = layers[name]
    assert (found["graphs"], found["breaks"]) == (2, 0)
    forward, backward = found["collectives"]
    counts = {"forward": Counter(kind for kind, _ in forward), "backward": Counter(kind for kind, _ in backward)}
    assert counts == planned(LAYERS[name])
    # Behind the gradient's sum over the ranks stands the product that gives the weight's gradient.
    reductions = [products for kind, products in backward if kind in ("all_reduce", "reduce_scatter_tensor")]
    assert len(reductions) == (4 if is_halved(LAYERS[name]) else 2) and min(reductions) >= 1, backward


@pytest.mark.parametrize("name", HIDDEN)
def test_messages_travel_beside_products(layers, name: str) -> None:
    found = [(sum(products > 0 for _, products in sent), len(sent)) for sent in layers[name]["collectives"]]
    assert found == list(HIDDEN[name])


def test_the_sum_of_an_input_gradient_needs_no_copy(layers) -> None:
    calls = [call for graph in layers["gpt, first of 2"]["calls"] for call in graph if "all_reduce" in call]
    assert calls == ["torch.ops._c10d_functional.all_reduce_.default"] * 4  # in place
