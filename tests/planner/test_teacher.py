"""A step with a teacher: its cost by hand, and its activations in a real forward pass."""

import dataclasses
import itertools

import pytest
import torch
from paper_models import paper_model, training

from analysis.correctness.peak_memory import DTYPES, TensorBytes, sized
from lmscale.config import Layout
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.planner.memory import MemoryEstimate, estimate_memory
from lmscale.planner.workload import Workload, model_sizes, tensor_sizes

STUDENT, TEACHER = paper_model("bert_336m"), paper_model("bert_3.9b", vocab_multiple=2)
M = 16 * 77  # scored tokens of 16 sequences


def distillation(layout: Layout | None = None, **more: object) -> Workload:
    """16 sequences per data rank, with a teacher of 3.9 B parameters."""
    return training(STUDENT, 16, layout, **({"teacher": TEACHER} | more))


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
    h, v, layers = 2560, 30720, 48
    sharded = (12 * h * h + 7 * h) * layers + v * h + v
    around = (512 + 2 + 2) * h + (h * h + h) + (h * h + 3 * h) + (2 * h + 2)  # embeddings, last LayerNorm, three heads
    whole = 6 * h * layers + around
    logits = M * v // 2
    assert added_bytes(distillation(), Layout(tp_size=2)) == {
        "teacher": 2 * (sharded // 2 + whole),
        "teacher_rows": 2 * M * h,
        "teacher_forward": 2 * 16 * 512 * h * (5 + 8 // 2),
        "logits": logits * (2 + 2 * 4),  # a second buffer and two more temporaries
    }
    compiled = added_bytes(distillation(compiles=True), Layout(tp_size=2))
    assert compiled["logits"] == logits * 2


def test_a_cache_adds_what_is_read_and_wide_logits() -> None:
    job = distillation(teacher=None, top_k=64)
    read = M * (64 * 8 + 65 * 4)
    assert added_bytes(job, Layout(tp_size=2)) == {"teacher_rows": read, "logits": M * 15360 * (4 + 2 * 4)}


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


def test_sizes_divide_both_models() -> None:
    job = distillation(teacher=dataclasses.replace(TEACHER, num_attention_heads=20))  # of 16 and 20 heads
    assert tensor_sizes(job, False, 64) == [1, 2, 4]
    assert model_sizes(job, "auto", "auto", False) == [(1, 1), (2, 1), (4, 1)]
    with pytest.raises(ValueError, match=r"`teacher.model.num_attention_heads` must be a multiple of `tp_size` \(8\)"):
        job.check_layout(Layout(tp_size=8))
    job.check_layout(Layout(tp_size=8, pad_heads=True))
    short = distillation(teacher=dataclasses.replace(TEACHER, max_position_embeddings=511))
    with pytest.raises(ValueError, match=r"`teacher.model.max_position_embeddings` must be at least `data.seq_length`"):
        short.check_layout(Layout())
