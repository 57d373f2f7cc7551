"""Initial weights by counter: the distribution, independence, and the same bits at every layout and compiled."""

import hashlib
import math

import pytest
import torch
from torch import Tensor

from lmscale.config import TransformerConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.parallel.rng import counter_normal, normal_keys, normal_quantiles

CPU = torch.device("cpu")


def draw(rows: int, columns: int, name: str = "w", seed: int = 1, first_row: int = 0, first_column: int = 0) -> Tensor:
    return counter_normal(normal_keys(seed, name), rows, columns, first_row, first_column, normal_quantiles(CPU))


@pytest.fixture(scope="module")
def numbers() -> Tensor:
    return draw(1024, 1031).double()


def test_the_quantiles_are_the_same_on_every_machine() -> None:
    quantiles = normal_quantiles(CPU)
    assert torch.equal(quantiles, -quantiles.flip(0))
    assert abs(quantiles.double().square().mean().item() - 0.5) < 1e-7
    assert torch.equal(quantiles.double() * 2**20, (quantiles.double() * 2**20).round())
    assert hashlib.blake2b(quantiles.numpy().tobytes(), digest_size=8).hexdigest() == "5259977a85b27462"


def test_the_numbers_are_those_of_runs_on_record() -> None:
    rows = [[0.5219411849975586, -1.5748310089111328], [-0.7157974243164062, 1.0411367416381836]]
    assert draw(2, 2, seed=1234, first_row=3, first_column=1).tolist() == rows


def test_mean_deviation_and_kurtosis_are_those_of_a_normal_distribution(numbers) -> None:
    # Within four standard errors of each estimate.
    n = numbers.numel()
    assert abs(numbers.mean()) < 4 / math.sqrt(n)
    assert abs(numbers.std() - 1) < 4 / math.sqrt(2 * n)
    assert abs(numbers.pow(3).mean()) < 4 * math.sqrt(15 / n)
    assert abs(numbers.pow(4).mean() - 3) < 4 * math.sqrt(96 / n)


@pytest.mark.parametrize("limit", [0.5, 1.0, 2.0, 3.0, 4.0, 4.5])
def test_tails_have_the_weight_of_a_normal_distribution(numbers, limit) -> None:
    expected = math.erfc(limit / math.sqrt(2)) * numbers.numel()
    assert abs((numbers.abs() > limit).sum() - expected) < 4 * math.sqrt(expected) + 1


def test_neighbours_in_columns_rows_and_parameters_are_independent(numbers) -> None:
    other = draw(1024, 1031, name="v").double()
    pairs = {
        "columns": (numbers[:, 1:], numbers[:, :-1]),
        "rows": (numbers[1:], numbers[:-1]),
        "diagonal": (numbers[1:, 1:], numbers[:-1, :-1]),
        "distance": (numbers[512:], numbers[:512]),
        "parameters": (numbers, other),
        "seeds": (numbers, draw(1024, 1031, seed=2).double()),
    }
    for kind, (a, b) in pairs.items():
        limit = 4 / math.sqrt(a.numel())
        assert abs((a * b).mean()) < limit, kind
        assert abs(((a.square() - 1) * (b.square() - 1)).mean()) < 2 * limit, kind  # magnitudes too
    assert torch.linalg.matrix_norm(numbers, 2) < 1.01 * (math.sqrt(1024) + math.sqrt(1031))  # no common direction


def test_the_standard_deviations_are_those_of_the_generator() -> None:
    stds = []
    for initializer in ("generator", "counter"):
        config = TransformerConfig("gpt", 8, 256, 4, 1000, 64, initializer=initializer, initializer_std=0.05)
        stds.append({n: p.std().item() for n, p in build_model(config, ParallelContext(), seed=3).named_parameters()})
    generator, counter = stds
    assert all(math.isclose(counter[name], generator[name], rel_tol=0.03, abs_tol=1e-9) for name in generator)
    assert math.isclose(counter["transformer.layers.3.mlp.down.weight"], 0.05 / 4, rel_tol=0.01)


def test_large_parameters_are_drawn_in_parts_that_fit_together(monkeypatch) -> None:
    config = TransformerConfig("gpt", 1, 64, 4, 500, 40, vocab_multiple=64, initializer="counter")
    whole = build_model(config, ParallelContext(), seed=3)
    monkeypatch.setattr("lmscale.parallel.init.NUMBERS_AT_ONCE", 7 * 64)
    for a, b in zip(whole.parameters(), build_model(config, ParallelContext(), seed=3).parameters(), strict=True):
        assert torch.equal(a, b)
