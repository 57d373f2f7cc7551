"""The planner's stages of a pipeline: parameters, memory, idle time, and the layouts that it finds."""

import dataclasses
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from paper_models import paper_model, training
from ranks import fake_world

from analysis.correctness.peak_memory import DTYPES, TensorBytes, sized
from lmscale.config import Layout
from lmscale.config.cluster import Cluster, load_cluster
from lmscale.config.training import OptimizerConfig, PrecisionConfig
from lmscale.models import build_model
from lmscale.models.later_placements import PLACEMENTS
from lmscale.parallel import ParallelContext, pipeline, sample_dropout_keys
from lmscale.planner.communication import TIED_GRADIENT, TIED_WEIGHT, micro_batch_collectives, step_collectives
from lmscale.planner.memory import stage_memory
from lmscale.planner.params import copied_parameters, distinct_stages, rank_parameters, stage_placements
from lmscale.planner.plan import Plan, describe_stages
from lmscale.planner.search import rank_layouts
from lmscale.planner.workload import stage_numbers
from lmscale.training.step import optimizer as step_optimizer


def cluster(name: str) -> Cluster:
    from lmscale.cli.conf_files import CONF

    return load_cluster(CONF / "cluster" / f"{name}.yaml")


@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("norm_order", PLACEMENTS)
@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 3), (2, 4)])
def test_the_parameters_of_every_stage_are_those_of_the_model(family, norm_order, tp_size, pp_size) -> None:
    config = sized(family, 7, 64, 4, 1000, 48, norm_order=norm_order)
    layout, total = Layout(tp_size=tp_size, pp_size=pp_size), 0
    for stage in range(pp_size):
        context = ParallelContext(tp_size=tp_size, pp_rank=stage, pp_size=pp_size)
        model = build_model(config, context, seed=None, device="meta")
        built, own, layers = list(model.parameters()), model.transformer.own_layers, model.transformer.layers
        assert [layers[i].placement for i in own] == [stage_placements(config, Layout(), 0)[i] for i in own]
        owned = rank_parameters(config, layout, stage)
        assert sorted(each.size for each in owned) == sorted(p.numel() for p in built if p.shard.tie != "copy")
        assert copied_parameters(config, layout, stage) == sum(p.numel() for p in built if p.shard.tie == "copy")
        total += sum(math.prod(p.shard.full_shape) for p in built if p.shard.tie != "copy")
    assert total == sum(each.size for each in rank_parameters(config, Layout()))


def test_the_first_of_equal_stages_keeps_most() -> None:
    config = paper_model("gpt_8.3b")
    layout = Layout(tp_size=2, pp_size=8)
    job = training(config, 1, layout, 16)
    needs = [stage_memory(job, layout, stage).total for stage in range(8)]
    assert max(needs) == max(needs[stage] for stage in distinct_stages(config, layout))
    sizes = [len(layers) for layers in config.stages(8)]
    for i, j in itertools.combinations(range(1, 7), 2):
        assert sizes[i] != sizes[j] or needs[i] > needs[j]
    few = training(config, 1, layout, 2)
    assert stage_memory(few, layout, 1) == stage_memory(few, layout, 5)  # both keep the two that there are


def test_stages_of_other_sizes_are_distinct() -> None:
    config = sized("gpt", 8, 64, 4, 1000, 48)
    sizes = [len(layers) for layers in config.stages(6)]
    assert {sizes[stage] for stage in distinct_stages(config, Layout(pp_size=6))[1:-1]} == {*sizes[1:-1]} == {1, 2}


@pytest.mark.parametrize(("family", "sizes"), [("gpt", [4, 5, 3]), ("bert", [4, 4, 4])])
def test_the_head_weighs_by_the_share_of_positions_that_are_scored(family: str, sizes: list[int]) -> None:
    assert [len(layers) for layers in sized(family, 12, 64, 4, 1000, 48).stages(3)] == sizes


def test_idle_time_is_that_of_the_other_stages_micro_batches() -> None:
    job = dataclasses.replace(training(paper_model("gpt_8.3b"), 1), global_batch_size=64)
    passes = "forward", "recomputation", "backward"
    for pp, dp, recompute in ((4, 1, "none"), (8, 2, "full")):
        plan = Plan(job.change(recompute=recompute), Layout(tp_size=8, pp_size=pp, dp_size=dp), cluster("h100"))
        own = sum(row.seconds for row in plan.rows if row.phase in passes and row.part != "idle")
        num = job.num_micro_batches(plan.layout)
        assert plan.time.idle / (plan.time.idle + own) == pytest.approx((pp - 1) / (num + pp - 1))


def test_stages_send_each_other_the_tokens_of_their_ranks() -> None:
    job = training(paper_model("gpt_1.2b"), 4)
    for cuts_sequence in (False, True):
        layout = Layout(tp_size=2, pp_size=2, sequence_parallel=cuts_sequence)
        (sent,) = (c for c in micro_batch_collectives(job, layout) if c.kind == "send")
        assert sent.num_bytes == 4 * 1024 * 1536 * 2 // (2 if cuts_sequence else 1)
        of_stages = [step_collectives(job, layout, stage=stage) for stage in (0, 1)]
        tied = [c.num_bytes for found in of_stages for c in found if c.what in (TIED_WEIGHT, TIED_GRADIENT)]
        assert tied == [51200 // 2 * 1536 * size for size in (2, 4)]  # the gradient is summed in fp32


def test_a_step_of_one_micro_batch_is_described_as_such() -> None:
    job = dataclasses.replace(training(paper_model("gpt_8.3b"), 1), global_batch_size=1)
    (line,) = describe_stages(Plan(job, Layout(tp_size=8, pp_size=2), cluster("h100")))
    assert " of a step of 1 micro-batch; " in line


def test_a_model_of_more_than_16_billion_parameters_needs_stages_on_v100() -> None:
    """The paper's conclusion: beyond 16 billion parameters neither form of parallelism is enough alone."""
    config = dataclasses.replace(paper_model("gpt_8.3b"), num_layers=78, hidden_size=4256, num_attention_heads=28)
    job = dataclasses.replace(training(config, 1, dtype="fp16", compiles=True), global_batch_size=512)
    ranking = rank_layouts(job, cluster("dgx2h_v100"), 256, Layout(), stage_numbers(job))
    whole = [plan.layout for plan in ranking.fitting if not plan.layout.sequence_parallel]  # which it did not have
    assert whole[0].pp_size > 1
    assert {plan.layout.tp_size for plan in ranking.fitting} <= {1, 2, 4}  # what divides 28 heads and the vocabulary


def measure_stage(config, b: int, num: int, dtype: str, stage: int, layout: Layout) -> int:
    """Peak bytes of live tensors of one stage in its second step; the messages of its neighbours are zeros."""
    s, h, last = config.max_position_embeddings, config.hidden_size, stage == layout.pp_size - 1
    with fake_world(stage, layout.pp_size):
        context = ParallelContext(pp_rank=stage, pp_size=layout.pp_size, pp_group=dist.group.WORLD)
        model = build_model(config, context, seed=1, dtype=DTYPES[dtype])
        optimizer = step_optimizer.MixedPrecisionAdamW(
            model.named_parameters(), OptimizerConfig(lr=1e-3), PrecisionConfig(dtype), context
        )
        tokens = torch.arange(b * s).view(b, s) % config.vocab_size
        keys = sample_dropout_keys(1, torch.arange(b))

        def forward(index, micro_batch, received):
            x = tokens if received is None else received
            return model(x, tokens, keys) / tokens.numel() if last else model.transformer(x, sample_keys=keys)

        def backward(index, output, gradient):
            output.backward(gradient)

        def step() -> None:
            optimizer.zero_grad()
            empty = lambda _: torch.zeros(b, s, h, dtype=DTYPES[dtype])  # noqa: E731
            calls = forward, backward, optimizer.start_grad_sync, empty, lambda _: None
            pipeline.run_pipeline(range(num), *calls, context)
            optimizer.reduce_gradients()
            optimizer.step()

        step()
        assert optimizer.counters.known.num_updates == 1  # otherwise the tensors have no moments yet
        optimizer.zero_grad()
        held = [*model.parameters(), *optimizer.tensors().values(), *optimizer.gradients().values()]
        if optimizer.copy_buffer is not None:
            held.append(optimizer.copy_buffer.flat)
        with TensorBytes(held) as tracked:
            step()
        return tracked.peak


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    ("dtype", "recompute", "num"),
    [
        ("fp32", "full", 5),
        pytest.param("bf16", "full", 5, marks=pytest.mark.slow),
        pytest.param("fp32", "none", 5, marks=pytest.mark.slow),
        pytest.param("fp32", "selective", 2, marks=pytest.mark.slow),
    ],
)
def test_the_predicted_peak_of_a_stage_is_within_5_percent(dtype, recompute, num, stage, monkeypatch) -> None:
    def receive_zeros(stage, sent, received, context) -> None:
        if received is not None:
            received.zero_()

    monkeypatch.setattr(pipeline, "exchange", receive_zeros)
    monkeypatch.setattr(step_optimizer, "gather_from_stages", lambda item, context: [item])
    config = sized("gpt", 9, 192, 6, 1100, 144, attention_dropout=0.0, recompute=recompute)
    layout = Layout(pp_size=3)
    predicted = stage_memory(training(config, 5, layout, num, dtype, on_gpu=False), layout, stage).total
    tracked = measure_stage(config, 5, num, dtype, stage, layout)
    assert abs(predicted / tracked - 1) < 0.05, f"predicted {predicted:,}, tracked {tracked:,}"
