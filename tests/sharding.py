"""Compare a sharded model with a plain one that has the same logical weights."""

import dataclasses
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import torch
from torch import Tensor, nn

from lmscale.config import TransformerConfig
from lmscale.models import build_model
from lmscale.parallel import (
    ParallelContext,
    ShardSpec,
    global_gradient_norm,
    initialize_parameters,
    sample_dropout_keys,
    sync_replicated_gradients,
)

SMALL = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "vocab_size": 99,
    "vocab_multiple": 8,
    "max_position_embeddings": 13,
}
# Of `small_config`, with other factors than 1.
COMPLETEP = {"parametrization": "completep", "base_hidden_size": 6, "base_num_layers": 1, "base_head_size": 3}


def small_config(family: str, **changes) -> TransformerConfig:
    """A tiny model with odd sizes; no dropout by default."""
    values = {"hidden_dropout": 0.0, "attention_dropout": 0.0} | SMALL | changes
    return TransformerConfig(family=family, **values)


def compiler(backend: str) -> AbstractContextManager:
    """Compile with another backend, which gets the same graphs; Inductor takes 20 s to generate their code."""
    if backend == "inductor":
        return nullcontext()
    from torch._inductor import compile_fx  # takes seconds, which few tests need

    compile_graph = torch._dynamo.lookup_backend(backend)
    return mock.patch.object(compile_fx, "compile_fx", lambda graph, inputs, **_: compile_graph(graph, inputs))


def random_model(config: TransformerConfig, context: ParallelContext, seed: int = 7) -> nn.Module:
    """An fp64 model with all parameters random, including biases and LayerNorms, so that none hides an error."""
    model = build_model(config, context, seed=None, dtype=torch.float64)
    for param in model.parameters():
        param.shard = dataclasses.replace(param.shard, init="normal", std=0.3)
    initialize_parameters(model, seed, context)
    return model


def random_batch(config: TransformerConfig, batch_size: int = 5, seed: int = 3) -> dict[str, Tensor]:
    """Tokens and labels (some not scored); for BERT also token types, padding and order labels."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch_size, config.max_position_embeddings)
    batch = {
        "tokens": torch.randint(0, config.vocab_size, shape, generator=generator),
        "labels": torch.randint(0, config.vocab_size, shape, generator=generator),
        "sample_numbers": torch.arange(batch_size),
    }
    batch["labels"][torch.rand(shape, generator=generator) < 0.3] = -100
    if config.family == "bert":
        batch["token_types"] = (torch.arange(shape[1]) > 6).long().expand(shape)
        batch["attention_mask"] = torch.arange(shape[1]) < torch.tensor([13, 9, 13, 11, 7])[:batch_size, None]
        batch["sop_labels"] = torch.randint(0, 2, (batch_size,), generator=generator)
    return batch


def total_loss(model: nn.Module, batch: dict[str, Tensor], seed: int = 11) -> Tensor:
    """Summed loss of a batch, both terms for BERT."""
    keys = sample_dropout_keys(seed, batch["sample_numbers"])
    if model.config.family == "gpt":
        return model(batch["tokens"], batch["labels"], keys)
    loss, order = model(batch["tokens"], batch["token_types"], batch["attention_mask"], batch["labels"], keys)
    return loss + nn.functional.cross_entropy(order, batch["sop_labels"], reduction="sum")


def local_part(full: Tensor, param: Tensor, context: ParallelContext) -> Tensor:
    """This rank's slice of a full tensor, after whose end come the zeros of dummy heads."""
    dim = param.shard.shard_dim
    if dim is None:
        return full
    shape = list(full.shape)
    shape[dim] = param.shard.padding
    whole = torch.cat([full, full.new_zeros(shape)], dim)
    return whole.narrow(dim, context.tp_rank * param.shape[dim], param.shape[dim])


def dummy_part(tensor: Tensor, shard: ShardSpec, context: ParallelContext) -> Tensor:
    """What a rank's tensor, of the shape of a parameter, has after the end of the full one: dummy heads."""
    if shard.shard_dim is None:
        return tensor[:0]
    length = tensor.shape[shard.shard_dim]
    own = min(max(shard.full_shape[shard.shard_dim] - context.tp_rank * length, 0), length)
    return tensor.narrow(shard.shard_dim, own, length - own)


def gradients_of_ranks(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the gradients that each rank computes itself, before replicated ones take rank 0's."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if not p.shard.grad_is_partial}


def largest(values: Iterable[Tensor]) -> float:
    """The largest scalar; nan if any is nan, which Python's `max` may miss."""
    return torch.stack(list(values)).max().item()


def differences_from_plain(
    config: TransformerConfig, context: ParallelContext, batch_size: int = 5
) -> dict[str, float]:
    """Largest differences from one process on this rank: loss, every gradient, and the relative norm."""
    batch = random_batch(config, batch_size)
    plain, sharded = random_model(config, ParallelContext()), random_model(config, context)
    losses = [total_loss(model, batch) for model in (plain, sharded)]
    for loss in losses:
        loss.backward()
    own = gradients_of_ranks(sharded)
    sync_replicated_gradients(sharded.parameters(), context)
    whole = dict(plain.named_parameters())
    gradients = largest(
        (grad - local_part(whole[name].grad, param, context)).abs().max() / whole[name].grad.abs().max()
        for name, param in sharded.named_parameters()
        for grad in (param.grad, own.get(name, param.grad))
        if whole[name].grad.abs().max() > 0
    )
    weights = largest(
        (param - local_part(whole[name], param, context)).abs().max() for name, param in sharded.named_parameters()
    )
    norms = [torch.cat([param.grad.flatten() for param in plain.parameters()]).norm().item()]
    norms.append(global_gradient_norm(sharded.parameters(), context, torch.device("cpu")).norm.item())
    return {
        "weights": weights,
        "loss": abs(losses[1].item() / losses[0].item() - 1.0),
        "gradients": gradients,
        "norm": abs(norms[1] / norms[0] - 1.0),
    }


def equal_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Equal names, dtypes and bits."""
    return a.keys() == b.keys() and all(a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]) for key in a)


def count_model_parameters(config: TransformerConfig, tp_size: int = 1) -> tuple[int, int]:
    """Parameters (sharded per rank, replicated) of the real module, built on the meta device."""
    model = build_model(config, ParallelContext(tp_size=tp_size), seed=None, device="meta")
    sharded = sum(p.numel() for p in model.parameters() if not p.shard.replicated)
    replicated = sum(p.numel() for p in model.parameters() if p.shard.replicated)
    return sharded, replicated
