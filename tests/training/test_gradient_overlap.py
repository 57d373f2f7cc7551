"""Gradient communication overlaps with the last backward pass of a step and does not change the result."""

import dataclasses
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from ranks import make_context, run_ranks
from sharding import random_batch, small_config, total_loss
from torch import nn

from lmscale import partition
from lmscale.config import Layout
from lmscale.config.training import OptimizerConfig, PrecisionConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.planner import communication
from lmscale.planner.communication import step_collectives
from lmscale.planner.params import rank_buffer
from lmscale.planner.workload import Workload
from lmscale.training.step import gradient_buffer
from lmscale.training.step.gradient_buffer import GradientBuffer
from lmscale.training.step.optimizer import MixedPrecisionAdamW
from lmscale.training.step.training_module import DTYPES

PIECE = 1000  # elements; the small models have about 18,000
KINDS = [("bf16", False), ("fp16", False), ("fp64", False), ("bf16", True), ("fp32", True)]  # type, zero1
MICRO_BATCHES, STEPS = 2, 3


class Timeline:
    """Events on one rank in order: the start of every piece, and events noted by the caller."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.sent: Counter[tuple[str, int]] = Counter()
        self._begin = gradient_buffer.begin_sum_over_data_ranks

    def __enter__(self) -> "Timeline":
        gradient_buffer.begin_sum_over_data_ranks = self._note
        return self

    def __exit__(self, *error: object) -> None:
        gradient_buffer.begin_sum_over_data_ranks = self._begin

    def _note(self, values: torch.Tensor, context: ParallelContext) -> dist.Work:
        self.events.append("piece")
        self.sent["reduce_scatter" if context.zero1 else "all_reduce", values.numel() * values.element_size()] += 1
        return self._begin(values, context)


def train(dtype: str, context: ParallelContext, announced: bool) -> tuple[Timeline, list[str], list[torch.Tensor]]:
    """Train a small model on this rank's batches; returns its metrics and the state a checkpoint would hold."""
    model = build_model(small_config("bert"), context, seed=5, dtype=DTYPES[dtype])
    precision = PrecisionConfig(dtype, initial_loss_scale=1024.0)
    config = OptimizerConfig(lr=1e-2, max_grad_norm=None if context.zero1 else 1.0)
    optimizer = MixedPrecisionAdamW(model.named_parameters(), config, precision, context)
    found = []
    with Timeline() as timeline:
        model.transformer.layers[0].register_full_backward_pre_hook(lambda *_: timeline.events.append("layer 0"))
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro_step in range(MICRO_BATCHES):
                if announced and micro_step == MICRO_BATCHES - 1:
                    optimizer.start_grad_sync()
                batch = random_batch(model.config, seed=100 * context.dp_rank + 10 * step + micro_step)
                loss = total_loss(model, batch)
                overflows = dtype == "fp16" and (context.dp_rank, step, micro_step) == (1, 0, 1)
                (loss * (optimizer.counters.loss_scale / 100) * (1e9 if overflows else 1.0)).backward()
                timeline.events.append("end of a backward pass")
                found.append(repr(loss.item()))
            optimizer.reduce_gradients()
            optimizer.step()
            timeline.events.append("end of a step")
            found.append(f"{optimizer.counters.known.grad_norm!r}, {optimizer.counters.known.num_skipped} skipped")
    return timeline, found, list(optimizer.tensors().values())


def _train_both_ways(plain: ParallelContext) -> dict:
    """Train every kind with and without `start_grad_sync`; returns whether results are bitwise equal, and timelines."""
    partition.PIECE_ELEMENTS = PIECE
    results = {}
    for dtype, zero1 in KINDS:
        context = dataclasses.replace(plain, zero1=zero1)
        (timeline, *during), (_, *after) = (train(dtype, context, announced) for announced in (True, False))
        same = all(torch.equal(a, b) for a, b in zip(during[1], after[1], strict=True))
        results[dtype, zero1] = timeline.events, timeline.sent, during[0], after[0], same
    return results


NUM_PARAMETERS, LENGTH = 6, 40


def _sum_toys(rank: int, plain: ParallelContext) -> dict:
    """Six parameters; each rank uses some of them in its own order. A piece is half a parameter; ZeRO-1 cuts it in two.

    Returns:
        by case the parameters in the order of their gradients, and of each part the parameter, the number of elements
        and the different sums in it.
    """
    partition.PIECE_ELEMENTS = LENGTH * 8 // 2
    forward, results = list(range(NUM_PARAMETERS)), {}
    cases = {
        "in opposite orders": (forward, forward[::-1]),
        "but one": ([0, 1, 2, 4, 5], forward),
        "none": ([], forward),
    }
    for zero1 in (False, True):
        parameters = [nn.Parameter(torch.ones(LENGTH, 8, dtype=torch.bfloat16)) for _ in forward]
        buffer = GradientBuffer(
            dict(zip(map(str, forward), parameters, strict=True)), dataclasses.replace(plain, zero1=zero1)
        )
        came: list[int] = []
        for index, param in enumerate(parameters):
            param.register_post_accumulate_grad_hook(lambda _, came=came, index=index: came.append(index))
        for name, used in cases.items():
            came.clear()
            buffer.clear()
            buffer.start_grad_sync()
            if used[rank]:
                sum((rank + 1) * (index + 1) * parameters[index].sum() for index in used[rank]).backward()
            buffer.reduce()
            buffer.complete()  # as the optimizer's step does
            parts = zip(buffer.parts, buffer.part_views(buffer.own(buffer.flat)), strict=True)
            results[zero1, name] = (
                list(came),
                [(int(part.name), x.numel(), x.unique().tolist()) for part, x in parts],
            )
    return results


def _work(rank: int) -> tuple[dict, dict]:
    context = make_context(1, 2)
    return _train_both_ways(context), _sum_toys(rank, context)


@pytest.fixture(scope="module")
def by_rank() -> list[tuple[dict, dict]]:
    """Results of the small models and of the toy parameters on two data ranks."""
    return run_ranks(_work, 2)


RUNS = pytest.mark.parametrize("kind", KINDS)


@RUNS
def test_overlapped_communication_is_bitwise_equal_to_communication_afterwards(by_rank, kind) -> None:
    """Losses, norms, overflows, weights and moments are bitwise equal."""
    for results, _ in by_rank:
        _, _, during, after, same = results[kind]
        assert during == after and same
        assert during[-1].endswith("1 skipped" if kind[0] == "fp16" else "0 skipped")  # the overflow is on rank 1 only


@RUNS
def test_pieces_are_sent_before_the_first_layers_backward_pass_and_only_in_the_last_micro_batch(by_rank, kind) -> None:
    for results, _ in by_rank:
        events = results[kind][0]
        for _ in range(STEPS):
            end = events.index("end of a step")
            step, events = events[:end], events[end + 1 :]
            first_pass = step[: step.index("end of a backward pass") + 1]
            last_pass = step[len(first_pass) :]
            assert "piece" not in first_pass
            assert last_pass.index("piece") < last_pass.index("layer 0")
            assert last_pass[-1] == "end of a backward pass"  # nothing remained to send
    assert events == []


@RUNS
def test_the_pieces_match_the_planner(by_rank, monkeypatch, kind) -> None:
    monkeypatch.setattr(partition, "PIECE_ELEMENTS", PIECE)
    monkeypatch.setattr(communication, "rank_buffer", rank_buffer.__wrapped__)  # not one of pieces of another size
    dtype, zero1 = kind
    sent = by_rank[0][0][kind][1]
    job = Workload(small_config("bert"), 5, 20, 13, dtype, on_gpu=False)
    formula = step_collectives(job, Layout(dp_size=2, zero1=zero1))
    expected = {(c.kind, c.num_bytes): STEPS * c.count for c in formula if c.phase == "gradients"}
    assert sent == expected and sent.total() > 10 * STEPS


def test_ranks_with_gradients_in_different_order_or_missing_sum_the_same_pieces(by_rank) -> None:
    """A missing gradient delays the pieces after it but does not block the rank."""
    ranks = [toys for _, toys in by_rank]
    for zero1 in (False, True):
        orders = [found[zero1, "in opposite orders"][0] for found in ranks]
        assert orders[0] == orders[1][::-1] and len(orders[0]) == NUM_PARAMETERS
        assert len(ranks[0][zero1, "but one"][0]) == NUM_PARAMETERS - 1
        for name, missing in {"in opposite orders": [], "but one": [3], "none": range(NUM_PARAMETERS)}.items():
            for found in ranks:
                parts = found[zero1, name][1]
                assert Counter(i for i, *_ in parts) == dict.fromkeys(range(NUM_PARAMETERS), 2 if zero1 else 1)
                assert sum(size for _, size, _ in parts) == NUM_PARAMETERS * LENGTH * 8 // (2 if zero1 else 1)
                for index, _, sums in parts:
                    assert sums == [(2.0 if index in missing else 3.0) * (index + 1)], (zero1, name, index)


def test_a_backward_pass_after_the_last_one_raises() -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    buffer = GradientBuffer({"w": param}, ParallelContext())
    for _ in range(2):  # one is allowed per step
        buffer.start_grad_sync()
        param.sum().backward()
        buffer.reduce()
    buffer.start_grad_sync()
    param.sum().backward()
    with pytest.raises(AssertionError, match="after its piece may have been reduced"):
        param.sum().backward()
