"""A micro-batch on one of several ranks: masks of attention dropout, other keys, what divides its loss; an update."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from sharding import small_config

from lmscale.parallel import ParallelContext, seed_rank_generator
from lmscale.training.module import GPTModule

RANKS = list(itertools.product((0, 1), (0, 1)))  # (dp_rank, tp_rank)
STEPS, MICRO_STEPS = 3, 2


def masks(dropout_seeds: str, dp_rank: int, tp_rank: int, seed: int = 1234) -> list[tuple[float, ...]]:
    """What a forward pass on this rank draws from torch's generator, one entry per micro-batch of the run."""
    drawn, synchronized = [], []

    class Drawing(GPTModule):
        is_last_micro_batch = property(lambda self: self._micro_step == MICRO_STEPS)
        optimizer = SimpleNamespace(start_grad_sync=lambda: synchronized.append(len(drawn)))
        device = torch.device("cpu")

        def loss_sums(self, batch: dict, sample_keys: torch.Tensor) -> torch.Tensor:
            drawn.append(tuple(torch.rand(8).tolist()))
            return torch.ones(1, requires_grad=True)

    module = Drawing(small_config("gpt"), seed=seed, dropout_seeds=dropout_seeds)
    context = ParallelContext(tp_rank=tp_rank, tp_size=2, dp_rank=dp_rank, dp_size=2)
    module._trainer = SimpleNamespace(strategy=SimpleNamespace(parallel=context), accumulate_grad_batches=MICRO_STEPS)
    batch = {"tokens": torch.zeros(2, 5, dtype=torch.int64), "labels": torch.zeros(2, 5, dtype=torch.int64)}
    with torch.random.fork_rng():
        for step in range(STEPS):
            module.on_load_checkpoint({"global_step": step})
            module.on_train_epoch_start()
            for _ in range(MICRO_STEPS):
                loss = module.training_step(batch | {"sample_numbers": torch.arange(2)}, 0)
                assert loss.dtype == torch.float32  # of the sums; the counts are fp64
            assert not module.step_terms.requires_grad  # it would keep the graphs of all micro-batches
    assert synchronized == list(range(MICRO_STEPS - 1, STEPS * MICRO_STEPS, MICRO_STEPS))  # before the last of a step
    return drawn


def test_unique_seeds_give_every_rank_step_and_micro_step_its_own_mask() -> None:
    found = [mask for ranks in RANKS for mask in masks("unique", *ranks)]
    assert len(set(found)) == len(found) == len(RANKS) * STEPS * MICRO_STEPS
    assert masks("unique", 1, 1, seed=1235)[0] not in found
    with torch.random.fork_rng():
        for index, mask in enumerate(masks("unique", 1, 0)):
            seed_rank_generator(1234, 1 + index // MICRO_STEPS, index % MICRO_STEPS, dp_rank=1, tp_rank=0)
            assert mask == tuple(torch.rand(8).tolist())


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_shared_seeds_give_all_data_ranks_the_masks_of_rank_0_and_tensor_ranks_their_own(tp_rank: int) -> None:
    assert masks("shared", 0, tp_rank) == masks("shared", 1, tp_rank) == masks("unique", 0, tp_rank)
    assert not set(masks("shared", 0, 0)) & set(masks("shared", 0, 1))


def module_on(dp_rank: int, micro_batch: int, dropout_seeds: str = "unique") -> GPTModule:
    """A module before a micro-batch, counted over the run, on one of two data ranks."""
    module = GPTModule(small_config("gpt"), dropout_seeds=dropout_seeds)
    module._trainer = SimpleNamespace(
        strategy=SimpleNamespace(parallel=ParallelContext(dp_rank=dp_rank, dp_size=2)),
        accumulate_grad_batches=MICRO_STEPS,
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(total_batch_idx=micro_batch)),
    )
    return module


def hidden_keys(
    dropout_seeds: str, dp_rank: int, micro_batch: int, first_sample: int | None, num_samples: int = 3
) -> list[int]:
    """The dropout keys of some samples.

    Args:
        first_sample: number of the first in the run; None for a user's loader, which has no numbers.
    """
    batch = {"tokens": torch.zeros(num_samples, 5, dtype=torch.int64)}
    if first_sample is not None:
        batch["sample_numbers"] = torch.arange(first_sample, first_sample + num_samples)
    return module_on(dp_rank, micro_batch, dropout_seeds).dropout_keys(batch, 0).tolist()


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
    numbers = range(24, 24 + 2 * MICRO_STEPS * 3, 3)  # of a step's micro-batches: those of rank 0, then those of rank 1
    for index in range(MICRO_STEPS):
        own, first = numbers[MICRO_STEPS + index], numbers[index]
        assert (
            hidden_keys("shared", 1, 0, own) == hidden_keys("shared", 0, 0, first) == hidden_keys("unique", 0, 0, first)
        )
        assert hidden_keys("unique", 1, 0, own) != hidden_keys("unique", 1, 0, first)
        assert hidden_keys("shared", 1, index, None) == hidden_keys("shared", 0, index, None)


def test_keys_and_sums_are_on_the_device_of_the_module() -> None:
    module = module_on(dp_rank=1, micro_batch=3)
    module._device = torch.device("meta")
    batch = {"tokens": torch.zeros(3, 5, dtype=torch.int64, device="meta")}
    module._start_step(batch)
    assert {x.device.type for x in (module.dropout_keys(batch, 0), module.step_terms)} == {"meta"}


def test_a_loss_is_divided_by_the_counts_of_all_data_ranks_or_by_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmscale.training.step.module.sum_over_data_ranks", lambda x, context: x.mul_(context.dp_size))
    module = module_on(dp_rank=1, micro_batch=0)
    module._device = torch.device("cpu")
    for own, total in ((3.0, 6.0), (0.0, 1.0)):  # nothing scored in the whole step: the loss is 0, not nan
        counts = torch.tensor([own], dtype=torch.float64)
        module._start_step({"step_counts": counts})
        assert (module._denominators({}).tolist(), counts.tolist()) == ([total], [own])
    module.loss_reduction = "mean_of_means"
    labels = torch.tensor([[7, 2, -100]])
    module._start_step({"step_counts": torch.ones(1), "labels": labels})
    assert module._denominators({"labels": labels}).tolist() == [2 * MICRO_STEPS * 2]
    assert module._denominators({"labels": labels.fill_(-100)}).tolist() == [1 * MICRO_STEPS * 2]


def test_the_rate_is_set_after_the_last_steps_counters_are_known_and_before_the_update() -> None:
    calls = []

    class Recording(GPTModule):
        optimizer = SimpleNamespace(
            reduce_gradients=lambda: calls.append("reduce"),
            counters=SimpleNamespace(read=lambda: calls.append("read")),  # on a GPU the host knows them only then
        )

        def lr_schedulers(self) -> SimpleNamespace:
            return SimpleNamespace(step=lambda: calls.append("schedule"))

    def step(closure: Callable[[], None]) -> None:
        closure()
        calls.append("update")

    module = Recording(small_config("gpt"))
    module._step_counts = torch.ones(1)
    module._trainer = SimpleNamespace(accumulate_grad_batches=1)
    module.optimizer_step(0, 0, SimpleNamespace(step=step), lambda: calls.append("backward"))
    assert calls == ["backward", "reduce", "read", "schedule", "update"] and module.completed_steps == 1
