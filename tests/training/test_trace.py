"""512 ranks traced in one process, against published formulas (Narayanan et al. 2021) and real processes."""

import dataclasses
import resource
from collections import Counter
from datetime import timedelta
from fractions import Fraction

import pytest
import torch
from collective_trace import CollectiveRecorder, trace_step
from ranks import fake_world, make_context, run_ranks
from sharding import random_batch, random_model, small_config, total_loss
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lmscale import parallel
from lmscale.config import Layout, TransformerConfig
from lmscale.models import build_model
from lmscale.parallel import sample_dropout_keys
from lmscale.parallel.pipeline import run_pipeline
from lmscale.planner.communication import micro_batch_collectives
from lmscale.planner.flops import hardware_flops_per_step, scored_tokens
from lmscale.planner.workload import Workload

# Table 1's largest row: 8-way model parallel, 64-way data parallel, batch 512, so 8 sequences per rank.
B, S, L, H, V = 8, 1024, 72, 3072, 51200
LAYOUT = Layout(tp_size=8, dp_size=64)
# Formula of Narayanan et al. 2021, equation 3: forward, backward and one more forward of the layers.
WITH_RECOMPUTATION = 96 * B * S * L * H**2 * (1 + Fraction(S, 6 * H) + Fraction(V, 16 * L * H))
WITHOUT_RECOMPUTATION = 72 * B * S * L * H**2 * (1 + Fraction(S, 6 * H) + Fraction(V, 12 * L * H))


def gpt_8_3b(num_layers: int = L, **changes) -> TransformerConfig:
    return TransformerConfig(
        family="gpt",
        num_layers=num_layers,
        hidden_size=H,
        num_attention_heads=32,
        vocab_size=50257,
        max_position_embeddings=S,
        **changes,
    )


@pytest.mark.slow
def test_gpt_8_3b_over_512_ranks_with_full_recomputation() -> None:
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = trace_step(gpt_8_3b(recompute="full"), LAYOUT, B, S)
    assert report.model_parameters == 8_317_040_640
    assert report.rank_parameters == 1_043_549_184
    assert WITH_RECOMPUTATION == LAYOUT.tp_size * report.flops == 571_780_406_181_888
    # 6 per layer of [b, s, h], 1 for the embedding, 1 for the output projection; 3 of [b s] in the loss, in fp32.
    large, small = 2 * B * S * H, 4 * B * S
    assert report.num_collectives == (6 * L + 2) + 3 == 437
    assert report.num_bytes == (6 * L + 2) * large + 3 * small
    assert report.num_bytes / 2**30 == pytest.approx(20.34, abs=0.005)
    sent = {(c.phase, c.shape, c.num_bytes): n for c, n in report.count().items()}
    assert sent == {
        ("forward", (B, S, H), large): 2 * L + 1,
        ("forward", (B * S,), small): 3,
        ("backward", (B, S, H), large): 4 * L,
        ("backward", (B * S, H), large): 1,
    }
    assert {(c.kind, c.group) for c in report.collectives} == {("allreduce_", "tensor")}
    assert report.seconds < 60
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before) / 2**20 < 2  # GiB


@pytest.mark.slow
def test_gpt_8_3b_over_512_ranks_without_recomputation() -> None:
    report = trace_step(gpt_8_3b(), LAYOUT, B, S)
    assert WITHOUT_RECOMPUTATION == LAYOUT.tp_size * report.flops
    assert report.num_collectives == (4 * L + 2) + 3 == 293
    assert report.num_bytes / 2**30 == pytest.approx(13.59, abs=0.005)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_planners_formula_counts_the_flops_of_the_model(recompute: str) -> None:
    config = gpt_8_3b(2, recompute=recompute, attention="exact")
    assert LAYOUT.tp_size * trace_step(config, LAYOUT, B, S).flops == hardware_flops_per_step(config, S, B)


def test_berts_count_includes_its_heads() -> None:
    layers, h, v, b, s, p = 3, 2560, 30720, 4, 512, 4
    config = TransformerConfig(
        family="bert",
        num_layers=layers,
        hidden_size=h,
        num_attention_heads=40,
        vocab_size=30522,
        max_position_embeddings=s,
        norm_order="post",
        recompute="full",
    )
    report = trace_step(config, Layout(tp_size=p, dp_size=32), b, s)
    m = 77 * b  # 15 % of 512
    cut = 96 * b * s * layers * h**2 * (1 + Fraction(s, 6 * h)) + 6 * m * h * v
    masked_lm_dense, pooler, order = 6 * m * h**2, 6 * b * h**2, 6 * b * h * 2  # replicated on every rank
    assert report.flops == cut / p + masked_lm_dense + pooler + order
    assert report.num_collectives == 6 * layers + 2 + 3


CASES = [
    {"family": architecture, "norm_order": norm_order, "recompute": recompute, "hidden_dropout": dropout}
    | {"max_position_embeddings": 12}
    for architecture, norm_order in (("gpt", "pre"), ("bert", "post"))
    for recompute in ("none", "full")
    for dropout in (0.0, 0.2)
]
QUICK = [CASES[i] for i in (1, 2, 4, 7)]  # every two choices meet in one of these four


def _record_real(rank: int, sequence_parallel: bool, cases: list[dict]) -> list:
    # Over gloo, as in the fake world; test_shared_memory.py compares the shared-memory channel with it.
    changes = {"sequence_parallel": sequence_parallel, "tp_communicator": None}
    context, recorded = dataclasses.replace(make_context(tp_size=2), **changes), []
    for case in cases:
        config = small_config(**case)
        model, batch = random_model(config, context), scored_as_counted(random_batch(config), config)
        with CollectiveRecorder(context) as recorder:
            loss = total_loss(model, batch)
            recorder.phase = "backward"
            loss.backward()
        recorded.append(tuple(recorder.collectives))
    return recorded


def scored_as_counted(batch: dict, config: TransformerConfig) -> dict:
    """A BERT batch with the number of scored positions that the formulas assume."""
    if config.family == "bert":
        batch["labels"] = batch["tokens"].clone()
        batch["labels"][:, scored_tokens(config, batch["labels"].shape[1]) :] = -100
    return batch


@pytest.mark.parametrize(
    ("sequence_parallel", "cases"),
    [(True, QUICK), *(pytest.param(word, CASES, marks=pytest.mark.slow) for word in (False, True))],
)
def test_the_fake_world_issues_the_collectives_of_two_real_processes(sequence_parallel: bool, cases: list) -> None:
    layout = Layout(tp_size=2, sequence_parallel=sequence_parallel)
    traced = [trace_step(small_config(**c), layout, 5, 12, torch.float64).collectives for c in cases]
    assert run_ranks(_record_real, 2, sequence_parallel, cases) == [traced, traced]


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("stage", [0, 3, 7])
def test_a_stage_of_512_ranks_sends_the_planners_messages(stage: int, sequence_parallel: bool) -> None:
    """GPT-8.3B as 8 tensor x 8 pipeline x 8 data ranks, in a step of nine micro-batches."""
    layout = Layout(tp_size=8, pp_size=8, dp_size=8, sequence_parallel=sequence_parallel)
    config, b, num = gpt_8_3b(), 2, 9
    with fake_world(stage * layout.tp_size, layout.world_size):
        context = parallel.make_context(layout, "cpu", timedelta(minutes=1), shared_memory=False)
        assert (context.pp_rank, context.tp_rank, context.dp_rank) == (stage, 0, 0)
        with FakeTensorMode(), CollectiveRecorder(context) as recorder:
            model = build_model(config, context, seed=None, dtype=torch.bfloat16)
            tokens = torch.zeros(b, S, dtype=torch.int64)
            keys = sample_dropout_keys(0, torch.arange(b))

            def forward(index: int, micro_batch: int, received: Tensor | None) -> Tensor:
                x = tokens if received is None else received
                return model(x, tokens, keys) if context.is_last_stage else model.transformer(x, sample_keys=keys)

            def backward(index: int, output: Tensor, gradient: Tensor | None) -> None:
                output.backward(gradient)

            def empty(micro_batch: int) -> Tensor:
                return torch.empty(b, S // 8 if sequence_parallel else S, H, dtype=torch.bfloat16)

            recorder.collectives.clear()
            run_pipeline(range(num), forward, backward, lambda: None, empty, lambda where: None, context)
    names = {"allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}
    found = Counter((names.get(c.kind, c.kind), c.group, c.num_bytes) for c in recorder.collectives)
    received = sum(found.pop(key) for key in list(found) if key[0] == "recv_")
    job = Workload(config, b, 8 * num * b, S, "bf16", on_gpu=False)
    assert received == num * ((stage > 0) + (stage < 7))
    planned = Counter()
    for c in micro_batch_collectives(job, layout, stage):
        planned[c.kind, c.group, c.num_bytes] += num * c.count
    assert found == planned
