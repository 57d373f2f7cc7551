"""The host's time per step: measured constants, and plans in which the device waits for its host."""

import dataclasses
import json
from pathlib import Path

import pytest
from paper_models import paper_model, training

from lmscale.config import Layout
from lmscale.config.cluster import load_cluster
from lmscale.planner import host
from lmscale.planner.plan import Plan
from lmscale.planner.plan_table import format_plan
from lmscale.planner.search import describe_host

ROOT = Path(__file__).parents[2]


def planned(name: str, b: int, n: int = 1, cluster: str = "h200", **changes) -> Plan:
    layout, device = Layout(), load_cluster(ROOT / "conf" / "cluster" / f"{cluster}.yaml")
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
    assert line.startswith("host-bound: the host takes") and line.endswith("it is not with micro_batch_size=8")
    assert plan.time.host > 0 == planned("bert_336m", 8, n=4).time.host
    assert describe_host(planned("bert_336m", 8)) == []
    assert "waiting for the host" in format_plan("bert_336m", plan, [])
    (line,) = describe_host(planned("bert_336m", 4))
    assert line.endswith("micro_batch_size=8 global_batch_size=8")
    tiny = dataclasses.replace(plan.cluster, memory_gib=plan.needed_bytes / 2**30 + plan.cluster.reserved_gib + 0.01)
    assert describe_host(dataclasses.replace(plan, cluster=tiny))[0].endswith("no larger micro-batch fits")
