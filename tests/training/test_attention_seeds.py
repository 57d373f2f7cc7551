"""Dropout: which ranks, steps and micro-steps draw which masks of attention (`sdpa`), and which keys of the others."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from sharding import small_config

from lmscale.parallel import ParallelContext
from lmscale.training.module import GPTModule

RANKS = list(itertools.product((0, 1), (0, 1)))  # (dp_rank, tp_rank)
STEPS, MICRO_STEPS = 3, 2


def masks(dropout_seeds: str, dp_rank: int, tp_rank: int, seed: int = 1234) -> list[tuple[float, ...]]:
    """What a forward pass on this rank draws from torch's generator, one entry per micro-batch of the run."""
    drawn = []

    class Drawing(GPTModule):
        is_last_micro_batch = False
        device = torch.device("cpu")

        def loss_sums(self, batch: dict, sample_keys: torch.Tensor) -> torch.Tensor:
            drawn.append(tuple(torch.rand(8).tolist()))
            return torch.ones(1, dtype=torch.float64, requires_grad=True)

    module = Drawing(small_config("gpt"), seed=seed, dropout_seeds=dropout_seeds)
    context = ParallelContext(tp_rank=tp_rank, tp_size=2, dp_rank=dp_rank, dp_size=2)
    module._trainer = SimpleNamespace(strategy=SimpleNamespace(parallel=context), accumulate_grad_batches=MICRO_STEPS)
    batch = {"tokens": torch.zeros(2, 5, dtype=torch.int64), "labels": torch.zeros(2, 5, dtype=torch.int64)}
    with torch.random.fork_rng():
        for step in range(STEPS):
            module.on_load_checkpoint({"global_step": step})
            for _ in range(MICRO_STEPS):
                module.training_step(batch | {"sample_numbers": torch.arange(2)}, 0)
            assert not module.step_terms.requires_grad  # it would keep the graphs of all micro-batches
    return drawn


def test_unique_seeds_give_every_rank_step_and_micro_step_its_own_mask() -> None:
    found = [mask for ranks in RANKS for mask in masks("unique", *ranks)]
    assert len(set(found)) == len(found) == len(RANKS) * STEPS * MICRO_STEPS
    assert masks("unique", 1, 1, seed=1235)[0] not in found


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_shared_seeds_give_all_data_ranks_the_masks_of_rank_0_and_tensor_ranks_their_own(tp_rank: int) -> None:
    assert masks("shared", 0, tp_rank) == masks("shared", 1, tp_rank) == masks("unique", 0, tp_rank)
    assert not set(masks("shared", 0, 0)) & set(masks("shared", 0, 1))


def hidden_keys(dropout_seeds: str, dp_rank: int, micro_batch: int, first_sample: int | None) -> list[int]:
    """The dropout keys of 3 samples on one of two data ranks, in a run with 2 micro-batches per step.

    Args:
        first_sample: number of the first in the run; None for a user's loader, which has no numbers.
    """
    module = GPTModule(small_config("gpt"), dropout_seeds=dropout_seeds)
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(total_batch_idx=micro_batch))
    parallel = ParallelContext(dp_rank=dp_rank, dp_size=2)
    module._trainer = SimpleNamespace(
        strategy=SimpleNamespace(parallel=parallel), accumulate_grad_batches=MICRO_STEPS, fit_loop=loop
    )
    batch = {"tokens": torch.zeros(3, 5, dtype=torch.int64)}
    if first_sample is not None:
        batch["sample_numbers"] = torch.arange(first_sample, first_sample + 3)
    return module.dropout_keys(batch, 0).tolist()


def test_a_users_loader_gives_every_sample_of_a_run_its_own_key() -> None:
    found = [key for rank in (0, 1) for index in range(5) for key in hidden_keys("unique", rank, index, None)]
    assert len(set(found)) == len(found) == 2 * 5 * 3
    assert found[:3] == hidden_keys("unique", 0, 0, first_sample=0)  # numbered from 0, as by our loader
    assert found[-3:] == hidden_keys("unique", 1, 0, first_sample=(4 * 2 + 1) * 3)


def test_shared_seeds_give_all_data_ranks_the_keys_of_the_samples_at_the_same_place_on_rank_0() -> None:
    numbers = range(24, 24 + 2 * MICRO_STEPS * 3, 3)  # of a step's micro-batches: those of rank 0, then those of rank 1
    for index in range(MICRO_STEPS):
        own, first = numbers[MICRO_STEPS + index], numbers[index]
        assert (
            hidden_keys("shared", 1, 0, own) == hidden_keys("shared", 0, 0, first) == hidden_keys("unique", 0, 0, first)
        )
        assert hidden_keys("unique", 1, 0, own) != hidden_keys("unique", 1, 0, first)
        assert hidden_keys("shared", 1, index, None) == hidden_keys("shared", 0, index, None)
