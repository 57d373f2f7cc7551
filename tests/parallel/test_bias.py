"""Gradients of biases by both ways to sum them."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from lmscale.parallel import bias as biases


@pytest.mark.parametrize("by_sample", [False, True])
def test_results_and_gradients_are_those_of_torch(by_sample: bool, monkeypatch) -> None:
    monkeypatch.setattr(biases, "_sums_by_sample", lambda x: by_sample)
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 3, 4), (5, 4), (5,))
    x, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    factors = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad((F.linear(x, weight, bias) * factors).sum(), (x, weight, bias))
    for y in (biases.linear(x, weight, bias), biases.add_bias(F.linear(x, weight), bias)):
        torch.testing.assert_close(y, F.linear(x, weight, bias))
        torch.testing.assert_close(torch.autograd.grad((y * factors).sum(), (x, weight, bias)), wanted)


def test_only_code_compiled_for_a_gpu_sums_sample_by_sample(monkeypatch) -> None:
    def samples(dim: int, is_cuda: bool) -> SimpleNamespace:
        return SimpleNamespace(is_cuda=is_cuda, dim=lambda: dim)

    assert not biases._sums_by_sample(samples(3, True))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert [biases._sums_by_sample(samples(dim, True)) for dim in (2, 3, 4)] == [False, True, False]
    assert not biases._sums_by_sample(samples(3, False))


def test_rows_without_samples_are_summed() -> None:
    torch.testing.assert_close(biases.sum_rows(torch.ones(4, 3)), torch.full((3,), 4.0))
