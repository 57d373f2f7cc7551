"""megatron-core's GPT with its local spec (no Transformer Engine, no apex), on one device, which may be a CPU."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from analysis.benchmarks.config import BenchConfig
from lmscale.parallel import IGNORE_LABEL

from .contender import MAX_NORM, Batch, Contender


class MegatronCore(Contender):
    """`GPTModel` in fp32, or with weights in bf16 that AdamW updates directly.

    It computes in the type of its weights, and its optimizer with fp32 masters needs Transformer Engine or apex, so its
    bf16 step is less work than ours. It initializes its own weights.

    Raises:
        ValueError: megatron-core is not installed.
    """

    def __init__(self, bench: BenchConfig, device: torch.device) -> None:
        try:
            from megatron.core import parallel_state, tensor_parallel
            from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
            from megatron.core.models.gpt.gpt_model import GPTModel
            from megatron.core.transformer.transformer_config import TransformerConfig
        except ImportError as error:
            raise ValueError(
                f"`peers` must not contain megatron_core if it is not installed (pip install megatron-core): {error}"
            ) from None
        config = bench.transformer_config()
        self.is_cpu = device.type == "cpu"
        if not dist.is_initialized():
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            dist.init_process_group("gloo" if self.is_cpu else "nccl", rank=0, world_size=1, store=dist.HashStore())
        dtype = torch.float32 if bench.peers_dtype == "fp32" else torch.bfloat16
        sizes = TransformerConfig(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            hidden_dropout=config.hidden_dropout,
            attention_dropout=config.attention_dropout,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            use_cpu_initialization=self.is_cpu,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=not self.is_cpu,
            masked_softmax_fusion=not self.is_cpu and has_softmax_kernel(),
            bias_activation_fusion=not self.is_cpu,
        )
        with _no_cuda(self.is_cpu):
            parallel_state.initialize_model_parallel()
            tensor_parallel.model_parallel_cuda_manual_seed(bench.seed)
            torch.manual_seed(bench.seed)
            shape = config.padded_vocab_size, config.max_position_embeddings
            model = GPTModel(sizes, get_gpt_layer_local_spec(), *shape, share_embeddings_and_output_weights=True)
        self.model = model.to(device, dtype).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=bench.lr, weight_decay=0.01, fused=True)

    def step(self, batches: list[Batch], number: int) -> Tensor:
        self.optimizer.zero_grad()
        losses = [self._backward(batch, len(batches)) for batch in batches]
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        return sum(losses)

    def _backward(self, batch: Batch, count: int) -> Tensor:
        tokens, labels = batch["tokens"], batch["labels"]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        size = 1, 1, tokens.shape[1], tokens.shape[1]
        hidden = torch.ones(size, dtype=torch.bool, device=tokens.device).triu(1)
        is_scored = labels != IGNORE_LABEL
        with _no_cuda(self.is_cpu):
            losses = self.model(tokens, positions, hidden, labels=labels.masked_fill(~is_scored, 0))
            loss = (losses.float() * is_scored).sum() / is_scored.sum() / count
            loss.backward()
        return loss.detach()


def has_softmax_kernel() -> bool:
    """Whether the fused softmax is installed, which is part of apex, not of megatron-core."""
    kernels = ("scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda")  # the first is always required
    return all(importlib.util.find_spec(name) is not None for name in kernels)


@contextmanager
def _no_cuda(applies: bool) -> Iterator[None]:
    """On a CPU, replace the CUDA device and generators that megatron-core requests."""
    if not applies:
        yield
        return
    from megatron.core.tensor_parallel import random

    with (
        mock.patch.object(torch.cuda, "current_device", lambda: "cpu"),
        mock.patch.object(torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        mock.patch.object(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        mock.patch.object(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        mock.patch.object(torch.cuda, "manual_seed", torch.manual_seed),
        mock.patch.object(torch.cuda, "default_generators", [torch.default_generator]),
        mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
    ):
        yield
