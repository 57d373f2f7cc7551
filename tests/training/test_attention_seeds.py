"""Attention dropout (`model.attention=sdpa`): which ranks, steps and micro-steps draw which masks."""

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
            return torch.ones(1, dtype=torch.float64)

    module = Drawing(small_config("gpt"), seed=seed, dropout_seeds=dropout_seeds)
    context = ParallelContext(tp_rank=tp_rank, tp_size=2, dp_rank=dp_rank, dp_size=2)
    module._trainer = SimpleNamespace(strategy=SimpleNamespace(parallel=context), accumulate_grad_batches=MICRO_STEPS)
    batch = {"tokens": torch.zeros(2, 5, dtype=torch.int64), "labels": torch.zeros(2, 5, dtype=torch.int64)}
    with torch.random.fork_rng():
        for step in range(STEPS):
            module.on_load_checkpoint({"global_step": step})
            for _ in range(MICRO_STEPS):
                module.training_step(batch | {"sample_numbers": torch.arange(2)}, 0)
    return drawn


def test_unique_seeds_give_every_rank_step_and_micro_step_its_own_mask() -> None:
    found = [mask for ranks in RANKS for mask in masks("unique", *ranks)]
    assert len(set(found)) == len(found) == len(RANKS) * STEPS * MICRO_STEPS
    assert masks("unique", 1, 1, seed=1235)[0] not in found


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_shared_seeds_give_all_data_ranks_the_masks_of_rank_0_and_tensor_ranks_their_own(tp_rank: int) -> None:
    assert masks("shared", 0, tp_rank) == masks("shared", 1, tp_rank) == masks("unique", 0, tp_rank)
    assert not set(masks("shared", 0, 0)) & set(masks("shared", 0, 1))
