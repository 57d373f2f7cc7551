"""A step with a teacher: its cost by hand, and its activations in a real forward pass."""

import dataclasses
import itertools

import pytest
import torch
from paper_models import paper_model, training
from test_step_time import CLUSTER

from analysis.correctness import peak_memory
from analysis.correctness.peak_memory import DTYPES, TensorBytes, sized
from lmscale.config import Layout
from lmscale.config.teacher import cache_record_bytes
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.planner.communication import INPUTS, OUTPUTS, Collective, micro_batch_collectives
from lmscale.planner.memory import MemoryEstimate, estimate_memory
from lmscale.planner.plan import Plan
from lmscale.planner.workload import Workload, model_sizes, tensor_sizes

STUDENT, TEACHER = paper_model("bert_336m"), paper_model("bert_3.9b", vocab_multiple=2)
M = 16 * 77  # scored tokens of 16 sequences
H, V, LAYERS = 2560, 30720, 48
SHARDED = (12 * H * H + 7 * H) * LAYERS + V * H + V  # parameters of the teacher
# Biases and LayerNorms; position and type embeddings, last LayerNorm; pooler; masked-LM head; sentence-order head.
WHOLE = 6 * H * LAYERS + (512 + 2 + 2) * H + (H * H + H) + (H * H + 3 * H) + (2 * H + 2)


def distillation(layout: Layout | None = None, **more: object) -> Workload:
    """16 sequences per data rank, with a teacher of 3.9 B parameters."""
    return training(STUDENT, 16, layout, **({"teacher": TEACHER, "dtype": "fp16"} | more))


def added_bytes(job: Workload, layout: Layout) -> dict[str, int]:
    """What a job needs more than the same one without a teacher, by part."""
    alone = estimate_memory(dataclasses.replace(job, teacher=None, top_k=None), layout)
    both = estimate_memory(job, layout)
    names = [each.name for each in dataclasses.fields(MemoryEstimate)]
    return {name: more for name in names if (more := getattr(both, name) - getattr(alone, name))}


def test_a_teacher_is_built_at_the_layout_of_the_run_without_dropout() -> None:
    job = distillation(dtype="fp8").teacher_job
    config = dataclasses.replace(
        TEACHER, vocab_multiple=1024, hidden_dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0
    )
    assert (job.config, job.teacher, job.dtype) == (config, None, "bf16")
    assert training(STUDENT, 16).teacher_job is None


def test_a_teacher_adds_its_weights_its_rows_and_its_logits() -> None:
    logits = M * V // 2
    assert added_bytes(distillation(), Layout(tp_size=2)) == {
        "teacher": 2 * (SHARDED // 2 + WHOLE),
        "teacher_rows": 2 * M * H,
        "teacher_forward": 2 * 16 * 512 * H * (5 + 8 // 2),
        "logits": logits * (2 + 4 + 1),  # a second buffer, one more temporary and a mask
    }
    compiled = added_bytes(distillation(compiles=True), Layout(tp_size=2))
    assert compiled["logits"] == logits * 2


def test_a_cache_adds_what_is_read_and_wide_logits() -> None:
    job = distillation(teacher=None, top_k=64)
    read = M * (64 * 8 + 65 * 4)
    assert added_bytes(job, Layout(tp_size=2)) == {"teacher_rows": read, "logits": M * 15360 * (4 + 4 + 1)}


def test_the_peak_is_in_the_teachers_forward_pass_of_a_much_smaller_student() -> None:
    student = dataclasses.replace(STUDENT, num_layers=1, recompute="full")
    estimate = estimate_memory(training(student, 16, teacher=TEACHER, compiles=True), Layout())
    state = estimate.weights + estimate.gradients + estimate.optimizer_state + estimate.teacher
    assert estimate.total == state + estimate.teacher_forward


@pytest.mark.parametrize(
    "dtype, attention, norm_order",
    list(itertools.product(("fp32", "bf16"), ("sdpa", "exact"), ("pre", "post"))),
)
def test_the_teachers_activations_are_those_of_a_real_forward_pass_or_up_to_15_percent_more(
    dtype, attention, norm_order
) -> None:
    config, b, s = sized("gpt", 4, 288, 6, 1700, 160, attention=attention, norm_order=norm_order), 5, 160
    model, tokens = build_model(config, ParallelContext(), seed=1, dtype=DTYPES[dtype]).eval(), torch.ones(b, s).long()
    with torch.no_grad(), TensorBytes([*model.parameters(), tokens]) as tracked:
        weights = tracked.now
        model.transformer(tokens)
    job = training(config, b, dtype=dtype, on_gpu=False, teacher=config)
    assert (
        0.99 < estimate_memory(job, Layout()).teacher_forward / (tracked.peak - weights) < 1.15
    )  # eager, without masks


SMALL = {  # student and teacher
    "gpt, large vocabulary": ((3, 96, 3, 16000, 80), (4, 160, 5, 16000, 80)),
    "gpt, several pieces of logits": ((2, 64, 4, 50000, 512), (3, 96, 4, 50000, 512)),
    "gpt, deep teacher": ((2, 64, 4, 500, 160), (5, 288, 6, 500, 160)),
    "gpt, deep student": ((7, 288, 6, 1700, 160), (4, 160, 5, 1700, 160)),
    "bert": ((3, 64, 4, 16000, 352), (5, 128, 4, 16000, 352)),
}


@pytest.mark.parametrize(("top_k", "temperature"), [(None, 1.0), (None, 2.0), (20, 2.0)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [n if "vocab" in n else pytest.param(n, marks=pytest.mark.slow) for n in SMALL])
def test_the_predicted_peak_of_a_step_with_a_teacher_is_within_2_percent(name, dtype, top_k, temperature) -> None:
    student, teacher = (sized(name.partition(",")[0], *sizes, attention_dropout=0.0) for sizes in SMALL[name])
    case = peak_memory.Case(student, 5, dtype, 2, teacher=None if top_k else teacher, top_k=top_k)
    case = dataclasses.replace(case, temperature=temperature)
    assert case.predicted == pytest.approx(peak_memory.measure(case, ParallelContext()), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}, {"batch_halves": True}])
@pytest.mark.parametrize("top_k", [None, 64])
def test_the_predicted_peak_with_the_kernels_of_a_gpu_is_within_2_percent(options, top_k) -> None:
    more = {"teacher": None if top_k else TEACHER, "top_k": top_k}
    case = peak_memory.Case(STUDENT, 16, "bf16", tp_size=4, traced=True, **more, **options)
    assert case.predicted == pytest.approx(peak_memory.measure_traced(case), rel=0.02)


def test_sizes_divide_both_models() -> None:
    job = distillation(teacher=dataclasses.replace(TEACHER, num_attention_heads=20))  # of 16 and 20 heads
    assert tensor_sizes(job, False, 64) == [1, 2, 4]
    assert model_sizes(job, "auto", "auto", False) == [(1, 1), (2, 1), (4, 1)]
    with pytest.raises(ValueError, match=r"`teacher.model.num_attention_heads` must be a multiple of `tp_size` \(8\)"):
        job.check_layout(Layout(tp_size=8))
    job.check_layout(Layout(tp_size=8, pad_heads=True))


def test_flops_are_those_of_one_more_forward_pass() -> None:
    layout, b, s = Layout(tp_size=2, dp_size=4), 64, 512
    job = distillation(layout, compiles=True)
    alone, both = (Plan(each, layout, CLUSTER) for each in (dataclasses.replace(job, teacher=None), job))
    forward = b * s * LAYERS * (24 * H * H + 4 * s * H) + b * 77 * 2 * H * V
    assert both.teacher == {"parameters": SHARDED + WHOLE, "step_flops": forward}
    assert both.model_flops - alone.model_flops == both.hardware_flops - alone.hardware_flops == forward
    dense = b * 77 * 2 * H * H  # of the masked-LM head, which every rank computes whole
    rows = [row for row in both.rows if row.name.startswith("teacher: ") and row.part == "matmul"]
    assert sum(row.flops for row in rows) == forward // 8 + dense // 4
    thrice = Plan(dataclasses.replace(job, global_batch_size=3 * b), layout, CLUSTER)  # micro-batches
    rows = [row for row in thrice.rows if row.name.startswith("teacher: ") and row.part == "matmul"]
    assert sum(row.flops for row in rows) == 3 * (forward // 8 + dense // 4)
    padded = Layout(tp_size=16, dp_size=4, pad_heads=True)  # 48 heads for 40
    plans = (Plan(each, padded, CLUSTER) for each in (dataclasses.replace(job, teacher=None), job))
    assert -int.__sub__(*(plan.hardware_flops for plan in plans)) == forward + b * s * LAYERS * 8 * 64 * (8 * H + 4 * s)


def test_a_cache_adds_no_flops_and_its_bytes_are_of_the_whole_run() -> None:
    job = dataclasses.replace(distillation(teacher=None, top_k=64), num_steps=1000)
    plan = Plan(job, Layout(), CLUSTER)
    assert plan.model_flops == Plan(dataclasses.replace(job, top_k=None), Layout(), CLUSTER).model_flops
    assert plan.teacher == {"cache_bytes": 1000 * 16 * (76 * (64 * 2 + 65 * 2) + 8)}
    of_gpt = training(paper_model("gpt_355m"), 1, dtype="fp32", top_k=5)
    assert Plan(of_gpt, Layout(), CLUSTER).teacher == {"cache_bytes": 1024 * (5 * 2 + 6 * 4) + 8}
    assert cache_record_bytes(3, 5, 2**16 + 1, 8) == 3 * (5 * 4 + 6 * 8) + 8


ROW, TOKENS = 2560 * 2, 16 * 512
MESSAGES = {  # options of the layout: name, kind, count and bytes of each
    (): [("embedding", "all_reduce", 1, TOKENS * ROW), (OUTPUTS, "all_reduce", 96, TOKENS * ROW)],
    ("batch_halves",): [("embedding", "all_reduce", 1, TOKENS * ROW), (OUTPUTS, "all_reduce", 192, TOKENS * ROW // 2)],
    ("sequence_parallel",): [
        ("embedding", "reduce_scatter", 1, TOKENS * ROW),
        (INPUTS, "all_gather", 96, TOKENS * ROW),
        (OUTPUTS, "reduce_scatter", 96, TOKENS * ROW),
        ("output of the last layer", "all_gather", 1, TOKENS * ROW),
    ],
}


@pytest.mark.parametrize("options", MESSAGES)
def test_a_teacher_sends_what_a_forward_pass_sends_and_the_loss_two_all_reduces(options: tuple[str, ...]) -> None:
    layout = Layout(tp_size=2, **dict.fromkeys(options, True))
    found = micro_batch_collectives(distillation(), layout)
    alone = [m for m in micro_batch_collectives(distillation(teacher=None), layout) if m.what != "loss"]
    of_teacher = [m for m in found if m.what.startswith("teacher: ")]
    expected = [Collective(f"teacher: {name}", k, "tensor", "forward", *more) for name, k, *more in MESSAGES[options]]
    assert of_teacher == expected
    assert [m for m in found if m.what != "loss" and m not in of_teacher] == alone
    assert sizes_of_loss(found) == [(1, 2 * M * 4), (1, 5 * M * 4)]
    cached = micro_batch_collectives(distillation(teacher=None, top_k=64), layout)
    assert [m for m in cached if m.what != "loss"] == alone
    assert sizes_of_loss(cached) == [(2, M * 4), (1, 2 * M * 4), (1, 5 * M * 4)]


def sizes_of_loss(messages: list[Collective]) -> list[tuple[int, int]]:
    return [(m.count, m.num_bytes) for m in messages if m.what == "loss"]


def test_a_step_takes_the_time_of_the_teachers_forward_pass_more() -> None:
    layout = Layout(tp_size=2, dp_size=4)
    both, alone = (Plan(distillation(layout, compiles=True, teacher=t), layout, CLUSTER) for t in (TEACHER, None))
    of_teacher = [row for row in both.rows if row.name.startswith("teacher: ")]
    of_loss = [sum(row.seconds for row in plan.rows if row.name == "loss") for plan in (both, alone)]
    more = sum(row.seconds for row in of_teacher) + of_loss[0] - of_loss[1] + both.time.host - alone.time.host
    assert both.time.total - alone.time.total == pytest.approx(more, rel=1e-9)
    losses = [row for plan in (both, alone) for row in plan.rows if (row.name, row.part) == ("loss", "elementwise")]
    (read, written), (alone_read, alone_written) = [(row.read, row.written) for row in losses if row.phase == "forward"]
    assert (read - alone_read, written - alone_written) == (2 * M * 15360 * 2, 0)


def test_a_step_without_a_teacher_has_no_part_of_one() -> None:
    plan = Plan(distillation(teacher=None), Layout(tp_size=2), CLUSTER)
    assert plan.teacher == {} and not any("teacher" in row.name for row in plan.rows)
    memory = estimate_memory(plan.job, plan.layout)
    assert (memory.teacher, memory.teacher_rows, memory.teacher_forward) == (0, 0, 0)
