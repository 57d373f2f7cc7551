"""A compiled step of a whole model on one of several tensor ranks: how many graphs torch.compile makes of it.

A fake process group sends nothing, so the losses mean nothing.
"""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from ranks import fake_world
from sharding import compiler, random_batch, small_config, total_loss
from torch._dynamo.utils import counters

from lmscale.config import Layout
from lmscale.kernels import Kernels
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.planner.communication import micro_batch_collectives
from lmscale.planner.workload import Workload

KINDS = {"all_reduce": "all_reduce", "all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}


@pytest.fixture(params=[False, True], ids=["plain", "sequence_parallel"])
def last_of_four(request) -> Iterator[ParallelContext]:
    torch._dynamo.reset()
    counters.clear()
    with fake_world(3, 4):
        yield ParallelContext(tp_rank=3, tp_size=4, tp_group=dist.group.WORLD, sequence_parallel=request.param)


@pytest.mark.parametrize("hidden_dropout", [0.0, pytest.param(0.1, marks=pytest.mark.slow)])
def test_a_compiled_layer_is_recomputed_to_its_end(last_of_four, hidden_dropout: float) -> None:
    """Without dropout an eager one is not: torch's checkpoint stops before the last collective."""
    sizes = {"num_layers": 1, "hidden_dropout": hidden_dropout, "max_position_embeddings": 16, "recompute": "full"}
    config = small_config("gpt", **sizes)
    model = build_model(config, last_of_four, seed=3, dtype=torch.float32)
    model.transformer.layers[0].compile(backend="aot_eager")
    batch = random_batch(config, seed=3)
    total_loss(model, batch).backward()  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        total_loss(model, batch).backward()
    layout = Layout(tp_size=4, sequence_parallel=last_of_four.sequence_parallel)
    b, s = batch["tokens"].shape
    planned = Counter()
    for sent in micro_batch_collectives(Workload(config, b, b, s, "fp32"), layout):
        planned[KINDS[sent.kind]] += sent.count
    found = Counter(event.name.removeprefix("_c10d_functional::") for event in profile.events())
    assert {kind: found[kind] for kind in planned} == planned


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", [pytest.param("gpt", marks=pytest.mark.slow), "bert"])
def test_steps_of_a_model_compile_one_layer_and_two_passes_over_the_logits(
    last_of_four, family: str, backend: str
) -> None:
    config = small_config(family, num_layers=3, hidden_dropout=0.1, max_position_embeddings=16)
    kernels = Kernels(compiles=True)
    model = build_model(config, last_of_four, seed=3, dtype=torch.float32, kernels=kernels)
    with compiler(backend):
        for seed in (3, 4):
            total_loss(model, random_batch(config, seed=seed)).backward()
    # All three layers are one graph; the embedding and the collectives of the loss stay outside.
    assert (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())) == (4, 0)
