"""The table of operations: its sums, its prices, and the constants of the clusters."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from paper_models import paper_model

from lmscale.config import Layout
from lmscale.config.cluster import Cluster, load_cluster
from lmscale.planner.communication import step_collectives
from lmscale.planner.flops import hardware_flops_per_step
from lmscale.planner.layer_operations import MAGNITUDE
from lmscale.planner.operation import Operation, product
from lmscale.planner.operations import OPTIMIZER_LAUNCHES, step_operations
from lmscale.planner.operations_table import format_operations, operation_rows
from lmscale.planner.params import count_parameters
from lmscale.planner.plan import make_plan
from lmscale.planner.roofline import operation_s
from lmscale.planner.workload import Workload

ROOT = Path(__file__).parents[2]


def cluster(name: str = "h200", **constants: float) -> Cluster:
    found = load_cluster(ROOT / "conf" / "cluster" / f"{name}.yaml")
    return dataclasses.replace(found, roofline=dataclasses.replace(found.roofline, **constants))


def total(operations: tuple[Operation, ...], name: str) -> int:
    return sum(o.count * getattr(o, name) for o in operations)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8", "fp32"])
def test_the_flops_of_a_step_are_the_hardware_flops(recompute: str, dtype: str) -> None:
    config = paper_model("gpt_2.5b", recompute=recompute)
    for tp_size in (1, 2):
        found = step_operations(config, Layout(tp_size=tp_size), 4, 3, 1024, dtype)
        assert tp_size * total(found, "flops") == hardware_flops_per_step(config, 1024, 12)


@pytest.mark.parametrize("attention", ["auto", "flash", "efficient"])
def test_every_attention_but_exact_is_a_fused_core(attention: str) -> None:
    fused, sdpa, exact = (
        step_operations(paper_model("gpt_1.2b", attention=kind, attention_dropout=0.0), Layout(), 4, 1, 1024, "bf16")
        for kind in (attention, "sdpa", "exact")
    )
    assert fused == sdpa != exact


def test_a_fused_core_is_not_recomputed_selectively() -> None:
    none, selective = (
        step_operations(paper_model("gpt_1.2b", recompute=mode), Layout(), 4, 1, 1024, "bf16")
        for mode in ("none", "selective")
    )
    assert total(none, "flops") == total(selective, "flops")
    assert total(selective, "num_bytes") - total(none, "num_bytes") == 40 * 4 * 1024 * 4 * 1536 * 2  # the GELU's result


def test_the_optimizer_and_the_gradient_buffer_move_a_number_of_bytes_per_parameter() -> None:
    config = paper_model("gpt_1.2b")
    n = count_parameters(config).total
    for half_moments, optimizer in ((False, 34), (True, 26)):
        found = step_operations(config, Layout(), 4, 3, 1024, "bf16", half_moments)
        by_phase = {p: sum(o.count * o.num_bytes for o in found if o.phase == p) for p in ("gradients", "optimizer")}
        assert by_phase == {"gradients": n * (6 + 10 + 10), "optimizer": n * optimizer}


@pytest.mark.parametrize(
    "dtype, half_moments, read, written",  # gradient twice, master and moments; master, moments and a half-type weight
    [
        ("bf16", False, 8 + 4 + 8, 4 + 8 + 2),
        ("fp16", True, 8 + 4 + 4, 4 + 4 + 2),
        ("fp32", False, 8 + 4 + 8, 4 + 8),
        ("fp32", True, 8 + 4 + 4, 4 + 4),
        ("fp64", True, 16 + 8 + 4, 8 + 4),
    ],
)
def test_the_update_writes_a_second_weight_only_for_half_types(
    dtype: str, half_moments: bool, read: int, written: int
) -> None:
    config = paper_model("gpt_1.2b")
    n = count_parameters(config).total
    (update,) = (o for o in step_operations(config, Layout(), 4, 1, 1024, dtype, half_moments) if o.kind == "optimizer")
    assert (update.read, update.written) == (n * read, n * written)


@pytest.mark.parametrize("name, recompute", [("gpt_8.3b", "none"), ("bert_3.9b", "full")])
def test_float8_reads_what_sequence_parallelism_gathers_once_more(name: str, recompute: str) -> None:
    config, layout = paper_model(name, recompute=recompute), Layout(tp_size=8, dp_size=1, sequence_parallel=True)
    s, b = config.max_position_embeddings, 4
    again = [o for o in step_operations(config, layout, b, 3, s, "fp8") if o.name.endswith(MAGNITUDE)]
    gathered = [
        c
        for c in step_collectives(config, layout, b, 3, s, "fp8", on_gpu=True)
        if c.kind == "all_gather" and "attention and MLP" in c.what
    ]
    assert sum(o.count for o in again) == sum(c.count for c in gathered)
    assert sum(o.count * o.read for o in again) == sum(c.total_bytes for c in gathered)
    assert not any(o.name.endswith(MAGNITUDE) for o in step_operations(config, layout, b, 3, s, "bf16"))


def test_sequence_parallelism_copies_only_the_output_of_halves() -> None:
    config, found = paper_model("gpt_8.3b"), []
    for halves in (False, True):
        plain, cut = (
            Layout(tp_size=8, dp_size=1, sequence_parallel=cuts, batch_halves=halves) for cuts in (False, True)
        )
        names = [{o.name for o in step_operations(config, layout, 4, 1, 1024, "bf16")} for layout in (plain, cut)]
        found.append(names[1] - names[0] - {"MLP input, again", "attention input, again"})
    assert found == [set(), {"output of the last layer, gathered", "gradient of this rank's tokens"}]


def test_with_zero1_a_rank_updates_only_its_own_tensors() -> None:
    config = paper_model("gpt_1.2b")

    def update(layout: Layout) -> Operation:
        return next(o for o in step_operations(config, layout, 4, 1, 1024, "bf16") if o.kind == "optimizer")

    whole, cut = update(Layout(tp_size=1, dp_size=8)), update(Layout(tp_size=1, dp_size=8, zero1=True))
    assert 8 * cut.num_bytes < 1.3 * whole.num_bytes
    assert cut.launches - OPTIMIZER_LAUNCHES < (whole.launches - OPTIMIZER_LAUNCHES) / 4


def test_micro_batches_multiply_all_but_the_update() -> None:
    config = paper_model("bert_336m")
    one, three = (step_operations(config, Layout(), 4, n, 512, "bf16") for n in (1, 3))
    update = ("gradients", "optimizer")
    for a, b in zip(
        (o for o in one if o.phase not in update), (o for o in three if o.phase not in update), strict=True
    ):
        assert b == dataclasses.replace(a, count=3 * a.count)


def test_a_large_product_runs_at_the_measured_rate() -> None:
    machine = cluster(tile_fill=0.0, product_share=1.0)
    large = product("large", "forward", 128 * 132, 256 * 64, 8192, 2)
    assert large.flops / operation_s(large, machine, "bf16") == pytest.approx(790e12)
    assert operation_s(dataclasses.replace(large, count=2), machine, "bf16") == 2 * operation_s(large, machine, "bf16")


def test_small_products_and_partial_waves_are_slower() -> None:
    machine = cluster()

    def rate(m: int, n: int, k: int) -> float:
        one = product("some", "forward", m, n, k, 2)
        return one.flops / operation_s(one, machine, "bf16")

    assert rate(16896, 16384, 8192) > rate(16896, 16384, 1024) > rate(16896, 16384, 128)
    assert rate(128 * 132, 256, 4096) > rate(128 * 133, 256, 4096)  # one tile more than multiprocessors


def test_a_head_of_96_takes_as_long_as_one_of_128() -> None:
    def seconds(heads: int, hidden: int) -> float:
        config = paper_model("gpt_1.2b", num_attention_heads=heads, hidden_size=hidden)
        found = step_operations(config, Layout(), 4, 1, 1024, "bf16")
        return sum(operation_s(o, cluster(), "bf16") for o in found if o.kind == "attention")

    assert seconds(16, 96 * 16) == pytest.approx(seconds(16, 128 * 16))


@pytest.mark.parametrize(
    "layout",
    [Layout(tp_size=8), Layout(tp_size=2, dp_size=3), Layout(tp_size=8, dp_size=8, sequence_parallel=True, zero1=True)],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_table_has_every_operation_and_collective_and_adds_up_to_the_step(layout, dtype) -> None:
    config = paper_model("gpt_8.3b")
    plan = make_plan(Workload(config, 4, 8 * layout.dp_size, 1024, dtype, 1), layout, cluster())
    rows = operation_rows(plan)
    assert sum(row.seconds for row in rows) == pytest.approx(plan.time.total, rel=1e-12)
    assert sum(row.hidden for row in rows) == pytest.approx(plan.time.tensor_hidden) != 0
    assert {c.what for c in step_collectives(config, layout, 4, 2, 1024, dtype)} < {row.name for row in rows}
    assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)
    text = format_operations(rows)
    assert "backward: attention core" in text and "100.0%" in text
    messages = next(row for row in rows if row.hidden > 1e-9)
    assert f"  messages of {1e3 * (messages.seconds + messages.hidden):.2f} ms" in text


def metrics_of(record: str) -> dict[str, float]:
    text = (ROOT / "analysis" / "scaling" / "records" / f"{record}.json").read_text(encoding="utf-8")
    return {name: metric["value"] for name, metric in json.loads(text)["metrics"].items()}


def test_the_clusters_have_the_fitted_constants() -> None:
    metrics = metrics_of("roofline")
    for name in ("h200", "h100", "dgx_a100"):
        for constant in ("product_share", "tile_fill", "memory_share", "launch_us"):
            assert getattr(cluster(name).roofline, constant) == metrics[constant]


def expected_error(name: str) -> str:
    return load_cluster(ROOT / "conf" / "cluster" / f"{name}.yaml").calibration.expected_error


def test_the_expected_errors_of_the_clusters_are_those_of_the_records() -> None:
    misses = metrics_of("roofline")  # modelled speed over published speed, less 1
    one_node = sorted(1 + misses[name] for name in misses if re.match("held out/(MPT|nanochat)", name))
    many = sorted(1 + misses[name] for name in misses if name.startswith("held out/Megatron"))
    text = (
        f"A100 and H100 runs outside the fit took {one_node[0]:.2f} to {one_node[-1]:.2f} times as long on one node, "
        f"and {many[0]:.2f} and {many[1]:.2f} times on 48 and 96 H100"
    )
    assert (len(one_node), len(many)) == (13, 2)
    assert {expected_error(name) for name in ("h200", "h100", "dgx_a100")} == {text}
    misses = metrics_of("cost_model")  # modelled over published days, less 1
    days = sorted(1 / (1 + misses[name]) for name in misses if re.match("Table 2, .*, steps alone", name))
    text = f"the runs of the paper's Table 2, outside the fit, took {days[0]:.2f} to {days[-1]:.2f} times as long"
    assert len(days) == 3 and expected_error("dgx2h_v100") == text
    times = metrics_of("measured_layouts_cpu")
    names = [name.removesuffix("/modelled_s") for name in times if name.endswith("/modelled_s")]
    ratios = sorted(times[f"{name}/long_s"] / times[f"{name}/modelled_s"] for name in names)
    text = f"four layouts of a GPT on two cores took {ratios[0]:.2f} to {ratios[-1]:.2f} times as long"
    assert len(ratios) == 4 and expected_error("cpu") == text


def test_a_cluster_has_a_roofline_or_passes() -> None:
    with pytest.raises(ValueError, match="either `roofline` or `calibration.matmul_share`, but h200 has neither"):
        dataclasses.replace(cluster(), roofline=None)
