"""Hashes of tensors: what changes them and what does not."""

import sys

import pytest
import torch
from ranks import make_context, run_ranks

from lmscale.parallel import fingerprint, first_difference

fingerprints = sys.modules[fingerprint.__module__]
TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


@pytest.mark.parametrize("dtype", TYPES)
def test_equal_tensors_have_equal_hashes_at_any_layout_in_memory(monkeypatch, dtype) -> None:
    x = (100 * torch.rand(40, 50)).to(dtype)
    whole = fingerprint(x)
    assert whole == fingerprint(x.clone()) == fingerprint(x.t().contiguous().t())
    monkeypatch.setattr(fingerprints, "_CHUNK", 17)
    assert fingerprint(x) == whole


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("first", "second"), [(1, -1), (1, 2), (0, 1), (3, 192)])
@pytest.mark.parametrize("distance", [1, 2, 2048, 2**20])
def test_a_change_and_a_swap_of_two_values_are_seen(dtype, first: int, second: int, distance: int) -> None:
    x = torch.zeros(2**20 + 8, dtype=dtype)
    x[5], x[5 + distance] = first % 256, second % 256
    if dtype.is_floating_point:
        x[5], x[5 + distance] = first, second
    changed, swapped = x.clone(), x.clone()
    changed[5] = x[5 + distance]
    swapped[5], swapped[5 + distance] = x[5 + distance].clone(), x[5].clone()
    assert len({int(fingerprint(each)) for each in (x, changed, swapped)}) == 3


def test_a_change_that_is_lost_in_products_with_even_numbers_is_seen() -> None:
    # x ^ (x >> 32) of the second differs from that of the first in the highest bit alone.
    assert fingerprint(torch.tensor([0])) != fingerprint(torch.tensor([-(2**63) + 2**31]))


def _differ_on_rank_1(rank: int) -> list[str | None]:
    group = make_context(tp_size=2).tp_group
    tensors = {"equal": torch.ones(3), "other": torch.tensor([1.0, float(rank)])}
    return [first_difference(named, group) for named in ({"equal": tensors["equal"]}, tensors, {})]


def test_the_first_tensor_that_differs_between_ranks_is_named_on_all_of_them() -> None:
    assert run_ranks(_differ_on_rank_1, 2) == [[None, "other", None]] * 2


def test_zeros_of_different_sign_differ_and_nan_equals_itself() -> None:
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    assert fingerprint(torch.tensor([float("nan")])) == fingerprint(torch.tensor([float("nan")]))
