"""Gradient buckets, against torch's DDP and the order of real backward passes."""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist
from collective_trace import _micro_batch_loss
from paper_models import SIZES, paper_model
from sharding import random_batch, random_model, small_config, total_loss
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from lmscale.config import Layout, TransformerConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.partition import PIECE_ELEMENTS
from lmscale.planner.communication import BUCKET_BYTES, FIRST_BUCKET_BYTES, gradient_pieces, step_collectives
from lmscale.planner.params import count_parameters, parameter_sizes


@pytest.fixture
def world():
    """A context of 2 tensor and 3 data ranks with a fake process group."""
    dist.init_process_group("fake", rank=0, world_size=6, store=FakeStore())
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("data", "tensor"))
    groups = {"tp_group": mesh.get_group("tensor"), "dp_group": mesh.get_group("data")}
    yield ParallelContext(tp_size=2, dp_size=3, **groups)
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["gpt_1.2b", "bert_1.3b"])
@pytest.mark.parametrize("norm_order", ["pre", "post"])
def test_the_gradient_order_is_that_of_a_real_backward_pass(world, name, norm_order) -> None:
    config = paper_model(name, num_layers=2, norm_order=norm_order)
    for recompute, context in itertools.product(("none", "full"), (world, ParallelContext())):
        order = []
        with FakeTensorMode():
            changed = dataclasses.replace(config, recompute=recompute)
            model = build_model(changed, context, seed=None, dtype=torch.bfloat16)
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(lambda param, order=order: order.append(param.numel()))
            _micro_batch_loss(model, 1, config.max_position_embeddings).backward()
        assert order == parameter_sizes(config, context.tp_size), recompute


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_the_buckets_of_the_papers_models_equal_torchs(name: str, dtype: str) -> None:
    config, kind = paper_model(name), {"fp32": torch.float32, "fp64": torch.float64}[dtype]
    tensors = [torch.empty(n, dtype=kind, device="meta") for n in parameter_sizes(config, 4)]
    assigned, _ = dist._compute_bucket_assignment_by_size(tensors, [FIRST_BUCKET_BYTES, BUCKET_BYTES])
    theirs = [sum(tensors[i].numel() for i in bucket) * kind.itemsize for bucket in assigned]
    assert gradient_pieces(config, 4, dtype) == theirs
    assert sum(theirs) == kind.itemsize * count_parameters(config, 4).per_rank


SMALL = {"hidden_size": 192, "ffn_hidden_size": 768, "vocab_size": 5000, "num_layers": 17}


@pytest.mark.parametrize("config", [small_config("gpt", **SMALL), small_config("bert", norm_order="post", **SMALL)])
def test_ddp_uses_these_buckets_from_the_second_step_on(world, config: TransformerConfig) -> None:
    model, batch, sent = random_model(config, world), random_batch(config), []

    def note(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent.append(bucket.buffer().numel() * bucket.buffer().element_size())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped = DistributedDataParallel(model, process_group=world.dp_group, gradient_as_bucket_view=True)
    wrapped.config = config
    wrapped.register_comm_hook(None, note)
    for step in range(3):
        sent.clear()
        total_loss(wrapped, batch).backward()
        pieces = gradient_pieces(config, 2, "fp64")
        assert sent == (pieces if step else [sum(pieces)])
    assert len(sent) > 2
    found = step_collectives(config, Layout(tp_size=2, dp_size=3), 2, 1, 12, "fp64")
    assert sorted(sent) == sorted(c.num_bytes for c in found if c.group == "data" for _ in range(c.count))


def test_half_types_are_sent_in_the_optimizers_pieces() -> None:
    config = paper_model("gpt_8.3b")
    *whole, rest = gradient_pieces(config, 8, "bf16")
    assert set(whole) == {4 * PIECE_ELEMENTS} and 0 < rest < whole[0]
    assert sum(whole) + rest == 4 * count_parameters(config, 8).per_rank
