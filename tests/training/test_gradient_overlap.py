"""Gradients that the optimizer sums travel during the step's last backward pass, and nothing else changes."""

import dataclasses
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from ranks import make_context, run_ranks
from runs import tiny_run
from sharding import random_batch, small_config, total_loss
from torch import nn

from lmscale import partition
from lmscale.config import ParallelConfig
from lmscale.config.training import OptimizerConfig, PrecisionConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.planner.communication import step_collectives
from lmscale.training.pretrain import prepare_job, pretrain
from lmscale.training.step import gradient_buffer
from lmscale.training.step.gradient_buffer import GradientBuffer
from lmscale.training.step.module import DTYPES, PretrainModule
from lmscale.training.step.optimizer import MixedPrecisionAdamW

PIECE = 1000  # elements; the small models have some 18,000
KINDS = [("bf16", False), ("fp16", False), ("bf16", True), ("fp32", True)]  # type, zero1
MICRO_BATCHES, STEPS = 2, 3


class Line:
    """What happens on a rank, in order: every piece as it is begun, and what the caller notes."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.sent: Counter[tuple[str, int]] = Counter()
        self._begin = gradient_buffer.begin_sum_over_data_ranks

    def __enter__(self) -> "Line":
        gradient_buffer.begin_sum_over_data_ranks = self._note
        return self

    def __exit__(self, *error: object) -> None:
        gradient_buffer.begin_sum_over_data_ranks = self._begin

    def _note(self, values: torch.Tensor, context: ParallelContext, owner: int | None) -> dist.Work:
        self.events.append("piece")
        self.sent["all_reduce" if owner is None else "reduce", values.numel() * values.element_size()] += 1
        return self._begin(values, context, owner)


def train(
    architecture: str, dtype: str, context: ParallelContext, announced: bool
) -> tuple[Line, list[str], list[torch.Tensor]]:
    """Some steps of a small model on this rank's own batches; its figures, and what a checkpoint would hold."""
    model = build_model(small_config(architecture), context, seed=5, dtype=DTYPES[dtype])
    precision = PrecisionConfig(dtype, initial_loss_scale=1024.0)
    config = OptimizerConfig(lr=1e-2, max_grad_norm=None if context.zero1 else 1.0)
    optimizer = MixedPrecisionAdamW(model.named_parameters(), config, precision, context)
    found = []
    with Line() as line:
        model.transformer.layers[0].register_full_backward_pre_hook(lambda *_: line.events.append("layer 0"))
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro_step in range(MICRO_BATCHES):
                if announced and micro_step == MICRO_BATCHES - 1:
                    optimizer.start_grad_sync()
                batch = random_batch(model.config, seed=100 * context.dp_rank + 10 * step + micro_step)
                loss = total_loss(model, batch)
                overflows = dtype == "fp16" and (context.dp_rank, step, micro_step) == (1, 0, 1)
                (loss * (optimizer.loss_scale.value / 100) * (1e9 if overflows else 1.0)).backward()
                line.events.append("end of a backward pass")
                found.append(repr(loss.item()))
            optimizer.reduce_gradients()
            optimizer.step()
            line.events.append("end of a step")
            found.append(f"{optimizer.grad_norm!r}, {optimizer.num_skipped} skipped")
    return line, found, list(optimizer.tensors().values())


def _train_both_ways(plain: ParallelContext) -> dict:
    """Every kind of run, with and without the announcement: whether the bits agree, and the announced run's line."""
    partition.PIECE_ELEMENTS = PIECE
    results = {}
    for architecture in ("gpt", "bert"):
        for dtype, zero1 in KINDS:
            context = dataclasses.replace(plain, zero1=zero1)
            (line, *during), (_, *after) = (
                train(architecture, dtype, context, announced) for announced in (True, False)
            )
            same = all(torch.equal(a, b) for a, b in zip(during[1], after[1], strict=True))
            results[architecture, dtype, zero1] = line.events, line.sent, during[0], after[0], same
    return results


NUM_PARAMETERS, LENGTH = 6, 40


def _sum_toys(rank: int, plain: ParallelContext) -> dict:
    """Six parameters of which each rank uses some, in its own order, a piece for each half of one."""
    partition.PIECE_ELEMENTS = LENGTH // 2
    forward, results = list(range(NUM_PARAMETERS)), {}
    cases = {
        "in opposite orders": (forward, forward[::-1]),
        "but one": ([0, 1, 2, 4, 5], forward),
        "none": ([], forward),
    }
    for zero1 in (False, True):
        parameters = [nn.Parameter(torch.ones(LENGTH, dtype=torch.bfloat16)) for _ in forward]
        buffer = GradientBuffer(parameters, dataclasses.replace(plain, zero1=zero1))
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
            mine = [i for i in forward if buffer.owners is None or buffer.owners[i] == rank]
            sums = {index: buffer.views[index].unique().tolist() for index in mine}
            results[zero1, name] = list(came), sums
    return results


def _work(rank: int) -> tuple[dict, dict]:
    context = make_context(1, 2)
    return _train_both_ways(context), _sum_toys(rank, context)


@pytest.fixture(scope="module")
def by_rank() -> list[tuple[dict, dict]]:
    """Of two data ranks: what the small models did, what the toys did."""
    return run_ranks(_work, 2)


RUNS = pytest.mark.parametrize(("architecture", "kind"), [(a, k) for a in ("gpt", "bert") for k in KINDS])


@RUNS
def test_a_run_that_sends_during_the_backward_pass_is_the_run_that_sends_after_it(by_rank, architecture, kind) -> None:
    """Losses, norms, overflows, weights and moments, to the bit."""
    for results, _ in by_rank:
        _, _, during, after, same = results[architecture, *kind]
        assert during == after and same
        assert during[-1].endswith("1 skipped" if kind[0] == "fp16" else "0 skipped")  # only rank 1 saw the overflow


@RUNS
def test_pieces_are_sent_before_the_first_layer_goes_backward_and_in_the_last_micro_batch_alone(
    by_rank, architecture, kind
) -> None:
    for results, _ in by_rank:
        events = results[architecture, *kind][0]
        for _ in range(STEPS):
            end = events.index("end of a step")
            step, events = events[:end], events[end + 1 :]
            first_pass = step[: step.index("end of a backward pass") + 1]
            last_pass = step[len(first_pass) :]
            assert "piece" not in first_pass
            assert last_pass.index("piece") < last_pass.index("layer 0")
            assert last_pass[-1] == "end of a backward pass"  # nothing was left to send
    assert events == []


@RUNS
def test_the_pieces_are_those_of_the_planner(by_rank, monkeypatch, architecture, kind) -> None:
    monkeypatch.setattr(partition, "PIECE_ELEMENTS", PIECE)
    dtype, zero1 = kind
    sent = by_rank[0][0][architecture, dtype, zero1][1]
    formula = step_collectives(small_config(architecture), ParallelConfig(dp_size=2, zero1=zero1), 5, 2, 13, dtype)
    expected = {(c.kind, c.num_bytes): STEPS * c.count for c in formula if c.phase == "gradients"}
    assert sent == expected and sent.total() > 10 * STEPS


def test_ranks_whose_gradients_come_in_other_orders_or_not_at_all_add_the_same_pieces(by_rank) -> None:
    """One that does not come holds up the pieces after it, never the rank."""
    ranks = [toys for _, toys in by_rank]
    for zero1 in (False, True):
        orders = [found[zero1, "in opposite orders"][0] for found in ranks]
        assert orders[0] == orders[1][::-1] and len(orders[0]) == NUM_PARAMETERS
        assert len(ranks[0][zero1, "but one"][0]) == NUM_PARAMETERS - 1
        for name, missing in {"in opposite orders": [], "but one": [3], "none": range(NUM_PARAMETERS)}.items():
            for found in ranks:
                for index, sums in found[zero1, name][1].items():
                    assert sums == [(2.0 if index in missing else 3.0) * (index + 1)], (zero1, name, index)
        held = sorted(index for found in ranks for index in found[zero1, "none"][1])
        assert held == sorted(list(range(NUM_PARAMETERS)) * (1 if zero1 else 2))


def test_a_second_backward_pass_after_the_last_is_a_mistake() -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    buffer = GradientBuffer([param], ParallelContext())
    for _ in range(2):  # each step may have one
        buffer.start_grad_sync()
        param.sum().backward()
        buffer.reduce()
    buffer.start_grad_sync()
    param.sum().backward()
    with pytest.raises(AssertionError, match="after its piece may have been sent"):
        param.sum().backward()


def test_a_run_announces_its_last_micro_batch_and_only_that(tmp_path, monkeypatch) -> None:
    line = []

    def note(owner: type, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (line.append(name), original(*args))[1])

    note(MixedPrecisionAdamW, "start_grad_sync")
    note(MixedPrecisionAdamW, "reduce_gradients")
    note(PretrainModule, "backward")
    run = tiny_run("gpt", tmp_path, precision__dtype="bf16", micro_batch_size=2, global_batch_size=6)
    assert pretrain(prepare_job(run)) == 0
    assert line == 3 * ["backward", "backward", "start_grad_sync", "backward", "reduce_gradients"]
