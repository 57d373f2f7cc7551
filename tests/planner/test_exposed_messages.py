"""The time of messages that no computation hides: against sums by hand, and their number against the plan's."""

from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from paper_models import paper_model, training

from lmscale.config import Layout
from lmscale.config.cluster import load_cluster
from lmscale.planner.communication import micro_batch_collectives
from lmscale.planner.layer_operations import LayerCounts
from lmscale.planner.overlap import _waits, exposed_shares

CLUSTER = load_cluster(Path(__file__).parents[2] / "conf" / "cluster" / "h200.yaml")


def waits(seconds: str, messages: list[str], each: float, parts: int) -> float:
    """Of operations of so many seconds (digits), some of which need a message from when they could begin."""
    operations = [(float(time), what, what) for time, what in zip(seconds, messages, strict=True)]
    return sum(waited for _, waited in _waits(operations, {"+": each}, parts))


CASES = {
    "bert": ("bert_3.9b", {}),
    "bert, fully recomputed without dropout": (
        "bert_3.9b",
        {"recompute": "full", "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "gpt, exact attention": ("gpt_8.3b", {"attention": "exact", "recompute": "selective"}),
}


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("norm_order, sequence", list(product(("pre", "post"), (False, True))))
@pytest.mark.parametrize("case", CASES)
def test_a_layer_has_the_messages_of_the_plan(case: str, norm_order: str, sequence: bool, dtype: str) -> None:
    name, changes = CASES[case]
    config = paper_model(name, norm_order=norm_order, **changes)
    layout = Layout(tp_size=4, dp_size=1, sequence_parallel=sequence)
    job = training(config, 8, dtype=dtype, seq_length=512, on_gpu=False)
    layer = LayerCounts(job, layout, config.placement)
    found = Counter()
    for operations in (layer.forward("forward"), layer.backward()):
        under_way = Counter()
        for o in operations:
            if o.starts:
                under_way[o.starts] += 1
                found[o.starts] += config.num_layers
            if o.needs:
                under_way[o.needs] -= 1
                assert under_way[o.needs] == 0  # it has started, once
        assert not any(under_way.values())
    sent = micro_batch_collectives(job, layout)
    layers = {c.what: c.count for c in sent if "attention and MLP" in c.what}
    assert found == {what: count for what, count in layers.items() if not what.endswith(", recomputed")}


def test_the_gradient_of_a_weight_hides_the_sum_of_an_input_gradient() -> None:
    config, layout = paper_model("gpt_8.3b"), Layout(tp_size=8)
    backward = LayerCounts(training(config, 8), layout, config.placement).backward()
    seconds = {o.name: o.seconds(CLUSTER, "bf16") + o.launch_s(CLUSTER) for o in backward}
    behind_mlp = seconds["MLP up, gradient of the weight"] + seconds["MLP LayerNorm, again"]
    behind_attention = seconds["QKV, gradient of the weight"]
    for each in (0.5 * behind_attention, 1.1 * max(behind_mlp, behind_attention)):
        expected = max(0.0, each - behind_mlp) + max(0.0, each - behind_attention)
        what = "gradients of attention and MLP inputs"
        message_s = dict.fromkeys(("attention and MLP outputs", what), each)
        shares = exposed_shares(training(config, 8), layout, 0, CLUSTER, message_s)
        assert shares == pytest.approx({"attention and MLP outputs": 1.0, what: expected / (2 * each)})


def test_halves_hide_each_other() -> None:
    work = "32131", ["", "", "+", "", "+"]
    assert waits(*work, 4.0, 1) == 2 * 4.0
    # Five seconds of the other half hide a first message. The second one starts at 10 and is needed at 14; the last
    # starts at 18 and has one second, the end of the first half, behind it.
    assert waits(*work, 4.0, 2) == 3.0
    assert waits(*work, 6.0, 2) > 3.0
    assert waits(*work, 0.5, 2) == 0.0


def test_messages_travel_one_at_a_time() -> None:
    assert waits("10", ["", "+"], 10.0, 2) == 1 + 2 * 10.0 - 2
