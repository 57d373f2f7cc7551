"""Output projection and loss, plain and chunked, against torch on full logits, on one and two processes."""

import math

import pytest
import torch
import torch.nn.functional as F
from ranks import make_context, run_ranks
from sharding import largest
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lmscale import partition
from lmscale.parallel import (
    ParallelContext,
    chunked_cross_entropy,
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
    vocab_parallel_logits,
)

N, H, V, USED = 23, 8, 40, 33  # rows, hidden, padded and real vocabulary


def make_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, weight, bias and labels; some labels are not scored."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((N, H), (V, H), (V,))
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    labels = torch.randint(0, USED, (N,), generator=generator)
    labels[::4] = -100
    return (*(x.requires_grad_() for x in inputs), labels)


def gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss * 0.25, inputs)]


def expected() -> list[Tensor]:
    """Loss and gradients of rows, weight and bias computed from full logits on one process."""
    rows, weight, bias, labels = make_inputs()
    logits = (rows @ weight.t() + bias)[:, :USED]
    return gradients(F.cross_entropy(logits, labels, reduction="sum"), rows, weight, bias)


def largest_error(found: list[Tensor], wanted: list[Tensor]) -> float:
    return largest((a - b).abs().max() / b.abs().max() for a, b in zip(found, wanted, strict=True))


def plain_loss(
    rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, vocab_size: int, context: ParallelContext
) -> Tensor:
    """The same loss without chunks, with torch's autograd."""
    logits = vocab_parallel_logits(rows, weight, bias, vocab_size, context)
    return vocab_parallel_cross_entropy(logits, labels, V, context).sum()


@pytest.mark.parametrize("at_once", [1, 3 * V, 11 * V + 5, 100 * V])
def test_the_chunked_loss_and_gradients_equal_those_from_full_logits(at_once: int, monkeypatch) -> None:
    monkeypatch.setattr(partition, "LOGITS_AT_ONCE", at_once)
    rows, weight, bias, labels = make_inputs()
    loss = linear_cross_entropy(rows, weight, bias, labels, USED, ParallelContext())
    assert largest_error(gradients(loss, rows, weight, bias), expected()) < 1e-13


def _on_a_rank(rank: int, loss_function) -> float:
    partition.LOGITS_AT_ONCE = 7 * V // 2  # several chunks
    context = make_context(tp_size=2)
    rows, weight, bias, labels = make_inputs()
    part = slice(rank * V // 2, (rank + 1) * V // 2)
    mine = [x[part].detach().requires_grad_() for x in (weight, bias)]
    found = gradients(loss_function(rows, *mine, labels, USED, context), rows, *mine)
    loss, d_rows, d_weight, d_bias = expected()
    return largest_error(found, [loss, d_rows, d_weight[part], d_bias[part]])


@pytest.mark.parametrize("loss_function", [plain_loss, linear_cross_entropy])
def test_two_ranks_with_half_the_vocabulary_each_equal_one_process(loss_function) -> None:
    assert all(error < 1e-13 for error in run_ranks(_on_a_rank, 2, loss_function))


def test_rows_far_below_the_others_keep_their_loss() -> None:
    rows, weight, bias, labels = make_inputs()
    # One more hidden dimension of weight 1 moves all logits of a row alike, which changes no loss.
    moved = torch.cat([rows, torch.linspace(-1e4, 1e4, N, dtype=rows.dtype).unsqueeze(1)], dim=1)
    weight = torch.cat([weight, torch.ones(V, 1, dtype=weight.dtype)], dim=1)
    loss = linear_cross_entropy(moved, weight, bias, labels, USED, ParallelContext())
    assert loss.item() == pytest.approx(expected()[0].item(), rel=1e-9)


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 0.02), (torch.float16, 0.003)])
def test_half_types_are_as_accurate_as_their_products(dtype: torch.dtype, bound: float, monkeypatch) -> None:
    monkeypatch.setattr(partition, "LOGITS_AT_ONCE", 5 * V)
    rows, weight, bias, labels = make_inputs(dtype)
    found = gradients(linear_cross_entropy(rows, weight, bias, labels, USED, ParallelContext()), rows, weight, bias)
    assert found[0].dtype == torch.float32 and found[1].dtype == dtype
    assert largest_error([x.double() for x in found], expected()) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_half_weights_and_biases_are_summed_over_chunks_in_fp32(dtype: torch.dtype, monkeypatch) -> None:
    """1,000 equal chunks: a sum in the half type stops growing where a chunk's part is below half its last bit."""
    chunks, generator = 1000, torch.Generator().manual_seed(0)
    row, weight = torch.randn(1, H, generator=generator), torch.randn(V, H, generator=generator)
    labels = torch.full((chunks,), 2)
    monkeypatch.setattr(partition, "LOGITS_AT_ONCE", V)
    found = []
    for wide in (dtype, torch.float64):
        rows = row.to(dtype).to(wide).repeat(chunks, 1)
        parameters = [x.to(dtype).to(wide).requires_grad_() for x in (weight, torch.zeros(V))]
        loss = linear_cross_entropy(rows, *parameters, labels, USED, ParallelContext())
        found.append([x.double() for x in torch.autograd.grad(loss, parameters)])
    for half, exact in zip(*found, strict=True):
        assert (half - exact).norm() < 2 * torch.finfo(dtype).eps * exact.norm()


def test_the_chunked_loss_never_allocates_the_full_logits(monkeypatch) -> None:
    monkeypatch.setattr(partition, "LOGITS_AT_ONCE", 2 * V)
    sizes = []
    project = chunked_cross_entropy._project
    monkeypatch.setattr(
        chunked_cross_entropy, "_project", lambda *inputs: sizes.append(len(inputs[0])) or project(*inputs)
    )
    rows, weight, bias, labels = make_inputs()
    linear_cross_entropy(rows, weight, bias, labels, USED, ParallelContext()).backward()
    assert max(sizes) == 2 and len(sizes) == math.ceil(N / 2)


def test_a_gpu_projects_four_times_as_many_rows_at_a_time() -> None:
    v = 51_200
    assert [len(range(9000)[chunk]) for chunk in chunked_cross_entropy._chunks(9000, v, on_gpu=False)][:2] == [1024] * 2
    assert [len(range(9000)[chunk]) for chunk in chunked_cross_entropy._chunks(9000, v, on_gpu=True)] == [
        4096,
        4096,
        808,
    ]


@pytest.mark.parametrize(("num_chunks", "dtype"), [(1, torch.bfloat16), (2, torch.float32)])
def test_a_gpu_sums_the_weight_s_gradient_in_fp32_only_over_several_chunks(num_chunks, dtype) -> None:
    with FakeTensorMode():  # without a GPU
        d_logits, rows = (torch.empty(8, size, dtype=torch.bfloat16, device="cuda") for size in (6, 4))
        assert chunked_cross_entropy._add_product(None, d_logits, rows, num_chunks, False).dtype == dtype


def test_no_gradients_are_computed_under_no_grad(monkeypatch) -> None:
    """Parameters still have `requires_grad` set under `torch.no_grad`."""
    monkeypatch.setattr(chunked_cross_entropy, "_logits_to_gradient", None)
    for mode in (torch.no_grad, torch.inference_mode):
        rows, weight, bias, labels = make_inputs()
        with mode():
            assert linear_cross_entropy(rows, weight, bias, labels, USED, ParallelContext()) > 0


def test_without_scored_rows_loss_and_gradients_are_zero() -> None:
    rows, weight, bias, labels = make_inputs()
    for some in (rows[:0], rows):
        loss = linear_cross_entropy(some, weight, bias, torch.full((len(some),), -100), USED, ParallelContext())
        assert loss == 0 and all((g == 0).all() for g in gradients(loss, some, weight, bias))


def test_a_second_backward_pass_is_refused() -> None:
    rows, weight, bias, labels = make_inputs()
    loss = linear_cross_entropy(rows, weight, bias, labels, USED, ParallelContext())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        loss.backward()


def test_the_loss_per_row_equals_torch() -> None:
    rows, weight, bias, labels = make_inputs()
    logits = (rows @ weight.t() + bias).detach()
    wanted = F.cross_entropy(logits, labels, reduction="none")
    found = vocab_parallel_cross_entropy(logits, labels, V, ParallelContext())
    assert (found - wanted).abs().max() < 1e-13


def test_gathered_logits_are_refused() -> None:
    """Every rank would add the exponentials of all columns, and the loss would be log p too high."""
    rows, weight, bias, labels = make_inputs()
    with pytest.raises(ValueError, match=f"must have `padded_vocab_size` / `tp_size` = {V // 2} columns, but have {V}"):
        vocab_parallel_cross_entropy(rows @ weight.t() + bias, labels, V, ParallelContext(tp_size=2))


def test_the_plain_loss_has_the_gradients_of_torch() -> None:
    rows, weight, bias, labels = make_inputs()
    loss = plain_loss(rows, weight, bias, labels, USED, ParallelContext())
    assert largest_error(gradients(loss, rows, weight, bias), expected()) < 1e-13


@pytest.mark.slow
def test_the_compiled_loss_equals_the_eager_one(monkeypatch) -> None:
    monkeypatch.setattr(partition, "LOGITS_AT_ONCE", 9 * V)
    rows, weight, bias, labels = make_inputs()
    loss = linear_cross_entropy(rows, weight, bias, labels, USED, ParallelContext(), compiled=True)
    assert largest_error(gradients(loss, rows, weight, bias), expected()) < 1e-12
