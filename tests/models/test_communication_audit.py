"""Collectives between tensor ranks, counted on two real processes: the paper's four all-reduces per layer.

Every test compares the full sequence of collectives, so any extra, larger or different collective fails.
"""

import itertools

import pytest
from collective_trace import CollectiveRecorder
from ranks import make_context, run_ranks
from sharding import random_batch, random_model, small_config, total_loss

from lmscale.config import TransformerConfig
from lmscale.parallel import ParallelContext

NUM_LAYERS = 3
HIDDEN = (5, 13, 24)  # [b, s, h]
# Each with one of the two attention variants, in turn.
CASES = [
    (*case, ("sdpa", "exact")[sum(places) % 2])
    for *places, case in (
        (a, n, r, d, (("gpt", "bert")[a], ("pre", "post")[n], ("none", "selective", "full")[r], (0.0, 0.2)[d]))
        for a, n, r, d in itertools.product(range(2), range(2), range(3), range(2))
    )
]
# How many forward all-reduces a layer's backward pass repeats under full recomputation, by (norm order, dropout).
# torch's checkpoint stops once it has every tensor that the backward pass needs. After the MLP's all-reduce these are
# the dropout mask, or with post-norm the input of the LayerNorm; pre-norm without dropout needs nothing there.
REPEATED = {("pre", False): 1, ("pre", True): 2, ("post", False): 2, ("post", True): 2}


def make_config(case: tuple) -> TransformerConfig:
    architecture, norm_order, recompute, dropout, attention = case
    return small_config(
        architecture,
        norm_order=norm_order,
        recompute=recompute,
        hidden_dropout=dropout,
        attention=attention,
        num_layers=NUM_LAYERS,
    )


def _record_step(config: TransformerConfig, context: ParallelContext) -> dict[str, list]:
    """(kind, group, shape) of each collective of one micro-batch, by phase."""
    model = random_model(config, context)
    with CollectiveRecorder(context) as recorder:
        loss = total_loss(model, random_batch(config))
        recorder.phase = "backward"
        loss.backward()
    phases = {"forward": [], "backward": []}
    for collective in recorder.collectives:
        phases[collective.phase].append((collective.kind, collective.group, collective.shape))
    return phases


def _record_all(rank: int) -> list[dict[str, list]]:
    context = make_context(tp_size=2)
    return [_record_step(make_config(case), context) for case in CASES]


def all_reduces(*shapes: tuple[int, ...]) -> list[tuple]:
    return [("allreduce_", "tensor", shape) for shape in shapes]


def scored_rows(architecture: str) -> int:
    """Rows projected to the vocabulary: all of [b, s] in a GPT, the scored ones in a BERT."""
    labels = random_batch(small_config(architecture))["labels"]
    return labels.numel() if architecture == "gpt" else int((labels != -100).sum())


@pytest.fixture(scope="module")
def recorded() -> dict[tuple, dict[str, list]]:
    """The collectives of rank 0 in each case, after checking that rank 1 issued the same."""
    first, second = run_ranks(_record_all, 2)
    assert first == second
    return dict(zip(CASES, first, strict=True))


@pytest.mark.parametrize("architecture, norm_order", list(itertools.product(("gpt", "bert"), ("pre", "post"))))
def test_the_forward_pass_has_one_for_the_embedding_two_per_layer_and_three_small_ones_for_the_loss(
    recorded, architecture: str, norm_order: str
) -> None:
    expected = all_reduces(HIDDEN, *[HIDDEN] * (2 * NUM_LAYERS), *[(scored_rows(architecture),)] * 3)
    found = [phases["forward"] for case, phases in recorded.items() if case[:2] == (architecture, norm_order)]
    assert found == [expected] * 6  # recomputation, dropout and the attention variant add none


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_the_backward_pass_has_one_for_the_tied_projection_and_two_per_layer(recorded, recompute: str) -> None:
    for architecture in ("gpt", "bert"):
        expected = all_reduces((scored_rows(architecture), HIDDEN[-1]), *[HIDDEN] * (2 * NUM_LAYERS))
        found = [p["backward"] for case, p in recorded.items() if case[0] == architecture and case[2] == recompute]
        assert found == [expected] * 4


def test_full_recomputation_repeats_the_forward_collectives_that_the_backward_pass_needs(recorded) -> None:
    for case, phases in recorded.items():
        architecture, norm_order, recompute, dropout, _ = case
        if recompute == "full":
            a_layer = 2 + REPEATED[norm_order, dropout > 0]
            projection = (scored_rows(architecture), HIDDEN[-1])
            assert phases["backward"] == all_reduces(projection, *[HIDDEN] * (a_layer * NUM_LAYERS)), case
