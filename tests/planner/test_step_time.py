"""The time of a step: its operations and messages at the rates of a device, and how it changes with sizes and ranks."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_models import SIZES, paper_model, training

from analysis.scaling.study import LATER_SHAPES
from lmscale.config import Layout, TransformerConfig
from lmscale.config.cluster import Calibration, Cluster, Peaks, Roofline, load_cluster
from lmscale.planner.communication import Collective, micro_batch_collectives
from lmscale.planner.operation import DROPOUT_SHARE, product
from lmscale.planner.plan import Plan
from lmscale.planner.plan_table import format_operations, slowest_first
from lmscale.planner.search import rank_on_machine
from lmscale.planner.step_operations import step_operations
from lmscale.planner.step_time import StepTime, crosses_nodes, message_rows, message_s
from lmscale.planner.workload import Workload

ROOT = Path(__file__).parents[2]
CLUSTER = Cluster(
    name="some",
    device="thing",
    is_gpu=True,
    num_devices=4096,
    devices_per_node=8,
    memory_gib=40.0,
    reserved_gib=1.0,
    latency_us=10.0,
    peaks=Peaks(fp32=20.0, fp16=200.0),
    calibration=Calibration("modelled", 100.0, 10.0, "made up"),
    roofline=Roofline(200.0, 1000.0, 100.0, 80.0, 0.5, 0.8, 5.0),
)
MODELS = st.sampled_from(sorted(SIZES))
RECOMPUTE = st.sampled_from(["none", "selective", "full"])


def changed(cluster: Cluster = CLUSTER, **values: object) -> Cluster:
    for name in ("roofline", "calibration"):
        part = getattr(cluster, name)
        mine = {key: values.pop(key) for key in list(values) if hasattr(part, key)}
        cluster = dataclasses.replace(cluster, **{name: dataclasses.replace(part, **mine)})
    return dataclasses.replace(cluster, **values)


def shipped(name: str) -> Cluster:
    return load_cluster(ROOT / "conf" / "cluster" / f"{name}.yaml")


def planned(
    config: TransformerConfig,
    layout: Layout | None = None,
    b: int = 4,
    n: int = 1,
    cluster: Cluster = CLUSTER,
    dtype: str = "fp16",
) -> Plan:
    layout = layout or Layout()
    return Plan(training(config, b, layout, n, dtype, on_gpu=cluster.is_gpu), layout, cluster)


def parts(time: StepTime) -> dict[str, float]:
    return dataclasses.asdict(time)


@given(MODELS, RECOMPUTE, st.sampled_from([1, 2, 4]), st.sampled_from([2, 4, 64]))
@settings(max_examples=20, deadline=None)
def test_data_ranks_change_only_gradient_communication(name, recompute, tp_size, dp_size) -> None:
    config = paper_model(name, recompute=recompute)
    few, many = (parts(planned(config, Layout(tp_size=tp_size, dp_size=d)).time) for d in (dp_size, 2 * dp_size))
    exposed, hidden = ([time.pop(name) for time in (few, many)] for name in ("data", "data_hidden"))
    assert exposed[1] > exposed[0] > 0 and hidden[0] > 0
    assert exposed[1] + hidden[1] > exposed[0] + hidden[0]
    assert 0 < many.pop("latency") <= few.pop("latency")  # pieces grow with the data ranks
    assert few == many


@given(MODELS, RECOMPUTE)
@settings(max_examples=20, deadline=None)
def test_tensor_ranks_shorten_work_at_most_by_their_number(name, recompute) -> None:
    config = paper_model(name, recompute=recompute)
    one, four = (planned(config, Layout(tp_size=p)).time for p in (1, 4))
    assert one.matmul / 4 <= four.matmul * (1 + 1e-12) < one.matmul
    assert one.elementwise / 4 < four.elementwise < one.elementwise
    assert one.optimizer / 4 < four.optimizer < one.optimizer  # replicated parameters
    assert one.overhead == pytest.approx(four.overhead, rel=0.1)  # as many kernels
    assert one.tensor == 0 < four.tensor


@given(
    MODELS,
    st.sampled_from(["copy_gb_s", "product_tflops", "attention_forward_tflops", "memory_share", "product_share"])
    | st.sampled_from(["tensor_bandwidth_gb_s", "data_bandwidth_gb_s"]),
)
@settings(max_examples=30, deadline=None)
def test_a_faster_machine_is_never_slower(name, rate) -> None:
    layout = Layout(tp_size=4, dp_size=16)
    before = getattr(CLUSTER.roofline, rate, None) or getattr(CLUSTER.calibration, rate)
    faster = planned(paper_model(name), layout, cluster=changed(**{rate: 1.2 * before})).time
    assert faster.total < planned(paper_model(name), layout).time.total


def test_products_run_at_their_rate_in_whole_tiles_or_at_that_of_their_bytes() -> None:
    large = product("large", "forward", 1280, 2560, 8192, 2)
    assert large.flops / large.seconds(CLUSTER, "fp16") == pytest.approx(0.5 * 200e12)
    assert large.flops / large.seconds(CLUSTER, "fp32") == pytest.approx(0.5 * 20e12)
    assert large._replace(count=2).seconds(CLUSTER, "fp16") == 2 * large.seconds(CLUSTER, "fp16")
    float8, h100 = large._replace(work=dataclasses.replace(large.work, float8=True)), shipped("h100")
    assert float8.seconds(h100, "fp8") < large.seconds(h100, "fp8") == large.seconds(h100, "bf16")
    narrow = product("narrow", "forward", 1280, 129, 8192, 2)
    assert narrow.flops / narrow.seconds(CLUSTER, "fp16") == pytest.approx(0.5 * 200e12 * 129 / 256)
    thin = product("thin", "forward", 12800, 12800, 16, 2)
    assert thin.num_bytes / thin.seconds(CLUSTER, "fp16") == pytest.approx(1000e9)


def test_heads_of_a_size_without_a_kernel_take_as_long_as_those_of_the_next_one() -> None:
    def seconds(head_size: int) -> float:
        config = paper_model("gpt_1.2b", hidden_size=16 * head_size)
        found = step_operations(training(config, 4, dtype="fp16"), Layout())
        return sum(o.seconds(CLUSTER, "fp16") for o in found if o.kind == "attention")

    assert seconds(112) == pytest.approx(seconds(128)) == pytest.approx(seconds(96) * 128 / 96 * 0.94)


@pytest.mark.parametrize("backward", [False, True])
def test_attention_computes_in_bf16_where_products_are_in_float8(backward: bool) -> None:
    h100 = shipped("h100")
    assert h100.attention_flops_per_s("fp8", backward) == h100.attention_flops_per_s("bf16", backward)


def test_scores_pass_through_memory_where_no_kernel_keeps_them_on_the_chip() -> None:
    def time(attention: str, dropout: float, is_gpu: bool) -> StepTime:
        config = paper_model("gpt_355m", attention=attention, attention_dropout=dropout)
        return planned(config, cluster=changed(is_gpu=is_gpu)).time

    assert time("sdpa", 0.1, True).total < time("exact", 0.1, True).total
    assert time("sdpa", 0.1, False) == time("exact", 0.1, False)
    assert time("sdpa", 0.0, False).total < time("exact", 0.0, False).total


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp_size=8),
        Layout(tp_size=2, dp_size=3),
        Layout(tp_size=8, dp_size=8, sequence_parallel=True, zero1=True),
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_operations_are_every_one_of_the_step_and_add_up_to_it(layout, dtype) -> None:
    plan = planned(paper_model("gpt_8.3b"), layout, n=2, cluster=shipped("h200"), dtype=dtype)
    rows = slowest_first(plan.rows)
    assert sum(row.seconds for row in rows) == pytest.approx(plan.time.total, rel=1e-12)
    assert {c.what for c in plan.collectives} < {row.name for row in rows}
    assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)
    text = format_operations(rows)
    assert "backward: attention core" in text and "100.0%" in text
    messages = next(row for row in rows if row.hidden > 1e-9)
    assert f"  messages of {1e3 * (messages.seconds + messages.hidden):.2f} ms" in text


@pytest.mark.parametrize(
    ("tp_size", "dp_size", "inside"),
    [(p, d, True) for p, d in ((4, 16), (8, 5), (5, 1), (3, 2), (4, 2))]
    + [(p, d, False) for p, d in ((5, 2), (5, 8), (6, 2), (16, 1))],
)
def test_groups_send_over_fast_links_only_if_every_one_lies_within_a_node(tp_size, dp_size, inside) -> None:
    """Of groups of 5 on nodes of 8, ranks 5 to 9 are on two nodes; 6 ranks in all are on one."""
    layout = Layout(tp_size=tp_size, dp_size=dp_size)
    bandwidth = 100e9 if inside else 10e9
    assert crosses_nodes(layout, CLUSTER) is not inside
    for kind, rounds in (("all_reduce", 2), ("all_gather", 1), ("reduce", 1)):
        message = Collective("outputs", kind, "tensor", "forward", 3, 10**9)
        seconds = 3 * (rounds * (tp_size - 1) / tp_size * 10**9 / bandwidth + 10e-6)
        assert message_s(message, layout, CLUSTER) == pytest.approx(seconds)
    if dp_size > 1:  # groups of data ranks are on one node only if all ranks are
        gradients = Collective("gradients", "all_reduce", "data", "gradients", 1, 10**9)
        bandwidth = 100e9 if layout.world_size <= 8 else 10e9
        seconds = 2 * (dp_size - 1) / dp_size * 10**9 / bandwidth + 10e-6
        assert message_s(gradients, layout, CLUSTER) == pytest.approx(seconds)


def test_stages_send_over_fast_links_only_if_every_model_lies_within_a_node() -> None:
    message = Collective("hidden states", "send", "pipeline", "forward", 3, 10**9)
    for pp_size, bandwidth in ((2, 100e9), (3, 10e9)):
        seconds = message_s(message, Layout(tp_size=4, pp_size=pp_size, dp_size=2), CLUSTER)
        assert seconds == pytest.approx(3 * (10**9 / bandwidth + 10e-6))


def test_a_recomputed_message_is_hidden_as_that_of_the_forward_pass() -> None:
    for what, share in (("outputs", 0.25), ("outputs, recomputed", 0.25), ("gradients", 1.0)):
        message = Collective(what, "all_reduce", "tensor", "backward", 3, 10**9)
        (row,) = message_rows([message], Layout(tp_size=4), CLUSTER, {"outputs": 0.25})
        whole = message_s(message, Layout(tp_size=4), CLUSTER)
        assert (row.seconds, row.hidden) == pytest.approx((share * whole, (1 - share) * whole))


def test_sequence_parallelism_divides_replicated_work() -> None:
    config = paper_model("gpt_8.3b")
    plain, cut = (planned(config, Layout(tp_size=8, sequence_parallel=on)).time for on in (False, True))
    assert cut.elementwise < plain.elementwise and cut.matmul == plain.matmul
    assert plain.messages < cut.messages < 1.6 * plain.messages  # the inputs of the linear layers are gathered again
    alone = [planned(config, Layout(sequence_parallel=on)).time for on in (False, True)]
    assert alone[0] == alone[1]


# An exercise of a text: one layer of d = 4096 on 8 H100, b = 4, s = 2048, fp16, peak rates, no latency.
B, S, D, P = 4, 2048, 4096, 8
LINKS = changed(tensor_bandwidth_gb_s=900.0, latency_us=0.0)
LAYER = TransformerConfig("gpt", 1, D, 32, 50257, S)
LAYER_FLOPS = 24 * B * S * D**2 + 4 * B * S**2 * D


def forward_of_a_layer(tp_size: int = P, cluster: Cluster = LINKS, compute_s: float | None = None) -> StepTime:
    """Messages of one forward pass of a layer, beside its products at 989 TFLOP/s."""
    found = micro_batch_collectives(training(LAYER, B), Layout(tp_size=tp_size))
    sent = [message for message in found if message.phase == "forward" and "MLP" in message.what]
    assert [(m.kind, m.count, m.num_bytes) for m in sent] == [("all_reduce", 2, 64 * 2**20)]
    time = StepTime.of(message_rows(sent, Layout(tp_size=tp_size), cluster))
    return dataclasses.replace(time, matmul=LAYER_FLOPS / tp_size / 989e12)


def test_a_layer_sends_112_mib_twice_in_261_microseconds_and_its_ratio_is_1_73() -> None:
    time = forward_of_a_layer()
    assert time.messages * 900e9 == pytest.approx(224 * 2**20) and time.latency == 0
    assert time.messages == pytest.approx(261.0e-6, rel=1e-3)  # the text: 249, with 224 MB for 224 MiB
    assert time.compute == pytest.approx(451.6e-6, rel=1e-3)  # the text: 42.9
    assert time.ratio == pytest.approx(1.730, rel=1e-3)  # the text: 0.17
    each_way = changed(LINKS, tensor_bandwidth_gb_s=450.0)
    assert forward_of_a_layer(cluster=each_way).ratio == pytest.approx(0.865, rel=1e-3)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_devices": 0}, "`num_devices` must be a whole number of at least 1, but is 0"),
        ({"memory_gib": -1.0}, "`memory_gib` must be above 0, but is -1.0"),
        ({"reserved_gib": 40.0}, r"`reserved_gib` must be at least 0 and below `memory_gib` \(40.0\), but is 40.0"),
        ({"latency_us": -1.0}, "`latency_us` must be at least 0, but is -1.0"),
        ({"watts": 0.0}, "`watts` must be above 0, but is 0.0"),
        ({"peaks": Peaks()}, "`peaks` must name the rate of one type at least"),
        ({"evidence": "guessed"}, "`evidence` must be one of fitted, measured, modelled, but is 'guessed'"),
        ({"product_share": 0.0}, "`product_share` must be above 0, but is 0.0"),
        ({"launch_us": -1.0}, "`launch_us` must be at least 0, but is -1.0"),
    ],
)
def test_an_invalid_cluster_is_refused(changes, words) -> None:
    with pytest.raises(ValueError, match=words):
        changed(**changes)


def metrics_of(record: str, folder: str = "benchmarks") -> dict[str, float]:
    text = (ROOT / "analysis" / folder / "records" / f"{record}.json").read_text(encoding="utf-8")
    return {name: metric["value"] for name, metric in json.loads(text)["metrics"].items()}


def test_the_clusters_have_the_fitted_constants() -> None:
    metrics = metrics_of("roofline")
    for name in ("h200", "h100", "dgx_a100"):
        for constant in ("product_share", "memory_share", "launch_us"):
            assert getattr(shipped(name).roofline, constant) == metrics[constant]
    assert DROPOUT_SHARE == pytest.approx(metrics["dropout_share"], abs=5e-3)


def test_the_expected_errors_of_the_clusters_are_those_of_the_records() -> None:
    misses = metrics_of("roofline")  # modelled speed over published speed, less 1
    one_node = sorted(1 + misses[name] for name in misses if re.match("held out/(MPT|nanochat)", name))
    many = sorted(1 + misses[name] for name in misses if name.startswith("held out/Megatron"))
    text = (
        f"A100 and H100 runs outside the fit took {one_node[0]:.2f} to {one_node[-1]:.2f} times as long on one node, "
        f"and {many[0]:.2f} and {many[1]:.2f} times on 48 and 96 H100"
    )
    assert (len(one_node), len(many)) == (13, 2)
    assert {shipped(name).calibration.expected_error for name in ("h100", "dgx_a100")} == {text}
    assert shipped("h200").calibration.expected_error.endswith(f"; {text}")
    v100, ratios = shipped("dgx2h_v100"), []
    for shape in LATER_SHAPES:  # whose code recomputes all layers, and keeps the scores of its attention in memory
        plan = planned(shape.config, Layout(tp_size=shape.tp_size), 8, cluster=v100)
        ratios.append(shape.v100_ms / 1e3 / plan.time.total)
    text = "Megatron-LM's fused code of 2020, outside the fit, took {:.2f} to {:.2f} times as long on one node"
    assert v100.calibration.expected_error == text.format(min(ratios), max(ratios))
    measured = metrics_of("measured_layouts_cpu", "scaling")
    job = Workload(TransformerConfig("gpt", 4, 512, 8, 8192, 256), 2, 4, 256, "fp32", on_gpu=False)
    ratios = []
    for plan in rank_on_machine([job], shipped("cpu"), 2, Layout()):
        name = f"tp{plan.layout.tp_size}_dp{plan.layout.dp_size}" + "_zero1" * plan.layout.zero1
        ratios.append(measured[f"{name}/long_s"] / plan.time.total)
    text = "four layouts of a GPT on two cores took {:.2f} to {:.2f} times as long"
    assert len(ratios) == 4 and shipped("cpu").calibration.expected_error == text.format(min(ratios), max(ratios))
