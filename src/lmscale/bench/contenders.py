"""Who runs: each a model, AdamW and one training step on a given batch.

All clip the gradient's norm at 1 and do the whole step: forward pass, backward pass, update. Ours and Hugging Face's
start from the same weights; a model file and megatron-core draw their own. Where a peer keeps fp32 weights and computes
in bf16, it does so by autocast, as its own users would.
"""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bench_config import FILE_PEERS, BenchConfig
from ..checkpoint.hf_config import config_to_hf
from ..config import TransformerConfig
from ..config.training import OptimizerConfig
from ..kernels import Kernels
from ..models import build_model, scored_positions
from ..models.hugging_face import model_of
from ..parallel import IGNORE_LABEL, ParallelContext, sample_dropout_keys, seed_rank_generator
from ..training.step.module import DTYPES
from ..training.step.optimizer import MixedPrecisionAdamW

Batch = dict[str, Tensor]
MAX_NORM = 1.0


class Contender(ABC):
    """A training loop that is asked for one step at a time."""

    @abstractmethod
    def step(self, batch: Batch, number: int) -> float | Tensor:
        """Train on a batch; returns its mean loss (BERT: of masked words plus of order), before the update."""


class Ours(Contender):
    """This project's model and optimizer, as `train.py` uses them on one device; `dtype` as in `precision=`."""

    def __init__(self, bench: BenchConfig, device: torch.device, dtype: str) -> None:
        config = bench.transformer_config()
        self.bench, context = bench, ParallelContext()
        kernels = Kernels(float8=dtype == "fp8", compiles=bench.compiles, cuda_graphs=bench.cuda_graphs)
        self.model = build_model(config, context, seed=bench.seed, dtype=DTYPES[dtype], device=device, kernels=kernels)
        optimizer = OptimizerConfig(lr=bench.lr, max_grad_norm=MAX_NORM)
        self.optimizer = MixedPrecisionAdamW(self.model.named_parameters(), optimizer, bench.precision, context)

    def step(self, batch: Batch, number: int) -> Tensor:
        self.optimizer.zero_grad()
        tokens, labels = batch["tokens"], batch["labels"]
        seed_rank_generator(self.bench.seed, number, 0, 0, 0)
        numbers = number * len(tokens) + torch.arange(len(tokens), device=tokens.device)
        keys = sample_dropout_keys(self.bench.seed, numbers)
        if self.model.config.family == "gpt":
            loss = self.model(tokens, labels, keys) / (labels != IGNORE_LABEL).sum()
        else:
            masked, order = self.model(tokens, batch["token_types"], None, labels, keys, batch["scored"])
            loss = masked / len(batch["scored"]) + F.cross_entropy(order.float(), batch["sop_labels"])
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class Plain(Contender):
    """A model that returns its loss, and torch's fused AdamW; bf16 by autocast."""

    def __init__(self, model: nn.Module, bench: BenchConfig, device: torch.device, compiles: bool) -> None:
        self.model = model.to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=bench.lr, weight_decay=0.01, fused=True)
        self.run = torch.compile(self.model) if compiles else self.model
        self.autocast = _autocast(bench, device)

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """Mean loss of a batch."""

    def step(self, batch: Batch, number: int) -> Tensor:
        self.optimizer.zero_grad()
        with self.autocast():
            loss = self.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        return loss.detach()


class HuggingFace(Plain):
    """transformers' model of the same sizes with our initial weights."""

    def __init__(self, bench: BenchConfig, device: torch.device, compiles: bool) -> None:
        super().__init__(hugging_face_model(bench), bench, device, compiles)
        self.is_gpt = bench.model["family"] == "gpt"

    def loss(self, batch: Batch) -> Tensor:
        if self.is_gpt:  # its own loss shifts the labels; ours are shifted already
            return self.run(input_ids=batch["tokens"], labels=batch["unshifted"]).loss
        return self.run(
            input_ids=batch["tokens"],
            token_type_ids=batch["token_types"],
            labels=batch["labels"],
            next_sentence_label=batch["sop_labels"],
        ).loss


class ModelFile(Plain):
    """`GPT(GPTConfig(...))` of a file in nanoGPT's form; its weights are drawn by itself."""

    def __init__(self, bench: BenchConfig, device: torch.device, compiles: bool) -> None:
        config = bench.transformer_config()
        spec = importlib.util.spec_from_file_location("bench_model_file", Path(bench.file))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        torch.manual_seed(bench.seed)
        sizes = module.GPTConfig(
            block_size=config.max_position_embeddings,
            vocab_size=config.padded_vocab_size,
            n_layer=config.num_layers,
            n_head=config.num_attention_heads,
            n_embd=config.hidden_size,
            dropout=config.hidden_dropout,
            bias=True,
        )
        super().__init__(module.GPT(sizes), bench, device, compiles)

    def loss(self, batch: Batch) -> Tensor:
        labels = batch["labels"].masked_fill(batch["labels"] == IGNORE_LABEL, -1)  # nanoGPT's sign for the same
        return self.run(batch["tokens"], labels)[1]


def hugging_face_model(bench: BenchConfig) -> nn.Module:
    """transformers' model with the weights that ours starts with, fp32."""
    import transformers

    config = bench.transformer_config()
    ours = dict(build_model(config, ParallelContext(), seed=bench.seed).named_parameters())
    model = getattr(transformers, model_of(config).model_class)(config_to_hf(config, "float32", {}))
    weights = {row.theirs: row.to_theirs(ours[row.ours].detach(), config) for row in model_of(config).rows(config)}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = [name for name in missing if "lm_head" not in name and "decoder" not in name and "position_ids" not in name]
    assert not tied and not unexpected, (tied, unexpected)
    model.tie_weights()
    return model


def _autocast(bench: BenchConfig, device: torch.device) -> Callable[[], AbstractContextManager]:
    if bench.peers_dtype == "fp32":
        return nullcontext
    return lambda: torch.autocast(device.type, torch.bfloat16)


def make_contender(name: str, bench: BenchConfig, device: torch.device) -> Contender:
    """One of `ours` and `bench_config.PEERS`.

    Raises:
        ValueError: a peer that is not installed, or whose family has no such model.
    """
    if name == "ours":
        return Ours(bench, device, bench.precision.dtype)
    if name == "ours_bf16":
        return Ours(bench, device, "bf16")
    if name in ("hf_eager", "hf_compiled"):
        return HuggingFace(bench, device, compiles=name == "hf_compiled")
    if name in FILE_PEERS:
        return ModelFile(bench, device, compiles=name == "file_compiled")
    if name == "lightning":
        from .lightning_loop import LightningLoop

        return LightningLoop(bench, device)
    from .megatron import MegatronCore

    return MegatronCore(bench, device)


def make_batches(config: TransformerConfig, bench: BenchConfig, count: int, device: torch.device) -> list[Batch]:
    """Batches of token ids drawn like words, the frequent ones often (Zipf), so that there is something to learn.

    GPT: `tokens`, `labels` (the next tokens) and `unshifted` [b, s]. BERT: 15 % of the labels, `token_types`, a mask of
    ones, `sop_labels`, and `scored`.
    """
    generator = torch.Generator().manual_seed(bench.seed)
    weights = 1.0 / torch.arange(1, config.vocab_size + 1, dtype=torch.float64)
    weights[0] = 0.0  # padding to transformers' BERT, which gives it no gradient
    shape = (bench.micro_batch_size, bench.length)
    found: list[dict[str, Any]] = []
    for _ in range(count):
        drawn = torch.multinomial(weights, shape[0] * (shape[1] + 1), replacement=True, generator=generator)
        drawn = drawn.view(shape[0], shape[1] + 1)
        if config.family == "gpt":
            # transformers' own loss leaves out a sequence's last position: it has no next token there.
            labels = drawn[:, 1:].clone()
            labels[:, -1] = IGNORE_LABEL
            found.append({"tokens": drawn[:, :-1], "labels": labels, "unshifted": drawn[:, :-1]})
            continue
        masked = torch.rand(shape, generator=generator) < 0.15
        masked[:, 0] = True  # none without a masked position
        batch = {"tokens": drawn[:, 1:], "labels": drawn[:, 1:].masked_fill(~masked, IGNORE_LABEL)}
        batch["token_types"] = (torch.arange(shape[1]) >= shape[1] // 2).long().expand(shape)
        batch["sop_labels"] = torch.randint(0, 2, shape[:1], generator=generator)
        batch["scored"] = scored_positions(batch["labels"])
        found.append(batch)
    return [{key: value.contiguous().to(device) for key, value in batch.items()} for batch in found]
