"""A step on one of several ranks: masks of attention dropout, other keys, what divides its loss, the learning rate."""

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from sharding import small_config

from lmscale.parallel import ParallelContext, seed_rank_generator
from lmscale.runtime.ranks import Ranks
from lmscale.training.module import GPTModule

RANKS = list(itertools.product((0, 1), (0, 1)))  # (dp_rank, tp_rank)
STEP = "lmscale.training.step.training_module"
STEPS, MICRO_STEPS = 3, 2


class FakeOptimizer:
    """Notes the calls of a step in their order, also those that a schedule gets."""

    def __init__(self, calls: list[str]) -> None:
        self.counters = SimpleNamespace(loss_scale=1.0, read=lambda: calls.append("read"))
        self.param_groups = [{"lr": 0.5}]
        for name in ("zero_grad", "start_grad_sync", "reduce_gradients", "check", "step"):
            setattr(self, name, lambda name=name: calls.append(name))


def masks(dropout_seeds: str, dp_rank: int, tp_rank: int, seed: int = 1234, stage: int = 0) -> list[tuple[float, ...]]:
    """What a forward pass on this rank draws from torch's generator, one entry per micro-batch of the run."""
    drawn = []

    class Drawing(GPTModule):
        optimizer = FakeOptimizer([])
        device = torch.device("cpu")

        def lr_schedulers(self) -> FakeOptimizer:
            return self.optimizer

        def loss_sums(self, batch: dict, sample_keys: torch.Tensor) -> torch.Tensor:
            drawn.append(tuple(torch.rand(8).tolist()))
            return torch.ones(1, requires_grad=True)

    module = Drawing(small_config("gpt"), seed=seed, dropout_seeds=dropout_seeds)
    pipeline = {"pp_rank": stage, "pp_size": 1 + stage}
    context = ParallelContext(tp_rank=tp_rank, tp_size=2, dp_rank=dp_rank, dp_size=2, **pipeline)
    module._trainer = SimpleNamespace(strategy=SimpleNamespace(parallel=context, ranks=Ranks()))
    batch = {"tokens": torch.zeros(2, 5, dtype=torch.int64), "labels": torch.zeros(2, 5, dtype=torch.int64)}
    batch["dropout_numbers"] = torch.arange(2)
    with (
        torch.random.fork_rng(),
        mock.patch(f"{STEP}.sum_over_data_ranks", lambda x, _: x),
        mock.patch("lmscale.training.module.sum_over_data_ranks", lambda x, _: x),
        mock.patch(f"{STEP}.sum_over_stages", lambda x, _: x),
        mock.patch(f"{STEP}.run_pipeline", lambda batch, forward, *_: [forward(*x, None) for x in enumerate(batch)]),
    ):
        for step in range(STEPS):
            module.completed_steps = step
            module.training_step([batch] * MICRO_STEPS, 0)
            assert not module.step_terms.requires_grad  # it would keep the graphs of all micro-batches
    return drawn


def test_unique_seeds_give_every_rank_step_and_micro_step_its_own_mask() -> None:
    found = [mask for ranks in RANKS for mask in masks("unique", *ranks)]
    assert len(set(found)) == len(found) == len(RANKS) * STEPS * MICRO_STEPS
    assert masks("unique", 1, 1, seed=1235)[0] not in found
    assert not set(masks("unique", 1, 1, stage=1)) & set(found)
    with torch.random.fork_rng():
        for index, mask in enumerate(masks("unique", 1, 0)):
            seed_rank_generator(1234, 1 + index // MICRO_STEPS, index % MICRO_STEPS, dp_rank=1, tp_rank=0)
            assert mask == tuple(torch.rand(8).tolist())


def module_on(dp_rank: int, step: int = 0, dropout_seeds: str = "unique") -> GPTModule:
    """A module before a step, counted from 0, on one of two data ranks."""
    module = GPTModule(small_config("gpt"), dropout_seeds=dropout_seeds, micro_batch_size=2)
    module._trainer = SimpleNamespace(
        training=True, predicting=False, strategy=SimpleNamespace(parallel=ParallelContext(dp_rank=dp_rank, dp_size=2))
    )
    module.completed_steps = step
    return module


def hidden_keys(
    dropout_seeds: str, dp_rank: int, step: int, first_sample: int | None, num_samples: int = 3
) -> list[int]:
    """The dropout keys of a rank's samples of a step.

    Args:
        first_sample: number of the first in the run; None for a user's loader, which has no numbers.
    """
    batch = dict.fromkeys(("tokens", "labels"), torch.zeros(num_samples, 5, dtype=torch.int64))
    if first_sample is not None:
        batch["sample_numbers"] = torch.arange(first_sample, first_sample + num_samples)
    module = module_on(dp_rank, step, dropout_seeds)
    return [key for micro in module.prepare_batch(batch) for key in module.dropout_keys(micro).tolist()]


@pytest.mark.parametrize("sizes", [(3, 3, 3, 3, 3), (4, 4, 2, 1, 7)])
def test_a_users_loader_gives_every_sample_of_a_run_its_own_key(sizes: tuple[int, ...]) -> None:
    found = [
        key
        for rank in (0, 1)
        for index, size in enumerate(sizes)
        for key in hidden_keys("unique", rank, index, None, size)
    ]
    assert len(set(found)) == len(found) == 2 * sum(sizes)
    assert found[:3] == hidden_keys("unique", 0, 0, first_sample=0)  # numbered from 0, as by our loader


def test_shared_seeds_give_all_data_ranks_the_keys_of_the_samples_at_the_same_place_on_rank_0() -> None:
    own, first = 24 + 3, 24  # three samples of rank 0, then three of rank 1
    assert hidden_keys("shared", 1, 0, own) == hidden_keys("shared", 0, 0, first) == hidden_keys("unique", 0, 0, first)
    assert hidden_keys("unique", 1, 0, own) != hidden_keys("unique", 1, 0, first)
    assert hidden_keys("shared", 1, 4, None) == hidden_keys("shared", 0, 4, None)


def test_a_loss_is_divided_by_the_counts_of_all_data_ranks_or_by_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{STEP}.sum_over_data_ranks", lambda x, context: x.mul_(context.dp_size))
    module = module_on(dp_rank=1)
    some, none = {"labels": torch.tensor([[7, 2, -100]])}, {"labels": torch.tensor([[-100, -100, -100]])}
    some, none = map(module.loss_counts, (some, none))
    assert module._denominators([some, some, none]) == [8, 8, 8]
    assert module._denominators([none]) == [1]  # nothing scored in the whole step: the loss is 0, not nan
    module.loss_reduction = "mean_of_means"
    assert module._denominators([some, some, none]) == [2 * 6, 2 * 6, 1 * 6]


def test_a_steps_calls_come_in_their_order() -> None:
    """The rate is set after the last step's counters are known, which on a GPU they only then are, and before the
    update; the sums over the data ranks are announced before the last backward pass."""
    calls = []

    class Recording(GPTModule):
        optimizer, device = FakeOptimizer(calls), torch.device("cpu")

        def loss_sums(self, batch: dict, sample_keys: torch.Tensor) -> torch.Tensor:
            loss = torch.ones(1, requires_grad=True)
            loss.register_hook(lambda gradient: calls.append("backward"))
            return loss

        def lr_schedulers(self) -> FakeOptimizer:
            return self.optimizer

    module = Recording(small_config("gpt"))
    module._trainer = SimpleNamespace(strategy=SimpleNamespace(parallel=ParallelContext()))
    batch = {"labels": torch.ones(2, 5, dtype=torch.int64), "dropout_numbers": torch.arange(2)}
    with torch.random.fork_rng(), mock.patch(f"{STEP}.UpdateSchedule", FakeOptimizer):
        loss = module.training_step([batch] * 3, 0)
    assert calls == [
        *("zero_grad", "backward", "backward", "start_grad_sync", "backward"),
        *("reduce_gradients", "read", "check", "step"),
    ]
    assert loss == pytest.approx(3 / 30) and module.step_lr == 0.5
