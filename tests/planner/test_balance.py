"""R of a layout: the exercises of a text on tensor parallelism, and the terms of a whole step."""

import dataclasses

import pytest
from test_step_time import CLUSTER

from lmscale.config import Layout, TransformerConfig
from lmscale.config.cluster import Calibration, Peaks
from lmscale.planner.balance import balance_of
from lmscale.planner.communication import micro_batch_collectives, small_collectives
from lmscale.planner.plan import Plan, make_plan
from lmscale.planner.step_time import collective_s
from lmscale.planner.workload import Workload

# The exercise: one layer of d = 4096 on 8 H100, b = 4, s = 2048, fp16, peak rates, no latency, only products count.
B, S, D, P = 4, 2048, 4096, 8
H100 = dataclasses.replace(
    CLUSTER,
    latency_us=0.0,
    peaks=Peaks(fp32=60.0, fp16=989.0),
    calibration=Calibration("modelled", 900.0, 50.0, True, "an exercise", 1.0, 1e-12, 0.0),
)
LAYOUT = Layout(tp_size=P)


def model(num_layers: int) -> TransformerConfig:
    return TransformerConfig("gpt", num_layers, D, 32, 50257, S)


def planned(layout: Layout, num_layers: int = 1, cluster=H100, **changes) -> Plan:
    values = {"micro_batch_size": B, "global_batch_size": B * layout.dp_size, "seq_length": S, "dtype": "fp16"}
    return make_plan(Workload(model(num_layers), **values | {"num_steps": 1} | changes), layout, cluster)


def forward_of_a_layer():
    found = micro_batch_collectives(model(1), LAYOUT, B, S, "fp16")
    return [message for message in found if message.phase == "forward" and "MLP" in message.what]


def test_the_forward_pass_of_a_layer_sends_112_mib_twice_in_261_microseconds() -> None:
    (message,) = forward_of_a_layer()
    assert (message.kind, message.count, message.num_bytes) == ("all_reduce", 2, 64 * 2**20)
    found = balance_of(0.0, [message], LAYOUT, H100)
    assert found.transfer * 900e9 == pytest.approx(224 * 2**20)
    assert found.transfer == pytest.approx(261.0e-6, rel=1e-3)  # the text: 249, with 224 MB for 224 MiB
    assert found.latency == 0.0


def test_the_ratio_of_a_layer_is_1_73_and_not_0_17() -> None:
    flops = 24 * B * S * D**2 + 4 * B * S**2 * D
    found = balance_of(flops / P / 989e12, forward_of_a_layer(), LAYOUT, H100)
    assert found.compute == pytest.approx(451.6e-6, rel=1e-3)  # the text: 42.9
    assert found.ratio == pytest.approx(1.730, rel=1e-3)
    each_way = dataclasses.replace(H100, calibration=dataclasses.replace(H100.calibration, tensor_bandwidth_gb_s=450.0))
    assert balance_of(found.compute, forward_of_a_layer(), LAYOUT, each_way).ratio == pytest.approx(0.865, rel=1e-3)


def test_the_ratio_grows_as_one_over_p_minus_1() -> None:
    flops = 24 * B * S * D**2 + 4 * B * S**2 * D
    ratios = [
        balance_of(flops / p / 989e12, forward_of_a_layer(), Layout(tp_size=p), H100).ratio * (p - 1) for p in (2, 4, 8)
    ]
    assert ratios == pytest.approx([ratios[0]] * 3)


def test_a_plan_adds_to_a_layer_three_times_the_forward_flops_and_twice_its_messages() -> None:
    one, two = (planned(LAYOUT, num_layers).balance for num_layers in (1, 2))
    forward = (
        24 * B * S * D**2 + 1.5 * 4 * B * S**2 * D
    )  # the cost model's scores take 1 + 64 / 128 of their FLOPs' time
    assert two.compute - one.compute == pytest.approx(3 * forward / P / 989e12, rel=1e-6)
    replicated = 4 * 6 * D  # bytes of two LayerNorms and two row biases, in fp32, once per step
    assert two.transfer - one.transfer == pytest.approx((4 * 112 * 2**20 + 2 * 7 / 8 * replicated) / 900e9)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp_size=4),
        Layout(tp_size=1, dp_size=4),
        Layout(tp_size=2, dp_size=4),
        Layout(tp_size=2, dp_size=2, zero1=True),
        Layout(tp_size=2, dp_size=2, sequence_parallel=True),
    ],
)
def test_the_messages_are_those_of_the_step_time(layout: Layout) -> None:
    # Without a roofline the step time counts the pieces of the loss as on a CPU, and leaves out the small messages.
    cluster = dataclasses.replace(H100, latency_us=10.0, is_gpu=False)
    plan = planned(layout, cluster=cluster)
    small = sum(collective_s(message, layout, cluster) for message in small_collectives(model(1), layout, "fp16"))
    assert plan.balance.messages == pytest.approx(plan.time.tensor + plan.time.data + small)
    assert plan.balance.latency > 0 and plan.balance.compute == plan.time.compute


def test_the_planner_says_when_a_layout_is_communication_bound() -> None:
    slow = dataclasses.replace(H100, calibration=dataclasses.replace(H100.calibration, tensor_bandwidth_gb_s=9.0))
    bound = planned(LAYOUT, cluster=slow).balance
    assert bound.ratio < 1
    assert (
        bound.describe()
        == f"communication-bound: messages take {1 / bound.ratio:.2f} times as long as computing, most of it bytes"
    )
    waiting = dataclasses.replace(H100, latency_us=1e6)
    assert planned(LAYOUT, cluster=waiting).balance.describe().endswith("most of it latency")
    assert planned(LAYOUT).balance.describe() == "compute-bound: perfect overlap could hide the messages"
    alone = planned(Layout()).balance
    assert alone.ratio is None and alone.describe() == "no messages: one rank"
