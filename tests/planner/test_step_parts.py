"""What a step's time consists of: operations, messages that no computation hides, and the host's launches."""

import dataclasses
import json
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from paper_models import paper_model, training

from lmscale.config import Layout
from lmscale.config.cluster import load_cluster
from lmscale.planner import host
from lmscale.planner.communication import micro_batch_collectives, step_collectives
from lmscale.planner.flops import hardware_flops_per_step
from lmscale.planner.layer_operations import MAGNITUDE, LayerCounts
from lmscale.planner.operation import Operation
from lmscale.planner.overlap import _waits, exposed_of_pieces, exposed_shares
from lmscale.planner.params import count_parameters, rank_buffer, rank_parameters, stage_placements
from lmscale.planner.plan import Plan
from lmscale.planner.plan_table import format_plan, short_number
from lmscale.planner.search import describe_host
from lmscale.planner.step_operations import OPTIMIZER_LAUNCHES, step_operations


def total(operations: list[Operation], name: str) -> int:
    return sum(o.count * getattr(o, name) for o in operations)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8", "fp32"])
def test_the_flops_of_a_step_are_the_hardware_flops(recompute: str, dtype: str) -> None:
    config = paper_model("gpt_2.5b", recompute=recompute)
    for tp_size in (1, 2):
        found = step_operations(training(config, 4, n=3, dtype=dtype), Layout(tp_size=tp_size))
        assert tp_size * total(found, "flops") == hardware_flops_per_step(config, 1024, 12)


@pytest.mark.parametrize("attention", ["flash", "efficient"])
def test_every_attention_but_exact_is_a_fused_core(attention: str) -> None:
    fused, sdpa, exact = (
        step_operations(training(paper_model("gpt_1.2b", attention=kind, attention_dropout=0.0), 4), Layout())
        for kind in (attention, "sdpa", "exact")
    )
    assert fused == sdpa != exact


def test_a_fused_core_is_not_recomputed_selectively() -> None:
    none, selective = (
        step_operations(training(paper_model("gpt_1.2b", recompute=mode), 4), Layout())
        for mode in ("none", "selective")
    )
    assert total(none, "flops") == total(selective, "flops")
    assert total(selective, "num_bytes") - total(none, "num_bytes") == 40 * 4 * 1024 * 4 * 1536 * 2  # the GELU's result


@pytest.mark.parametrize(
    "dtype, half_moments, buffer, read, written",  # gradient twice, master, moments; these and a half-type weight
    [
        ("bf16", False, 6 + 10 + 10, 8 + 4 + 8, 4 + 8 + 2),  # the first micro-batch is copied, two are added
        ("fp16", True, 6 + 10 + 10, 8 + 4 + 4, 4 + 4 + 2),
        ("fp32", False, 8 + 12 + 12, 8 + 4 + 8, 4 + 8),
        ("fp32", True, 8 + 12 + 12, 8 + 4 + 4, 4 + 4),
        ("fp64", True, 16 + 24 + 24, 16 + 8 + 4, 8 + 4),
    ],
)
def test_the_update_and_the_gradient_buffer_move_a_number_of_bytes_per_parameter(
    dtype: str, half_moments: bool, buffer: int, read: int, written: int
) -> None:
    config = paper_model("gpt_1.2b")
    n = count_parameters(config).total
    found = step_operations(training(config, 4, n=3, dtype=dtype, half_moments=half_moments), Layout())
    (update,) = (o for o in found if o.kind == "optimizer")
    assert (update.read, update.written) == (n * read, n * written)
    assert sum(o.count * o.num_bytes for o in found if o.phase == "gradients") == n * buffer


@pytest.mark.parametrize("name, recompute", [("gpt_8.3b", "none"), ("bert_3.9b", "full")])
def test_float8_reads_what_sequence_parallelism_gathers_once_more(name: str, recompute: str) -> None:
    config, layout = paper_model(name, recompute=recompute), Layout(tp_size=8, sequence_parallel=True)
    float8, half = (training(config, 4, n=3, dtype=dtype) for dtype in ("fp8", "bf16"))
    again = [o for o in step_operations(float8, layout) if o.name.endswith(MAGNITUDE)]
    sent = step_collectives(float8, layout)
    gathered = [c for c in sent if c.kind == "all_gather" and "attention and MLP" in c.what]
    assert sum(o.count for o in again) == sum(c.count for c in gathered)
    assert sum(o.count * o.read for o in again) == sum(c.total_bytes for c in gathered)
    assert not any(o.name.endswith(MAGNITUDE) for o in step_operations(half, layout))


def test_with_zero1_a_rank_updates_its_part() -> None:
    config = paper_model("gpt_1.2b")

    def update(layout: Layout) -> Operation:
        return next(o for o in step_operations(training(config, 4, layout), layout) if o.kind == "optimizer")

    whole, cut = update(Layout(tp_size=1, dp_size=8)), update(Layout(tp_size=1, dp_size=8, zero1=True))
    assert whole.num_bytes - 8 * 26 <= 8 * cut.num_bytes <= whole.num_bytes
    assert cut.launches - OPTIMIZER_LAUNCHES < (whole.launches - OPTIMIZER_LAUNCHES) / 4


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


@pytest.mark.parametrize("layout", [Layout(dp_size=4), Layout(tp_size=2, pp_size=2, dp_size=4, zero1=True)])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_piece_of_the_gradients_is_sent_when_its_last_layer_is_done(layout: Layout, stage: int) -> None:
    """Against each parameter's own layer, a layer's time apart at most, because a piece may end near a layer's end."""
    stage %= layout.pp_size
    config = paper_model("gpt_355m")
    buffer, parameters = rank_buffer(config, layout, True, stage), rank_parameters(config, layout, stage)
    num_layers, per_layer, seen = len(stage_placements(config, layout, stage)), 12, 0
    first = 2 if stage == 0 else 0  # of the first layer
    pass_s, each = 0.1, 0.1 / buffer.num_pieces
    for message_s in (0.1 * each, each, 3 * each):
        end = 0.0
        for piece in range(buffer.num_pieces):
            last = min(i for i, start in enumerate(buffer.starts) if start < (piece + 1) * buffer.piece_size)
            layer = (last - first) // per_layer if last >= first else 0
            end = max(end, pass_s * (num_layers - min(layer, num_layers)) / num_layers) + message_s
        share = exposed_of_pieces(training(config, 8, layout), layout, stage, pass_s, message_s)
        seen += 0.0 < share < 1.0
        assert share * buffer.num_pieces * message_s == pytest.approx(end - pass_s, abs=1.001 * pass_s / num_layers)
        assert share >= 1 / buffer.num_pieces * (1 - 1e-9)  # the last piece is never hidden
    assert seen == 3 and len(parameters) == len(buffer.starts)
    assert exposed_of_pieces(training(config, 8, layout), layout, stage, 0.0, 1.0) == pytest.approx(1.0)


def test_on_a_cpu_no_message_of_the_data_ranks_is_hidden() -> None:
    for cluster, hides in (("h100", True), ("cpu", False)):
        time = planned("gpt_355m", 8, cluster=cluster, dp_size=2).time
        assert time.data > 0 and (time.data_hidden > 0) is hides
        assert time.slowest == pytest.approx(time.total + 0.5 * time.data_hidden)


def test_messages_slow_the_micro_batches_of_other_stages_too_and_nothing_where_the_host_binds() -> None:
    layout, cluster = Layout(tp_size=2, pp_size=4, dp_size=2), load_cluster(ROOT / "conf" / "cluster" / "h100.yaml")
    config = paper_model("gpt_8.3b")
    for n in (1, 8):
        time = Plan(training(config, 4, layout, n=n, dtype="bf16"), layout, cluster).time
        assert time.host == 0 < time.tensor_hidden
        slowed = time.tensor_hidden * (1 + 3 / n) + time.data_hidden
        assert time.slowest == pytest.approx(time.total + 0.5 * slowed)
    layout, small = Layout(tp_size=4), paper_model("bert_336m")
    time = Plan(training(small, 1, layout, dtype="bf16"), layout, cluster).time
    assert 0 < time.tensor_hidden < time.host and time.slowest == time.total


ROOT = Path(__file__).parents[2]


def planned(name: str, b: int, n: int = 1, cluster: str = "h200", dp_size: int = 1, **changes) -> Plan:
    layout, device = Layout(dp_size=dp_size), load_cluster(ROOT / "conf" / "cluster" / f"{cluster}.yaml")
    job = training(paper_model(name, **changes), b, layout, n=n, dtype="bf16")
    return Plan(dataclasses.replace(job, on_gpu=device.is_gpu), layout, device)


def test_the_constants_are_those_of_the_record() -> None:
    path = ROOT / "analysis" / "benchmarks" / "records" / "host_time_cpu.json"
    values = {k: each["value"] for k, each in json.loads(path.read_text(encoding="utf-8"))["metrics"].items()}
    per_tensor = 12  # of a GPT's layer
    assert pytest.approx(values["forward/per_layer"], rel=0.02) == host.FORWARD_S
    assert pytest.approx(values["backward/per_layer"], rel=0.02) == host.BACKWARD_S
    assert pytest.approx(values["forward/rest"] + values["backward/rest"], abs=1e-4) == host.MICRO_BATCH_S
    assert pytest.approx(values["optimizer/per_layer"] / per_tensor, rel=0.02) == host.PARAMETER_S
    assert pytest.approx(values["optimizer/rest"], abs=1e-4) == host.STEP_S


def test_a_step_takes_as_long_as_the_slower_of_device_and_host() -> None:
    small, large = planned("bert_336m", 4, n=3), planned("bert_336m", 64, n=3)
    assert small.time.host > 0 and small.time.total == pytest.approx(host.host_s(small.job, small.layout))
    assert large.time.host == 0 and large.time.host_hidden == pytest.approx(small.time.total)
    assert planned("bert_336m", 4, cluster="cpu").time.host_hidden == 0  # a CPU launches nothing


def test_recomputed_layers_are_launched_again() -> None:
    once, again = (planned("gpt_355m", 4, n=3, recompute=mode) for mode in ("none", "full"))
    seconds = [plan.time.host + plan.time.host_hidden for plan in (once, again)]
    assert seconds[1] - seconds[0] == pytest.approx(3 * 24 * host.FORWARD_S)


def test_a_plan_says_that_it_is_host_bound_and_which_micro_batch_is_not() -> None:
    plan = planned("bert_336m", 4, n=8)
    (line,) = describe_host(plan)
    assert line.startswith("host-bound: the host takes") and line.endswith("it is not with micro_batch_size=16")
    assert planned("bert_336m", 8, n=4).time.host > 0 == planned("bert_336m", 16, n=2).time.host
    assert describe_host(planned("bert_336m", 16)) == []
    assert "waiting for the host" in format_plan("bert_336m", plan, [])
    (line,) = describe_host(planned("bert_336m", 4))
    assert line.endswith("micro_batch_size=16 global_batch_size=16")
    tiny = dataclasses.replace(plan.cluster, memory_gib=plan.needed_bytes / 2**30 + plan.cluster.reserved_gib + 0.01)
    assert describe_host(dataclasses.replace(plan, cluster=tiny))[0].endswith("no larger micro-batch fits")


@pytest.mark.parametrize(
    "value, text", [(999_949, "999.9 k"), (999_950, "1 M"), (999.96, "1 k"), (1.5, "1.5"), (1.2344e18, "1,234 P")]
)
def test_a_number_is_rounded_to_four_digits_before_it_gets_its_prefix(value: float, text: str) -> None:
    assert short_number(value) == text
