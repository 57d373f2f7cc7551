"""The chunked loss with a teacher against torch on full logits, on one, two and four processes."""

import math
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from ranks import make_context, run_ranks
from sharding import largest
from torch import Tensor

from analysis.correctness.peak_memory import TensorBytes
from lmscale import partition
from lmscale.parallel import (
    CachedTargets,
    ParallelContext,
    ProjectedTargets,
    chunked_cross_entropy,
    linear_cross_entropy,
)
from lmscale.parallel.distillation import top_k_log_probabilities

N, H, H_T, V, USED = 23, 8, 5, 44, 33  # rows, widths of student and teacher, padded and real vocabulary
SETTINGS = list(product((1.0, 2.0), (0.0, 0.5, 1.0)))  # temperature, weight
SOURCES = ("teacher", 7, 1, USED)  # whose distribution: the model's, or a cache of so many ids


def make_inputs(dtype: torch.dtype = torch.float64, spread: float = 1.0) -> dict[str, Tensor]:
    """Rows, tables and biases of student and teacher; the labels, some of which are not scored."""
    draw = torch.Generator().manual_seed(5)
    shapes = {"rows": (N, H), "weight": (V, H), "bias": (V,), "t_rows": (N, H_T), "t_weight": (V, H_T), "t_bias": (V,)}
    found = {
        name: (spread * torch.randn(shape, generator=draw, dtype=torch.float64)).to(dtype)
        for name, shape in shapes.items()
    }
    found["labels"] = torch.randint(0, USED, (N,), generator=draw)
    found["labels"][::4] = -100
    return found


def teacher_log_p(inputs: dict[str, Tensor], temperature: float) -> Tensor:
    logits = (inputs["t_rows"] @ inputs["t_weight"].t() + inputs["t_bias"])[:, :USED]
    return (logits.double() / temperature).log_softmax(-1)


def cached(inputs: dict[str, Tensor], temperature: float, top_k: int) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the most probable ids and of all others together, and the ids."""
    log_p, ids = teacher_log_p(inputs, temperature).topk(top_k, -1)
    others = teacher_log_p(inputs, temperature).scatter(1, ids, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_p, others], dim=1), ids


def plain_losses(inputs: dict[str, Tensor], temperature: float, source: str | int) -> tuple[Tensor, Tensor]:
    """Cross-entropy and T^2 KL of every scored row, from full logits by torch alone."""
    scored = inputs["labels"] != -100
    logits = (inputs["rows"] @ inputs["weight"].t() + inputs["bias"])[scored, :USED].double()
    log_q, log_p = (logits / temperature).log_softmax(-1), teacher_log_p(inputs, temperature)[scored]
    if source not in ("teacher", USED):  # the others as one outcome
        ids = log_p.topk(source, -1).indices

        def merged(log_x: Tensor) -> Tensor:
            others = log_x.masked_fill(torch.zeros_like(log_x).scatter(1, ids, 1.0).bool(), -math.inf)
            return torch.cat([log_x.gather(1, ids), others.logsumexp(-1, keepdim=True)], dim=1)

        log_q, log_p = merged(log_q), merged(log_p)
    divergence = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    return F.cross_entropy(logits, inputs["labels"][scored], reduction="none"), temperature**2 * divergence


def targets_of(inputs: dict[str, Tensor], temperature: float, weight: float, source: str | int, part: slice = slice(V)):
    if source == "teacher":
        tables = inputs["t_weight"][part], inputs["t_bias"][part]
        return ProjectedTargets(temperature, weight, inputs["t_rows"], *tables, USED)
    return CachedTargets(temperature, weight, *cached(inputs, temperature, source))


def found_and_wanted(
    temperature: float, weight: float, source: str | int, context: ParallelContext
) -> tuple[list[Tensor], list[Tensor]]:
    """Both losses and the gradients of rows, weight and bias, of the mixed loss."""
    mix = torch.tensor([1 - weight, weight], dtype=torch.float64) * 0.25
    inputs, part = (
        make_inputs(),
        slice(context.tp_rank * V // context.tp_size, (context.tp_rank + 1) * V // context.tp_size),
    )
    leaves = [inputs[name].requires_grad_() for name in ("rows", "weight", "bias")]
    losses = torch.stack([each.sum() for each in plain_losses(inputs, temperature, source)])
    wanted = [losses.detach(), *torch.autograd.grad((losses * mix).sum(), leaves)]
    mine = [inputs["rows"], *(inputs[name][part].detach().requires_grad_() for name in ("weight", "bias"))]
    targets = targets_of(inputs, temperature, weight, source, part)
    losses = linear_cross_entropy(*mine, inputs["labels"], USED, context, targets=targets)
    found = [losses.detach(), *torch.autograd.grad((losses * mix).sum(), mine)]
    return found, [*wanted[:2], wanted[2][part], wanted[3][part]]


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    return largest((a - b).abs().max() / b.abs().max().clamp(min=1e-3) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("temperature, weight", SETTINGS)
@pytest.mark.parametrize("at_once", [3 * V, 100 * V])
def test_both_losses_and_the_gradients_equal_those_from_full_logits(
    temperature: float, weight: float, source: str | int, at_once: int, monkeypatch
) -> None:
    monkeypatch.setattr(partition, "LOGITS_AT_ONCE", at_once)
    assert error(*found_and_wanted(temperature, weight, source, ParallelContext())) < 1e-13


def _on_a_rank(rank: int, tp_size: int) -> list[float]:
    partition.LOGITS_AT_ONCE = 7 * V // tp_size  # several chunks
    context = make_context(tp_size)
    return [error(*found_and_wanted(*setting, source, context)) for setting in SETTINGS for source in SOURCES]


@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_with_a_part_of_the_vocabulary_equal_one_process(tp_size: int) -> None:
    """At tp_size 4 the last rank has padding alone."""
    for errors in run_ranks(_on_a_rank, tp_size, tp_size):
        assert max(errors) < 1e-13


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_student_that_equals_its_teacher_has_no_divergence_and_no_gradient_of_it(temperature: float) -> None:
    inputs = make_inputs()
    own = [inputs[name].requires_grad_() for name in ("rows", "weight", "bias")]
    targets = ProjectedTargets(temperature, 1.0, *(each.detach() for each in own), USED)
    losses = linear_cross_entropy(*own, inputs["labels"], USED, ParallelContext(), targets=targets)
    assert abs(losses[1].item()) < 1e-12
    assert all(grad.abs().max() < 1e-12 for grad in torch.autograd.grad(losses[1], own))


@pytest.mark.parametrize("source", ["teacher", 7])
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_half_types_are_as_accurate_as_their_products(dtype: torch.dtype, bound: float, source: str | int) -> None:
    inputs, mix = make_inputs(dtype), torch.tensor([0.5, 0.5])
    leaves = [inputs[name].requires_grad_() for name in ("rows", "weight", "bias")]
    losses = linear_cross_entropy(
        *leaves, inputs["labels"], USED, ParallelContext(), targets=targets_of(inputs, 2.0, 0.5, source)
    )
    assert losses.dtype == torch.float32
    found = [losses.detach(), *torch.autograd.grad((losses * mix * 0.25).sum(), leaves)]
    exact = {name: x.detach().double() if x.is_floating_point() else x for name, x in inputs.items()}
    own = [exact[name].requires_grad_() for name in ("rows", "weight", "bias")]
    whole = torch.stack([each.sum() for each in plain_losses(exact, 2.0, source)])
    wanted = [whole.detach(), *torch.autograd.grad((whole * mix.double() * 0.25).sum(), own)]
    assert error([x.double() for x in found], wanted) < bound


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.01, 3.0, 60.0])
def test_top_k_is_finite_and_never_negative(dtype: torch.dtype, spread: float) -> None:
    """From uniform students to some that give all others than the likeliest id less than 1e-300."""
    draw, number = torch.Generator().manual_seed(1), 10_000
    logits = (spread * torch.randn(number, V, generator=draw)).to(dtype)
    teacher = (3 * torch.randn(number, USED, generator=draw, dtype=torch.float64)).log_softmax(-1)
    log_p, ids = teacher.topk(5, -1)
    # The student's likeliest ids are the teacher's in half of the rows: then nothing of its probability is elsewhere.
    half = slice(number // 2)
    logits[half] = logits[half].scatter(1, ids[half], logits[half].sort(dim=1, descending=True).values[:, :5])
    others = teacher.scatter(1, ids, -math.inf).logsumexp(-1, keepdim=True)
    targets = CachedTargets(1.0, 1.0, torch.cat([log_p, others], dim=1).to(dtype), ids)
    logits[:, USED:], context = -math.inf, ParallelContext()
    merged = targets.logits(slice(number), logits, context)
    losses, log_totals, place = chunked_cross_entropy._compare(
        logits, merged, torch.zeros(number, dtype=torch.int64), targets, context, False
    )
    assert losses[1].isfinite().all() and (losses[1] >= 0).all()
    assert chunked_cross_entropy._mixed_gradient(logits, merged, log_totals, place, targets, False).isfinite().all()


@pytest.mark.parametrize("source", ["teacher", 7])
def test_compiled_passes_give_the_same(source: str | int) -> None:
    inputs = make_inputs(torch.float32)
    leaves = [inputs[name].requires_grad_() for name in ("rows", "weight", "bias")]
    run = partial(linear_cross_entropy, *leaves, inputs["labels"], USED, ParallelContext())
    found = []
    for compiled in (False, True):
        losses = run(compiled=compiled, targets=targets_of(inputs, 2.0, 0.3, source))
        found.append([losses.detach(), *torch.autograd.grad((losses * torch.tensor([0.7, 0.3])).sum(), leaves)])
    assert error(*found) < 1e-5


def _errors_of_top_k(rank: int, tp_size: int) -> list[float]:
    """Of `most_probable` in several chunks, from log-probabilities of the whole vocabulary, for ordinary and for
    confident teachers; the ids must be equal."""
    partition.LOGITS_AT_ONCE, context, errors = 7 * V // tp_size, make_context(tp_size), []
    part = slice(context.tp_rank * V // tp_size, (context.tp_rank + 1) * V // tp_size)
    for (temperature, weight), top_k, spread in product(SETTINGS[::3], (1, 7, 20, USED - 1, USED), (1.0, 5.0)):
        inputs = make_inputs(spread=spread)
        found = targets_of(inputs, temperature, weight, "teacher", part).most_probable(top_k, context)
        wanted = cached(inputs, temperature, top_k)
        assert torch.equal(found[1], wanted[1]) and torch.equal(found[0].isinf(), wanted[0].isinf())
        errors.append((found[0].exp() - wanted[0].exp()).abs().max().item())
        errors.append((found[0] - wanted[0]).nan_to_num(0.0).abs().max().item())
    return errors


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_most_probable_ids_equal_those_of_the_whole_vocabulary(tp_size: int) -> None:
    for errors in run_ranks(_errors_of_top_k, tp_size, tp_size):
        assert max(errors) < 1e-12


def test_the_others_of_a_confident_teacher_are_not_lost_in_fp32() -> None:
    logits = torch.full((1, 50), 0.0)
    logits[0, 3] = 60.0
    log_p, ids = top_k_log_probabilities(logits, 1, 1.0, ParallelContext())
    assert ids.tolist() == [[3]] and log_p[0].tolist() == pytest.approx([0.0, math.log(49) - 60], rel=1e-6)


# Faults of other implementations, planted: the comparisons above must notice each.


class AddsAgain(torch.autograd.Function):
    """An all-reduce over the tensor ranks whose backward pass adds the gradients of all ranks, which are equal."""

    @staticmethod
    def forward(ctx, x: Tensor, context: ParallelContext) -> Tensor:
        ctx.context = context
        return context.tp_communicator.all_reduce(x.clone())

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        return ctx.context.tp_communicator.all_reduce(grad_output.clone()), None


def _errors_of_an_all_reduce_that_adds_again(rank: int, temperature: float) -> tuple[float, float]:
    """Of the divergence, and of its gradient with respect to this rank's part of the weight."""
    context, inputs = make_context(2), make_inputs()
    part, scored = slice(context.tp_rank * V // 2, (context.tp_rank + 1) * V // 2), inputs["labels"] != -100
    weight = inputs["weight"].requires_grad_()
    wanted = plain_losses(inputs, temperature, "teacher")[1].sum()
    log_p, own = teacher_log_p(inputs, temperature)[scored, part], weight.detach()[part].requires_grad_()
    s = ((inputs["rows"] @ own.t() + inputs["bias"][part])[scored, : log_p.shape[1]]) / temperature
    total = AddsAgain.apply(s.exp().sum(-1), context)
    found = temperature**2 * (AddsAgain.apply((log_p.exp() * (log_p - s)).sum(-1), context) + total.log()).sum()
    gradients = torch.autograd.grad(found, own), [torch.autograd.grad(wanted, weight)[0][part]]
    return error([found.detach()], [wanted.detach()]), error(*gradients)


def test_a_gradient_times_tp_size_is_found_though_the_loss_is_right() -> None:
    for of_loss, of_gradient in run_ranks(_errors_of_an_all_reduce_that_adds_again, 2, 2.0):
        assert of_loss < 1e-13 and of_gradient == pytest.approx(1.0)


def test_a_truncated_top_k_is_no_divergence() -> None:
    """Without the bucket of all others it is negative for every student that is surer of the id than its teacher, which
    a clamp at 0 would hide."""
    inputs = make_inputs()
    inputs |= {name: 1.5 * inputs[f"t_{name}"] for name in ("rows", "bias")} | {"weight": inputs["t_weight"]}
    losses = plain_losses(inputs, 1.0, 1)[1]
    run = partial(linear_cross_entropy, inputs["rows"], inputs["weight"], inputs["bias"], inputs["labels"], USED)
    found = run(ParallelContext(), targets=targets_of(inputs, 1.0, 1.0, 1))[1]
    assert losses.min() > 0 and error([found], [losses.sum()]) < 1e-13
    log_p, ids = cached(inputs, 1.0, 1)
    log_q = (1.5 * (inputs["t_rows"] @ inputs["t_weight"].t() + inputs["t_bias"])[:, :USED]).log_softmax(-1)
    truncated = (log_p[:, :-1].exp() * (log_p[:, :-1] - log_q.gather(1, ids))).sum(-1)
    assert truncated.max() < 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_there_is_no_rest_where_k_is_the_whole_vocabulary(dtype: torch.dtype) -> None:
    """As 1 less the other probabilities it would be a rounding error, whose logarithm is finite."""
    inputs, context = make_inputs(dtype), ParallelContext()
    log_p, ids = targets_of(inputs, 2.0, 1.0, "teacher").most_probable(USED, context)
    assert log_p[:, -1].tolist() == [-math.inf] * N
    planted = (1 - log_p[:, :-1].exp().sum(-1)).abs().log()
    assert planted.isfinite().any() and not torch.equal(planted, log_p[:, -1])
    run = partial(linear_cross_entropy, inputs["rows"], inputs["weight"], inputs["bias"], inputs["labels"], USED)
    losses = run(context, targets=CachedTargets(2.0, 1.0, log_p, ids))
    assert error([losses], [run(context, targets=targets_of(inputs, 2.0, 1.0, "teacher"))]) < 1e-5


def peak_bytes(source: str | int, many: int) -> int:
    """Bytes that the loss and its gradients, and the search for the most probable ids, allocate for many rows."""
    inputs = make_inputs(torch.bfloat16)
    for name in ("rows", "t_rows", "labels"):
        inputs[name] = inputs[name].repeat(many, *[1] * (inputs[name].dim() - 1))
    leaves, context = [inputs[name].requires_grad_() for name in ("rows", "weight", "bias")], ParallelContext()
    targets = targets_of(inputs, 2.0, 0.5, source)
    with TensorBytes([x for x in [*inputs.values(), *vars(targets).values()] if isinstance(x, Tensor)]) as tracked:
        held = tracked.now
        linear_cross_entropy(*leaves, inputs["labels"], USED, context, targets=targets).sum().backward()
        if source == "teacher":
            targets.most_probable(1, context)
    return tracked.peak - held


def whole_logits(self: ProjectedTargets, rows: slice, student: Tensor, context: ParallelContext) -> Tensor:
    """Every row's logits, cast to fp32."""
    logits = torch.addmm(self.bias, self.rows, self.word_embedding.t()).float()
    logits[:, self.vocab_size :] = -math.inf
    return logits[rows].to(student.dtype)


@pytest.mark.parametrize("source", ["teacher", 1])
def test_the_whole_vocabulary_is_never_held_for_all_rows(source: str | int, monkeypatch) -> None:
    monkeypatch.setattr(partition, "LOGITS_AT_ONCE", 7 * V)
    smallest = 20 * N * V * 2  # in bf16
    assert peak_bytes(source, 20) < 0.9 * smallest
    monkeypatch.setattr(ProjectedTargets, "logits", whole_logits)
    assert source != "teacher" or peak_bytes(source, 20) > 2 * smallest
