"""Models that return their loss, trained with torch's fused AdamW: from transformers and from a file."""

import importlib.util
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from analysis.benchmarks.config import BenchConfig
from lmscale.hugging_face.config import config_to_hf
from lmscale.models import build_model
from lmscale.models.hugging_face import model_of
from lmscale.parallel import IGNORE_LABEL, ParallelContext

from .contender import MAX_NORM, Batch, Contender


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
        if self.is_gpt:  # its loss shifts the labels, and ours are already shifted
            return self.run(input_ids=batch["tokens"], labels=batch["unshifted"]).loss
        return self.run(
            input_ids=batch["tokens"],
            token_type_ids=batch["token_types"],
            labels=batch["labels"],
            next_sentence_label=batch["sop_labels"],
        ).loss


class ModelFile(Plain):
    """`GPT(GPTConfig(...))` of a file in nanoGPT's form, with its own initialization."""

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
        labels = batch["labels"].masked_fill(batch["labels"] == IGNORE_LABEL, -1)  # nanoGPT's ignore index
        return self.run(batch["tokens"], labels)[1]


def hugging_face_model(bench: BenchConfig) -> nn.Module:
    """transformers' model with our initial weights, in fp32."""
    import transformers

    config = bench.transformer_config()  # weights are the same with any
    ours = dict(build_model(config, ParallelContext(), seed=bench.seed).named_parameters())
    model = getattr(transformers, model_of(config).model_class)(config_to_hf(config, "float32", {}))
    weights = {pair.theirs: pair.to_theirs(ours[pair.ours].detach(), config) for pair in model_of(config).pairs(config)}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = [name for name in missing if "lm_head" not in name and "decoder" not in name and "position_ids" not in name]
    assert not tied and not unexpected, (tied, unexpected)
    model.tie_weights()
    return model


def _autocast(bench: BenchConfig, device: torch.device) -> Callable[[], AbstractContextManager]:
    if bench.peers_dtype == "fp32":
        return nullcontext
    return lambda: torch.autocast(device.type, torch.bfloat16)
