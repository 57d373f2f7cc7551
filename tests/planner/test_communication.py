"""Communication and FLOPs formulas of a rank against traces: the paper's configurations exactly, and every switch."""

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from collective_trace import KINDS, trace_step
from paper_models import paper_model, training
from sharding import small_config

from lmscale import partition
from lmscale.config import Layout, TransformerConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.planner import communication
from lmscale.planner.communication import micro_batch_collectives, replicated_parameters, step_collectives
from lmscale.planner.flops import hardware_flops_per_step, num_recomputed_whole
from lmscale.planner.params import count_parameters, rank_buffer, stage_placements
from lmscale.planner.step_operations import step_operations
from lmscale.planner.workload import Workload
from lmscale.training.step.gradient_buffer import GradientBuffer

# Configuration -> model, heads, tensor ranks, data ranks. 8 sequences per rank: batch 8, 512 or 1,024. Table 4 gives
# GPUs but no layout; with 8 sequences per rank there are 128 data ranks of 1, 2 and 4 tensor ranks.
PAPER = {
    "table 1, 1.2 B": ("gpt_1.2b", 16, 1, 1),
    "table 1, 2.5 B": ("gpt_2.5b", 20, 2, 1),
    "table 1, 4.2 B": ("gpt_4.2b", 24, 4, 1),
    "table 1, 8.3 B": ("gpt_8.3b", 32, 8, 1),
    "table 1, 1.2 B, 64 GPUs": ("gpt_1.2b", 16, 1, 64),
    "table 1, 2.5 B, 128 GPUs": ("gpt_2.5b", 20, 2, 64),
    "table 1, 4.2 B, 256 GPUs": ("gpt_4.2b", 24, 4, 64),
    "table 1, 8.3 B, 512 GPUs": ("gpt_8.3b", 32, 8, 64),
    "table 2, 355M": ("gpt_355m", 16, 1, 64),
    "table 2, 2.5B": ("gpt_2.5b", 20, 2, 64),
    "table 2, 8.3B": ("gpt_8.3b", 24, 8, 64),
    "table 4, 336M": ("bert_336m", 16, 1, 128),
    "table 4, 1.3B": ("bert_1.3b", 32, 2, 128),
    "table 4, 3.9B": ("bert_3.9b", 40, 4, 128),
}
SHORT = ["table 2, 8.3B", "table 4, 3.9B"]  # with three of their layers


def rank_flops(job: Workload, layout: Layout) -> int:
    """Of eager layers, whose recomputation may stop before the last product (of the second half, if there are two)."""
    found, config = step_operations(job, layout), job.config
    again = [o for o in found if (o.phase, o.name) == ("recomputation", "MLP down")]
    num_cut_short = config.num_layers - num_recomputed_whole(config, stage_placements(config, Layout(), 0))
    left_out = sum(o.count * o.flops for o in again) * num_cut_short // (config.num_layers * layout.batch_parts)
    return sum(o.count * o.flops for o in found) - left_out


def assert_equal_to_trace(
    config: TransformerConfig, layout: Layout, b: int, s: int, dtype: str, **teacher: Any
) -> None:
    job = training(config, b, layout, dtype=dtype, seq_length=s, on_gpu=False, **teacher)
    built = None if job.teacher is None else job.teacher_job.config
    kind = {"bf16": torch.bfloat16, "fp64": torch.float64}[dtype]
    report = trace_step(config, layout, b, s, kind, built, job.top_k)
    parameters = count_parameters(config, layout)
    assert (report.model_parameters, report.rank_parameters) == (parameters.total, parameters.per_rank)
    assert report.flops == rank_flops(job, layout)
    predicted = Counter()
    for sent in micro_batch_collectives(job, layout):
        predicted[KINDS[sent.kind], sent.group, sent.phase, sent.num_bytes] += sent.count
    assert predicted == Counter((c.kind, c.group, c.phase, c.num_bytes) for c in report.collectives)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [*((n, {"num_layers": 3}) for n in SHORT), *(pytest.param(n, {}, marks=pytest.mark.slow) for n in PAPER)],
)
def test_the_formulas_equal_the_trace_of_every_paper_configuration(name: str, sizes: dict[str, int]) -> None:
    model, heads, tp_size, dp_size = PAPER[name]
    config = paper_model(model, num_attention_heads=heads, recompute="full", **sizes)
    seq_length = config.max_position_embeddings
    assert_equal_to_trace(config, Layout(tp_size=tp_size, dp_size=dp_size), 8, seq_length, "bf16")


SWITCHES = list(itertools.product(("gpt", "bert"), ("pre", "post"), ("none", "selective", "full"), (0.0, 0.2)))
QUICK = [("gpt", "pre", "none", 0.2), ("bert", "post", "selective", 0.2), ("gpt", "pre", "full", 0.0)]


@pytest.mark.parametrize(
    ("architecture", "norm_order", "recompute", "hidden_dropout"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in SWITCHES],
)
def test_every_switch_of_the_model_changes_formulas_and_trace_alike(
    architecture: str, norm_order: str, recompute: str, hidden_dropout: float
) -> None:
    config = small_config(
        architecture,
        norm_order=norm_order,
        recompute=recompute,
        hidden_dropout=hidden_dropout,
        ffn_hidden_size=56,
        attention="exact",  # with the MATH backend a fused kernel is decomposed and recomputes one product less
    )
    for tp_size in (1, 2):
        assert_equal_to_trace(config, Layout(tp_size=tp_size, dp_size=3), 5, 13, "fp64")
    for cut in ({"sequence_parallel": True}, {"batch_halves": True}, {"sequence_parallel": True, "batch_halves": True}):
        s = 12 if "sequence_parallel" in cut else 13
        assert_equal_to_trace(config, Layout(tp_size=2, dp_size=3, **cut), 4, s, "fp64")


@pytest.mark.parametrize(
    "norm_order", ["b2t", *(pytest.param(order, marks=pytest.mark.slow) for order in ("deepnorm", "peri", "mix"))]
)
def test_formulas_and_trace_agree_for_the_later_placements(norm_order: str) -> None:
    """Without dropout, recomputation stops early in pre-norm layers; of the five of Mix-LN one is post-norm."""
    for recompute in ("none", "full"):
        settings = {"num_layers": 5, "recompute": recompute, "attention": "exact", "qk_norm": recompute == "full"}
        config = small_config("bert", norm_order=norm_order, **settings)
        assert_equal_to_trace(config, Layout(tp_size=2, dp_size=3), 5, 13, "fp64")
        assert_equal_to_trace(config, Layout(tp_size=2, dp_size=3, sequence_parallel=True), 5, 12, "fp64")


@pytest.mark.parametrize("architecture", ["gpt", "bert"])
@pytest.mark.parametrize("kind", ["model", "cache"])
def test_formulas_and_trace_agree_with_a_teacher(architecture: str, kind: str) -> None:
    config = small_config(architecture, recompute="full", attention="exact")
    larger = small_config(
        architecture, num_layers=3, hidden_size=96, norm_order="post", ffn_hidden_size=56, vocab_multiple=2
    )
    teacher = {"teacher": larger} if kind == "model" else {"top_k": 7}
    for tp_size in (1, 2):
        assert_equal_to_trace(config, Layout(tp_size=tp_size, dp_size=3), 5, 13, "fp64", **teacher)
    for cut in ({"sequence_parallel": True}, {"batch_halves": True}, {"sequence_parallel": True, "batch_halves": True}):
        assert_equal_to_trace(config, Layout(tp_size=2, dp_size=3, **cut), 4, 12, "bf16", **teacher)


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        *[("gpt", "none"), ("bert", "selective"), ("gpt", "full")],
        *(pytest.param("bert", word, marks=pytest.mark.slow) for word in ("none", "full")),
        pytest.param("gpt", "selective", marks=pytest.mark.slow),
    ],
)
def test_formulas_and_trace_agree_for_padded_heads(family: str, recompute: str) -> None:
    sizes = {"hidden_size": 40, "num_attention_heads": 5, "ffn_hidden_size": 96, "vocab_multiple": 9}
    config = small_config(family, recompute=recompute, attention="exact", hidden_dropout=0.1, **sizes)
    for sequence_parallel in (False, True):
        assert_equal_to_trace(
            config, Layout(tp_size=3, dp_size=2, sequence_parallel=sequence_parallel, pad_heads=True), 5, 12, "fp64"
        )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_flops_of_dummy_heads_count_for_the_devices_and_not_for_the_model(recompute: str) -> None:
    config, layout = paper_model("gpt_2.5b", recompute=recompute, attention="exact"), Layout(tp_size=8, pad_heads=True)
    hardware = hardware_flops_per_step(config, 1024, 8, tp_size=8)
    assert 8 * rank_flops(training(config, 8), layout) == hardware
    assert hardware > hardware_flops_per_step(config, 1024, 8) == hardware_flops_per_step(config, 1024, 8, tp_size=5)


def test_each_gradient_is_sent_once_per_step_for_any_number_of_micro_batches() -> None:
    config, layout = paper_model("gpt_8.3b", recompute="full"), Layout(tp_size=8, dp_size=64)
    once, thrice = (step_collectives(training(config, 2, layout, n), layout) for n in (1, 3))
    for a, b in zip(once, thrice, strict=True):
        repeats = 3 if a.phase in ("forward", "backward") else 1
        assert (a.what, a.group, a.num_bytes, repeats * a.count) == (b.what, b.group, b.num_bytes, b.count)
    gradients, exact = sum(a.total_bytes for a in once if a.group == "data"), count_parameters(config, layout).per_rank
    assert 4 * exact <= gradients < 4.001 * exact  # the padding of the pieces
    wide = step_collectives(training(config, 2, layout, dtype="fp64"), layout)
    assert sum(a.total_bytes for a in wide if a.group == "data") == 2 * gradients


@pytest.mark.parametrize("tp_size, dp_size, piece", [(2, 2, 10**6), (4, 3, 1000)])
@pytest.mark.parametrize("architecture, norm_order", [("gpt", "pre"), ("bert", "post"), ("bert", "peri")])
def test_with_zero1_a_data_rank_sends_the_replicated_gradients_of_its_parts(
    monkeypatch, architecture: str, norm_order: str, tp_size: int, dp_size: int, piece: int
) -> None:
    monkeypatch.setattr(partition, "PIECE_ELEMENTS", piece)
    monkeypatch.setattr(communication, "rank_buffer", rank_buffer.__wrapped__)  # not one of pieces of another size
    config, expected = small_config(architecture, norm_order=norm_order), []
    for dp_rank in range(dp_size):
        context = ParallelContext(tp_size=tp_size, dp_rank=dp_rank, dp_size=dp_size, sequence_parallel=True, zero1=True)
        parts = GradientBuffer(dict(build_model(config, context, seed=None).named_parameters()), context).parts
        expected.append(sum(part.size for part in parts if part.param.shard.replicated))
    assert len(set(expected)) > 1
    layout = Layout(tp_size=tp_size, dp_size=dp_size, sequence_parallel=True, zero1=True)
    assert replicated_parameters(config, layout, on_gpu=False) == expected

    def sent(dp_rank: int | None) -> list[int]:
        found = step_collectives(training(config, 4, layout, seq_length=12, on_gpu=False), layout, dp_rank)
        return [c.num_bytes for c in found if c.what == "gradients of replicated parameters"]

    assert [sent(rank) for rank in range(dp_size)] == [[4 * n] if n else [] for n in expected]
    assert sent(None) == [4 * max(expected)]


def test_replicated_gradients_come_from_data_rank_0_only_where_every_rank_updates_them() -> None:
    """Only gradients that the tensor ranks add up: with sequence parallelism, and of the norms of Q and K."""
    cases = itertools.product((False, True), repeat=3)
    for cuts_sequence, qk_norm, zero1 in cases:
        layout = Layout(tp_size=2, dp_size=2, sequence_parallel=cuts_sequence, zero1=zero1)
        found = step_collectives(training(small_config("gpt", qk_norm=qk_norm), 4, layout), layout)
        number = (cuts_sequence or qk_norm) and not zero1
        assert sum(c.count for c in found if c.what.endswith("from data rank 0")) == number


def test_the_chunked_loss_communicates_once_per_chunk() -> None:
    config = paper_model("gpt_2.5b")  # at 2 ranks 25,600 columns, so 2,048 rows at a time
    assert_equal_to_trace(dataclasses.replace(config, num_layers=1), Layout(tp_size=2), 5, 1000, "bf16")
    # Four times as many rows at a time on a GPU.
    for b, on_gpu, chunks in (5, False, [(6, 2048 * 4), (3, 904 * 4)]), (9, True, [(3, 8192 * 4), (3, 808 * 4)]):
        sent = micro_batch_collectives(training(config, b, seq_length=1000, on_gpu=on_gpu), Layout(tp_size=2))
        assert [(c.count, c.num_bytes) for c in sent if c.what == "loss"] == chunks
