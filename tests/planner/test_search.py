"""Rankings and nearest layouts, against brute force."""

import dataclasses
import itertools
import random
from pathlib import Path

import pytest
from paper_models import paper_model
from test_step_time import CLUSTER

from lmscale.config import RECOMPUTE_MODES, Layout
from lmscale.config.cluster import Cluster, load_cluster
from lmscale.planner.memory import GIB, estimate_memory
from lmscale.planner.plan import Plan
from lmscale.planner.search import (
    largest_number,
    micro_batch_sizes,
    nearest_plan,
    rank_layouts,
    rank_on_machine,
    suggest_layout,
)
from lmscale.planner.workload import Workload, divisors, model_sizes, stage_numbers, tensor_sizes

CLUSTERS = Path(__file__).resolve().parents[2] / "conf" / "cluster"


def job(name: str = "gpt_2.5b", batch: int = 48, dtype: str = "fp16", **changes: object) -> Workload:
    config = paper_model(name, **changes)
    return Workload(config, 1, batch, config.max_position_embeddings, dtype, 1000)


def every_plan(a_job: Workload, num_devices: int, zero1: bool = False) -> list[Plan]:
    """Every layout of all `num_devices` that a `Plan` accepts, by brute force."""
    plans = []
    for tp_size, b, mode in itertools.product(range(1, num_devices + 1), range(1, 65), RECOMPUTE_MODES):
        if num_devices % tp_size == 0:
            try:
                layout = Layout(tp_size=tp_size, dp_size=num_devices // tp_size, zero1=zero1)
                plans.append(Plan(a_job.change(b, mode), layout, CLUSTER))
            except ValueError:
                continue
    return plans


def without_options(plans: tuple[Plan, ...]) -> list[Plan]:
    options = ("zero1", "batch_halves", "sequence_parallel")
    return [plan for plan in plans if not any(getattr(plan.layout, name) for name in options)]


@pytest.mark.parametrize("name, num_devices", [("gpt_2.5b", 4), ("gpt_2.5b", 12), ("bert_336m", 16), ("gpt_8.3b", 16)])
def test_the_first_of_a_ranking_is_the_fastest_layout_that_fits(name: str, num_devices: int) -> None:
    a_job = job(name, 64 if num_devices == 16 else 48)
    ranking = rank_layouts(a_job, CLUSTER, num_devices, Layout())
    plain = without_options(ranking.fitting)
    fits = [plan for plan in every_plan(a_job, num_devices) if plan.missing_bytes <= 0]
    # Brute force also tries micro-batches of 3, 6, 12 and so on, which a ranking does not.
    powers = [plan for plan in fits if plan.job.micro_batch_size in (1, 2, 4, 8, 16, 32, 64)]
    assert plain[0].time.total == min(plan.time.total for plan in powers)
    assert {(plan.layout, plan.job) for plan in plain} >= {(plan.layout, plan.job) for plan in powers}
    assert all(plan.layout.world_size == num_devices and plan.missing_bytes <= 0 for plan in ranking.fitting)


def brute_force(a_job: Workload, cluster: Cluster, num_devices: int) -> Plan | None:
    """The fastest plan that fits, of all that the search may try; `None` if none does."""
    best = None
    for tp, pp in itertools.product(divisors(num_devices, num_devices), stage_numbers(a_job)):
        dp, rest = divmod(num_devices, tp * pp)
        for options in itertools.product((False, True), repeat=3) if not rest else ():
            names = ("sequence_parallel", "zero1", "batch_halves")
            layout = Layout(tp_size=tp, dp_size=dp, pp_size=pp, **dict(zip(names, options, strict=True)))
            for b, mode in itertools.product((1, 2, 4, 8, 16, 32, 64), RECOMPUTE_MODES):
                try:
                    plan = Plan(a_job.change(b, mode), layout, cluster)
                except ValueError:
                    continue
                if plan.missing_bytes <= 0 and (best is None or plan.time.total < best.time.total):
                    best = plan
    return best


@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_no_layout_of_the_search_space_is_faster_than_the_first_of_a_ranking(number: int) -> None:
    """On a slow cluster and on fast ones, where small steps wait for the host."""
    draw = random.Random(number)
    layers, heads = draw.choice([4, 6, 8, 12]), draw.choice([4, 8, 12])
    sizes = {"num_layers": layers, "num_attention_heads": heads, "hidden_size": heads * draw.choice([128, 512, 1024])}
    a_job = job("gpt_2.5b", draw.choice([1, 2, 4, 8, 16, 24, 64]), **sizes)
    num_devices = draw.choice([2, 4, 6, 8, 16])
    fast = load_cluster(CLUSTERS / f"{draw.choice(['h100', 'h200', 'dgx_a100'])}.yaml")
    for cluster in (CLUSTER, fast):
        best = brute_force(a_job, cluster, num_devices)
        if best is not None:
            first = rank_layouts(a_job, cluster, num_devices, Layout(), stage_numbers(a_job)).fitting[0]
            assert first.time.total <= best.time.total * (1 + 1e-11), (first.overrides, best.overrides)


@pytest.mark.parametrize(
    "name, batch, num_devices, expected",
    [("gpt_8.3b", 1, 16, (8, 2, 1)), ("bert_336m", 24, 24, (4, 2, 8))],  # tensor groups across nodes; a host
)
def test_stages_with_fewer_micro_batches_than_stages_may_be_the_fastest(
    name: str, batch: int, num_devices: int, expected: tuple[int, int, int]
) -> None:
    a_job = job(name, batch, "bf16")
    first = rank_layouts(a_job, load_cluster(CLUSTERS / "h100.yaml"), num_devices, Layout(), stage_numbers(a_job))
    best = first.fitting[0]
    assert (best.layout.tp_size, best.layout.pp_size, best.job.micro_batch_size) == expected


def test_of_layouts_that_all_wait_for_their_host_the_one_that_computes_least_is_first() -> None:
    ranking = rank_layouts(job("bert_336m", 128, "bf16"), load_cluster(CLUSTERS / "h100.yaml"), 128, Layout())
    best = ranking.fitting[0]
    assert best.time.host > 0 and best.recompute == "none"


def test_layouts_that_do_not_fit_are_listed_by_shortage() -> None:
    ranking = rank_layouts(job("gpt_8.3b", 64), CLUSTER, 16, Layout())
    sizes = {plan.layout.tp_size for plan in ranking.too_large}
    assert sizes == {1} and not sizes & {plan.layout.tp_size for plan in ranking.fitting}
    for plan in ranking.too_large:
        same = [p for p in every_plan(plan.job, 16, zero1=True) if p.layout.tp_size == plan.layout.tp_size]
        assert plan.missing_bytes == min(p.missing_bytes for p in same) > 0


@pytest.mark.parametrize(
    "mode, wanted, nearest",  # tp_size, dp_size, micro-batch
    [
        ("none", (1, 4, 4), (2, 2, 4)),  # too large for one rank: fewer data ranks
        ("full", (2, 4, 5), (2, 4, 4)),  # 5 does not divide
        ("full", (3, 4, 4), (4, 3, 4)),  # 3 does not divide 20 heads
    ],
)
def test_the_nearest_layout_keeps_the_devices_and_changes_the_least(mode: str, wanted: tuple, nearest: tuple) -> None:
    tp_size, dp_size, b = wanted
    found = nearest_plan(job().change(b, mode), Layout(tp_size=tp_size, dp_size=dp_size), CLUSTER)
    assert found.layout.world_size == tp_size * dp_size
    assert (found.layout.tp_size, found.layout.dp_size, found.job.micro_batch_size) == nearest


def test_the_nearest_layout_keeps_the_options() -> None:
    wanted = Layout(tp_size=2, dp_size=4, sequence_parallel=True, zero1=True, batch_halves=True)
    found = nearest_plan(job().change(3, "full"), wanted, CLUSTER)
    assert (found.layout, found.job.micro_batch_size) == (wanted, 4)


def test_a_model_that_fits_no_layout_reports_its_minimum_memory() -> None:
    vast, halves = job(batch=3, hidden_size=76800, num_layers=30), Layout(batch_halves=True)
    assert nearest_plan(vast, Layout(), CLUSTER) is None
    answer = suggest_layout(vast, halves, CLUSTER)  # which the batch forbids
    assert "needs least memory, parallel.tp_size=20 parallel.dp_size=1" in answer and "halves" not in answer


def test_zero1_fits_a_model_on_data_ranks() -> None:
    whole = job("gpt_1.2b", 8, num_attention_heads=1)
    small = dataclasses.replace(CLUSTER, memory_gib=18.0)
    assert nearest_plan(whole, Layout(), small) is None
    found = nearest_plan(whole, Layout(zero1=True), small)
    assert found.layout.dp_size > 1 and found.missing_bytes <= 0
    tiny = dataclasses.replace(CLUSTER, memory_gib=1.5)
    least = "needs least memory, parallel.tp_size=1 parallel.dp_size=8 micro_batch_size=1"
    assert least in suggest_layout(whole, Layout(zero1=True), tiny)


@pytest.mark.parametrize(
    "seq_length, dropped",
    [
        (1024, "parallel.batch_halves=true; without it"),
        (1023, "parallel.batch_halves=true and parallel.sequence_parallel=true; without them"),
    ],
)
def test_an_option_that_no_layout_allows_is_named(seq_length: int, dropped: str) -> None:
    odd = dataclasses.replace(job("gpt_8.3b", 3), seq_length=seq_length)
    answer = suggest_layout(odd, Layout(tp_size=8, batch_halves=True, sequence_parallel=True), CLUSTER)
    found = answer.removeprefix(f"no layout works with {dropped} the nearest layout that works is ")
    assert found.startswith("parallel.tp_size=8")
    assert ("parallel.sequence_parallel=true" in found) == ("sequence_parallel" not in dropped)


def test_only_sizes_that_divide_are_tried() -> None:
    assert tensor_sizes(job(), False, 4096) == [1, 2, 4, 5, 10, 20]
    assert tensor_sizes(job(), False, 4) == [1, 2, 4]
    assert tensor_sizes(job(), True, 4096) == [1, 2, 4, 5, 8, 10, 16, 20]  # not 6 for the MLP
    assert micro_batch_sizes(job(), Layout(tp_size=1, dp_size=4)) == [1, 2, 4, 12]
    assert micro_batch_sizes(job(), Layout(tp_size=1, dp_size=7)) == []
    assert micro_batch_sizes(job(batch=128), Layout(tp_size=1, dp_size=1)) == [1, 2, 4, 8, 16, 32, 64]
    assert micro_batch_sizes(job(), Layout(tp_size=2, dp_size=4, batch_halves=True)) == [2, 4, 12]
    assert micro_batch_sizes(job(), Layout(tp_size=5, dp_size=4, sequence_parallel=True)) == []  # of 1,024 tokens
    assert largest_number(job(), CLUSTER, Layout()) == 960  # 20 x 48


def test_only_a_request_for_padded_heads_is_answered_with_them() -> None:
    rankings = (rank_layouts(job(), CLUSTER, 16, Layout(pad_heads=on)) for on in (False, True))
    without, padded = ({plan.layout.tp_size: plan for plan in without_options(ranking.fitting)} for ranking in rankings)
    assert without.keys() == {2, 4} and padded.keys() == {2, 4, 8, 16}
    assert all(without[tp_size].time == padded[tp_size].time for tp_size in without)
    assert "pad_heads" not in without[4].overrides + padded[4].overrides
    assert padded[8].overrides.endswith(" parallel.pad_heads=true")
    for wanted, sizes in (
        (Layout(tp_size=8), (1, 2, 4, 5, 10, 20)),
        (Layout(tp_size=8, pad_heads=True), (8,)),
    ):
        assert nearest_plan(job(), wanted, CLUSTER).layout.tp_size in sizes


def test_an_unusable_number_of_devices_is_refused_with_the_usable_ones_below_and_above() -> None:
    with pytest.raises(ValueError, match="but is 7; a layout fits with num_devices=6, num_devices=8$"):
        rank_layouts(job(), CLUSTER, 7, Layout())
    halves = Layout(batch_halves=True)
    with pytest.raises(
        ValueError, match=r"is above 1\), but is 14; a layout fits with num_devices=7, global_batch_size=14$"
    ):
        rank_layouts(job("bert_336m", 7), CLUSTER, 14, halves)
    assert {plan.layout.tp_size for plan in rank_layouts(job("bert_336m", 7), CLUSTER, 7, halves).fitting} == {1}


def test_the_mfu_follows_from_the_step() -> None:
    plan = Plan(job().change(2, "full"), Layout(tp_size=2, dp_size=4), CLUSTER)
    assert plan.mfu * plan.time.total * 8 * 200e12 == pytest.approx(plan.model_flops)


def machine_layouts(cluster: Cluster) -> dict[tuple, Plan]:
    a_job = dataclasses.replace(job("gpt_355m", 16, num_layers=4), dtype="bf16", on_gpu=cluster.is_gpu).change(2)
    plans = rank_on_machine([a_job], cluster, 2, Layout())
    times = [plan.time.total for plan in plans]
    assert times == pytest.approx(sorted(times), rel=1e-11)
    assert all(plan.job == a_job for plan in plans)
    return {(p.layout.tp_size, p.layout.dp_size, p.layout.zero1, p.layout.batch_halves): p for p in plans}


def test_two_cores_have_four_layouts_and_two_gpus_too() -> None:
    cpu, gpu = (load_cluster(CLUSTERS / f"{name}.yaml") for name in ("cpu", "h100"))
    no, yes = False, True
    on_cores, data = machine_layouts(cpu), {(1, 2, no, no), (1, 2, yes, no)}
    assert on_cores.keys() == data | {(2, 1, no, no), (1, 1, no, no)}
    assert machine_layouts(gpu).keys() == data | {(2, 1, no, no), (2, 1, no, yes)}
    # A rank of two threads: the work of one thread in half the time, and the memory of both.
    alone, one = on_cores[1, 1, no, no], Plan(on_cores[1, 1, no, no].job, Layout(), cpu)
    assert alone.time.matmul == pytest.approx(one.time.matmul / 2) and alone.time.overhead == one.time.overhead
    assert alone.cluster.usable_bytes == pytest.approx(2 * 12 * GIB - GIB / 2)
    assert alone.needed_bytes == one.needed_bytes


def test_layouts_of_a_machine_divide_the_batch_and_fit() -> None:
    cpu = load_cluster(CLUSTERS / "cpu.yaml")
    a_job = dataclasses.replace(job("gpt_355m", 6), dtype="fp32", on_gpu=False).change(6)
    jobs = [a_job, a_job.change(recompute="full")]
    assert {p.layout for p in rank_on_machine(jobs, cpu, 2, Layout())} == {Layout(), Layout(tp_size=2)}
    needed = estimate_memory(a_job, Layout(tp_size=2)).total
    small = dataclasses.replace(cpu, memory_gib=0.5 + (needed - 1) / GIB)
    assert {(p.layout.tp_size, p.recompute) for p in rank_on_machine(jobs, small, 2, Layout())} == {
        (1, "none"),  # with the memory of both cores
        (2, "full"),
    }


def test_of_equally_many_ranks_those_with_the_fewest_stages_are_tried_first() -> None:
    assert model_sizes(job("gpt_355m"), "auto", "auto", False, 4) == [
        (1, 1),
        (2, 1),
        (1, 2),
        (1, 3),
        (4, 1),
        (2, 2),
        (1, 4),
    ]
    assert model_sizes(job("gpt_355m"), 2, "auto", False, 4) == [(2, 1), (2, 2)]
