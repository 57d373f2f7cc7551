"""How the step time must change with sizes, ranks and machines, for any constants."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_models import SIZES, paper_model

from lmscale.config import Layout, TransformerConfig
from lmscale.config.cluster import Calibration, Cluster, Peaks
from lmscale.planner.communication import Collective, micro_batch_collectives
from lmscale.planner.operations import step_operations
from lmscale.planner.step_time import StepTime, Techniques, collective_s, predict_step_time

CLUSTER = Cluster(
    name="some",
    device="thing",
    is_gpu=True,
    num_devices=4096,
    devices_per_node=8,
    memory_gib=40.0,
    reserved_gib=1.0,
    memory_bandwidth_gb_s=1000.0,
    latency_us=10.0,
    peaks=Peaks(fp32=20.0, fp16=200.0),
    calibration=Calibration("modelled", 100.0, 10.0, False, "made up", 0.5, 1.2, 2.0),
)
MODELS = st.sampled_from(sorted(SIZES))
RECOMPUTE = st.sampled_from(["none", "selective", "full"])


def predicted(
    config: TransformerConfig,
    tp_size: int = 1,
    dp_size: int = 1,
    b: int = 4,
    num_micro_batches: int = 1,
    cluster: Cluster = CLUSTER,
    sequence_parallel: bool = False,
    **techniques: object,
) -> StepTime:
    s = config.max_position_embeddings
    layout = Layout(tp_size=tp_size, dp_size=dp_size, sequence_parallel=sequence_parallel)
    return predict_step_time(config, layout, b, num_micro_batches, s, "fp16", cluster, Techniques(**techniques))


def parts(time: StepTime) -> dict[str, float]:
    return {field.name: getattr(time, field.name) for field in dataclasses.fields(time)}


@given(MODELS, RECOMPUTE, st.sampled_from([1, 2, 4]), st.sampled_from([2, 4, 64]))
@settings(max_examples=30, deadline=None)
def test_data_ranks_change_only_gradient_communication(name, recompute, tp_size, dp_size) -> None:
    config = paper_model(name, recompute=recompute)
    few, many = parts(predicted(config, tp_size, dp_size)), parts(predicted(config, tp_size, 2 * dp_size))
    assert many.pop("data") > few.pop("data") > 0
    assert few == many


@given(MODELS, RECOMPUTE, st.sampled_from([1, 2]), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_micro_batches_multiply_all_but_gradient_communication_and_optimizer(name, recompute, tp_size, n) -> None:
    config = paper_model(name, recompute=recompute)
    one, several = (parts(predicted(config, tp_size, 8, num_micro_batches=k)) for k in (1, n))
    for part, seconds in one.items():
        assert several[part] == pytest.approx(seconds * (1 if part in ("data", "optimizer") else n))


@given(MODELS, RECOMPUTE)
@settings(max_examples=20, deadline=None)
def test_tensor_ranks_shorten_products_at_most_by_their_number(name, recompute) -> None:
    config = paper_model(name, recompute=recompute)
    one, four = predicted(config, 1), predicted(config, 4)
    assert one.matmul / 4 <= four.matmul * (1 + 1e-12) < one.matmul
    assert one.elementwise / 4 < four.elementwise < one.elementwise
    assert one.overhead == four.overhead  # replicated work
    assert one.tensor == 0 < four.tensor
    assert one.optimizer / 4 < four.optimizer < one.optimizer  # replicated parameters


@given(MODELS)
@settings(max_examples=10, deadline=None)
def test_recomputation_time_grows_with_what_is_recomputed(name) -> None:
    times = [predicted(paper_model(name, recompute=mode), 2) for mode in ("none", "selective", "full")]
    totals = [time.total for time in times]
    assert totals == sorted(totals) and totals[0] < totals[1] < totals[2]
    assert times[2].matmul / times[0].matmul < 4 / 3  # the logits are not repeated
    assert times[0].tensor == times[1].tensor < times[2].tensor


@given(
    MODELS, st.sampled_from(["memory_bandwidth_gb_s", "tensor_bandwidth_gb_s", "data_bandwidth_gb_s", "matmul_share"])
)
@settings(max_examples=30, deadline=None)
def test_a_faster_machine_is_never_slower(name, field) -> None:
    config = paper_model(name)
    if field == "memory_bandwidth_gb_s":
        faster = dataclasses.replace(CLUSTER, memory_bandwidth_gb_s=1500.0)
    else:
        value = 1.5 * getattr(CLUSTER.calibration, field)
        faster = dataclasses.replace(CLUSTER, calibration=dataclasses.replace(CLUSTER.calibration, **{field: value}))
    assert predicted(config, 4, 16, cluster=faster).total < predicted(config, 4, 16).total


def test_products_of_whole_tiles_run_at_the_given_rate() -> None:
    config = paper_model("gpt_1.2b", recompute="full", num_attention_heads=24)  # head size 64: attention at half rate
    seconds = predicted(config).matmul
    scores = 4 * 4 * 40 * 4 * 1024**2 * 1536
    flops = sum(o.count * o.flops for o in step_operations(config, Layout(), 4, 1, 1024, "fp16"))
    assert seconds == pytest.approx((flops + scores) / (0.5 * 200e12), rel=1e-12)
    narrow = predicted(paper_model("gpt_1.2b", recompute="full", num_attention_heads=24), 8).matmul
    assert narrow > seconds / 8  # 1536 / 8 is a tile and a half


def test_all_reduce_time_is_bytes_over_bandwidth_plus_latency() -> None:
    config = paper_model("gpt_2.5b")
    messages = micro_batch_collectives(config, Layout(tp_size=2), 4, 1024, "fp16")
    num_bytes, count = sum(a.total_bytes for a in messages), sum(a.count for a in messages)
    assert predicted(config, 2).tensor == pytest.approx(num_bytes / 100e9 + count * 10e-6)  # 2 (p - 1) / p is 1


def test_communication_between_nodes_runs_at_the_networks_rate() -> None:
    config = paper_model("gpt_8.3b")
    inside, beyond = predicted(config, 8).tensor, predicted(config, 16).tensor
    assert beyond > 8 * inside  # a tenth of the bandwidth
    assert predicted(config, 1, 8).data < predicted(config, 1, 16).data / 8
    assert predicted(config, 2, 8).data > 4 * predicted(config, 2, 4).data


@pytest.mark.parametrize(
    ("tp_size", "dp_size", "inside"),
    [(p, d, True) for p, d in ((4, 16), (8, 5), (5, 1), (3, 2))]
    + [(p, d, False) for p, d in ((5, 2), (5, 8), (6, 2), (16, 1))],
)
def test_tensor_groups_send_over_fast_links_only_if_every_group_lies_within_a_node(tp_size, dp_size, inside) -> None:
    """Of groups of 5 on nodes of 8, ranks 5 to 9 are on two nodes; 6 ranks in all are on one."""
    bandwidth = 100e9 if inside else 10e9
    message = Collective("outputs", "all_reduce", "tensor", "forward", 1, 10**9)
    seconds = 2 * (tp_size - 1) / tp_size * 10**9 / bandwidth + 10e-6
    assert collective_s(message, Layout(tp_size=tp_size, dp_size=dp_size), CLUSTER) == pytest.approx(seconds)


def test_sequence_parallelism_divides_replicated_work() -> None:
    config = paper_model("gpt_8.3b", attention_dropout=0.0)
    plain, cut = predicted(config, 8), predicted(config, 8, sequence_parallel=True)
    assert cut.elementwise < plain.elementwise
    assert cut.matmul == plain.matmul
    assert plain.tensor < cut.tensor < 1.6 * plain.tensor  # the inputs of the linear layers are gathered again
    assert predicted(config, 1) == predicted(config, 1, sequence_parallel=True)


def test_overlap_never_hides_more_time_than_there_is() -> None:
    config = paper_model("gpt_8.3b")
    plain = predicted(config, 8, 16)
    assert predicted(config, 8, 16, tensor_overlap=0.25).tensor == pytest.approx(0.75 * plain.tensor)
    hidden = predicted(config, 8, 16, hides_gradients=True)
    assert hidden.data == pytest.approx(max(0.0, plain.data - plain.compute * 2 / 3))
    assert predicted(config, 8, 16, gradient_bytes=2).data == pytest.approx(plain.data / 2, rel=1e-3)


def test_only_sdpa_keeps_the_scores_out_of_memory() -> None:
    fused = dataclasses.replace(CLUSTER, calibration=dataclasses.replace(CLUSTER.calibration, fused_attention=True))
    sdpa, exact = paper_model("gpt_1.2b"), paper_model("gpt_1.2b", attention="exact")
    assert predicted(sdpa, cluster=fused).elementwise < predicted(sdpa).elementwise
    assert predicted(exact, cluster=fused) == predicted(exact)


def test_unsupported_types_and_invalid_shares_are_refused() -> None:
    with pytest.raises(ValueError, match="`precision.dtype` must be one of fp32, fp16 on some .thing., but is bf16"):
        predict_step_time(paper_model("gpt_1.2b"), Layout(), 1, 1, 1024, "bf16", CLUSTER)
    with pytest.raises(ValueError, match="`tensor_overlap` must be at least 0 and at most 1, but is 1.5"):
        Techniques(tensor_overlap=1.5)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_devices": 0}, "`num_devices` must be a whole number of at least 1, but is 0"),
        ({"memory_gib": -1.0}, "`memory_gib` must be above 0, but is -1.0"),
        ({"reserved_gib": 40.0}, r"`reserved_gib` must be at least 0 and below `memory_gib` \(40.0\), but is 40.0"),
        ({"latency_us": -1.0}, "`latency_us` must be at least 0, but is -1.0"),
        ({"watts": 0.0}, "`watts` must be above 0, but is 0.0"),
        ({"peaks": Peaks()}, "`peaks` must name the rate of one type at least"),
    ],
)
def test_an_invalid_cluster_is_refused(changes, words) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CLUSTER, **changes)


def test_an_invalid_peak_is_refused() -> None:
    with pytest.raises(ValueError, match="`tf32` must be above 0, but is 0.0"):
        Peaks(fp16=1.0, tf32=0.0)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"evidence": "guessed"}, "`evidence` must be one of fitted, measured, modelled, but is 'guessed'"),
        ({"matmul_share": 0.0}, "`matmul_share` must be above 0 and at most 1, but is 0.0"),
        ({"layer_overhead_ms": -1.0}, "`layer_overhead_ms` must be at least 0, but is -1.0"),
        ({"elementwise_factor": 0.0}, "`elementwise_factor` must be above 0, but is 0.0"),
    ],
)
def test_an_invalid_calibration_is_refused(changes, words) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CLUSTER.calibration, **changes)
