"""The next token: distributed as the softmax, truncated by top-k and top-p, the same at every layout."""

import itertools
import math

import pytest
import torch
from ranks import make_context, run_ranks
from torch import Tensor

from lmscale.config.generate import Sampling
from lmscale.evaluation.sampling import choose_tokens, gumbel_noise, sample_key
from lmscale.parallel import ParallelContext

COLUMNS, USED = 1024, 700  # at four ranks the last one has padded columns only
SETTINGS = [
    Sampling(0),
    Sampling(0.7),
    Sampling(1.0, top_k=1),
    Sampling(1.3, top_k=5),
    Sampling(1.0, top_k=5000),
    Sampling(1.0, top_p=1e-9),
    Sampling(0.9, top_p=0.5),
    Sampling(2.0, top_p=0.999),
    Sampling(1.0, top_k=40, top_p=0.8),
]
PLAIN = ParallelContext()


def make_logits(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(6, COLUMNS, generator=generator) * torch.tensor([0.01, 0.5, 1.0, 2.0, 4.0, 8.0])[:, None]
    if kind == "ties":  # as bf16 has them: about thirty different scores
        logits = (logits * 2).round() / 2
    if kind == "equal":
        logits = torch.zeros_like(logits)
    logits[:, USED:] = -math.inf
    return logits


def keys_and_positions(num_rows: int) -> tuple[Tensor, Tensor]:
    keys = torch.tensor([sample_key(1, [3, 1, 4], row) for row in range(num_rows)])
    return keys, torch.arange(num_rows) + 7


def plain_choice(logits: list[float], sampling: Sampling, key: int, position: int) -> int:
    """One token by sorting a whole row in Python."""
    order = sorted((i for i, logit in enumerate(logits) if logit > -math.inf), key=lambda i: (-logits[i], i))
    if sampling.temperature == 0:
        return order[0]
    order = order[: sampling.top_k]
    weights = [math.exp((logits[i] - logits[order[0]]) / sampling.temperature) for i in order]
    total, before, kept = math.fsum(weights), 0.0, []
    for i, weight in zip(order, weights, strict=True):
        if before < sampling.top_p:
            kept.append(i)
        before += weight / total
    noise = gumbel_noise(torch.tensor(key), torch.tensor(position), torch.tensor(kept)).tolist()
    return max(zip(kept, noise, strict=True), key=lambda one: logits[one[0]] / sampling.temperature + one[1])[0]


def _choose_all(rank: int, tp_size: int) -> list[list[int]]:
    context = make_context(tp_size) if tp_size > 1 else PLAIN
    found = []
    for kind, sampling in itertools.product(("smooth", "ties", "equal"), SETTINGS):
        logits = make_logits(kind)
        width = COLUMNS // tp_size
        mine = logits[:, rank * width : (rank + 1) * width]
        found.append(choose_tokens(mine, sampling, *keys_and_positions(len(logits)), context).tolist())
    return found


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    found = []
    for kind, sampling in itertools.product(("smooth", "ties", "equal"), SETTINGS):
        logits = make_logits(kind)
        keys, positions = keys_and_positions(len(logits))
        rows = zip(logits.double().tolist(), keys.tolist(), positions.tolist(), strict=True)
        found.append([plain_choice(row, sampling, key, position) for row, key, position in rows])
    return found


def test_one_rank_agrees_with_sorting_the_whole_row(expected) -> None:
    found = _choose_all(0, 1)
    assert found == expected
    assert len({token for tokens in found for token in tokens}) > 25  # the comparison is not trivial


@pytest.mark.parametrize("tp_size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_every_tensor_rank_chooses_the_same_token_as_one_rank(expected, tp_size: int) -> None:
    assert run_ranks(_choose_all, tp_size, tp_size) == [expected] * tp_size


@pytest.mark.parametrize(
    "sampling, kept, over",
    [
        (Sampling(1.0), [0, 1, 2, 3, 5], "positions"),
        (Sampling(0.5), [0, 1, 2, 3, 5], "samples"),
        (Sampling(1.0, top_k=3), [0, 1, 5], "samples"),
        (Sampling(1.0, top_p=0.7), [0, 1], "positions"),
        (Sampling(2.0, top_p=0.7), [0, 1, 5], "samples"),
    ],
)
def test_frequencies_equal_the_probabilities(sampling: Sampling, kept: list[int], over: str) -> None:
    number = 60_000
    row = torch.tensor([2.0, 1.0, 0.0, -1.0, -math.inf, 0.5], dtype=torch.float64)
    if over == "samples":
        keys, positions = torch.tensor([sample_key(3, [8], i) for i in range(number)]), torch.full((number,), 11)
    else:
        keys, positions = torch.full((number,), sample_key(3, [8], 0)), torch.arange(number)
    tokens = choose_tokens(row.expand(number, 6), sampling, keys, positions, PLAIN)
    counts = torch.bincount(tokens, minlength=6).double()
    probabilities = torch.zeros(6, dtype=torch.float64)
    probabilities[kept] = (row[kept] / sampling.temperature).softmax(-1)
    assert torch.equal(counts > 0, probabilities > 0)
    chi_square = ((counts[kept] / number - probabilities[kept]) ** 2 / probabilities[kept]).sum() * number
    assert chi_square < 18.5  # 0.1 % of the distribution with four degrees of freedom lie above
    # A token says nothing about the next one.
    pairs = torch.bincount(tokens[:-1] * 6 + tokens[1:], minlength=36).view(6, 6).double() / (number - 1)
    assert (pairs - probabilities[:, None] * probabilities).abs().max() < 5 * math.sqrt(0.25 / number)


def test_noise_has_the_moments_of_the_gumbel_distribution() -> None:
    noise = gumbel_noise(torch.arange(1000)[:, None], torch.tensor(3), torch.arange(1000))
    assert noise.mean().item() == pytest.approx(0.5772157, abs=0.005)  # Euler's constant; 4 standard errors
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.01)
    across = torch.corrcoef(torch.stack((noise[:, :-1].flatten(), noise[:, 1:].flatten())))[0, 1]
    down = torch.corrcoef(torch.stack((noise[:-1].flatten(), noise[1:].flatten())))[0, 1]
    assert max(abs(across.item()), abs(down.item())) < 0.005


def test_seed_prompt_sample_and_position_each_change_the_noise() -> None:
    keys = [sample_key(1, [2, 3], 0), sample_key(2, [2, 3], 0), sample_key(1, [23], 0), sample_key(1, [2, 3], 1)]
    noise = gumbel_noise(torch.tensor(keys)[:, None], torch.tensor(0), torch.arange(4))
    moved = gumbel_noise(torch.tensor(keys)[:, None], torch.tensor(1), torch.arange(4))
    assert len(set(torch.cat((noise, moved)).flatten().tolist())) == 32


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [SETTINGS[0], SETTINGS[-1]])
def test_nan_scores_raise(bad: float, sampling: Sampling) -> None:
    logits = make_logits("smooth")
    logits[2, 17] = bad
    with pytest.raises(ValueError, match=r"largest score must be a finite number, but is .* in row 2"):
        choose_tokens(logits, sampling, *keys_and_positions(6), PLAIN)
