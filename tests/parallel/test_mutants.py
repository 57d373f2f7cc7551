"""Historic bugs of tensor parallelism, reintroduced: the comparison with one process must detect each."""

import pytest
import sharding
import torch.nn.functional as F
from ranks import make_context, run_ranks
from sharding import differences_from_plain, small_config

from lmscale.parallel import Communicator, ShardSpec, chunked_cross_entropy, global_gradient_norm, layers

BOUND = 1e-12
DETECTED = 1e-4


def f_without_all_reduce() -> None:
    """f leaves the input gradient partial."""
    Communicator.begin_all_reduce = lambda self, x: lambda: x


def row_bias_before_g() -> None:
    """The bias is added before the all-reduce, once per rank."""

    def forward(self, x):
        return layers.reduce_from_tensor_parallel_region(F.linear(x, self.weight, self.bias), self.context)

    layers.RowParallelLinear.forward = forward


def replicated_counted_on_every_rank() -> None:
    """LayerNorms and row biases count tp_size times in the norm."""
    ShardSpec.replicated = property(lambda spec: False)


def norm_of_parameters() -> None:
    """The clipping of 2020 took the norm of the wrong tensors."""

    def norm(parameters, context, device):
        parameters = list(parameters)
        for param in parameters:
            param.grad = param.detach()
        return global_gradient_norm(parameters, context, device)

    sharding.global_gradient_norm = norm


def tied_projection_without_f() -> None:
    """The input gradient of the output projection covers only this rank's part of the vocabulary."""
    chunked_cross_entropy.copy_to_tensor_parallel_region = lambda x, context: x


def target_score_not_reduced() -> None:
    """Only the rank that owns the target has its logit."""
    statistics = chunked_cross_entropy._statistics

    def with_local_target(logits, labels, context, compiled):
        log_total, _, column, elsewhere = statistics(logits, labels, context, compiled)
        own = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1)
        return log_total, own.masked_fill(elsewhere, 0.0), column, elsewhere

    chunked_cross_entropy._statistics = with_local_target


MUTANTS = {
    f_without_all_reduce: "gradients",
    row_bias_before_g: "loss",
    replicated_counted_on_every_rank: "norm",
    norm_of_parameters: "norm",
    tied_projection_without_f: "gradients",
    target_score_not_reduced: "loss",
}


def _compare(rank: int, mutate) -> dict[str, float]:
    context = make_context(tp_size=2)
    if mutate is not None:
        mutate()
    return differences_from_plain(small_config("gpt"), context)


def test_the_correct_code_equals_one_process() -> None:
    for result in run_ranks(_compare, 2, None):
        assert all(value < BOUND for value in result.values()), result  # false for nan too


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda m: m.__name__)
def test_a_historic_bug_is_detected(mutate) -> None:
    results = run_ranks(_compare, 2, mutate)
    assert max(result[MUTANTS[mutate]] for result in results) > DETECTED, results
