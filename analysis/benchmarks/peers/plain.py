"""Models that return their loss, trained with torch's fused AdamW: from transformers and from a file."""

import importlib.util
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analysis.benchmarks.config import TEACHER_WEIGHT, TEMPERATURE, BenchConfig
from lmscale.config import TransformerConfig
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

    def step(self, batches: list[Batch], number: int) -> Tensor:
        self.optimizer.zero_grad()
        losses = []
        for batch in batches:
            with self.autocast():
                loss = self.loss(batch) / len(batches)
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        return sum(losses)


class HuggingFace(Plain):
    """transformers' model of the same sizes with our initial weights."""

    def __init__(self, bench: BenchConfig, device: torch.device, compiles: bool) -> None:
        super().__init__(hugging_face_model(bench.transformer_config(), bench.seed), bench, device, compiles)
        self.is_gpt = bench.model["family"] == "gpt"
        self.teacher = None
        if bench.teacher is not None:
            teacher = hugging_face_model(bench.transformer_config(of_teacher=True), bench.seed).to(device).eval()
            self.teacher = torch.compile(teacher) if compiles else teacher

    def loss(self, batch: Batch) -> Tensor:
        if self.teacher is not None:
            return self._loss_with_teacher(batch)
        if self.is_gpt:  # its loss shifts the labels, and ours are already shifted
            return self.run(input_ids=batch["tokens"], labels=batch["unshifted"]).loss
        return self.run(
            input_ids=batch["tokens"],
            token_type_ids=batch["token_types"],
            labels=batch["labels"],
            next_sentence_label=batch["sop_labels"],
        ).loss

    def _loss_with_teacher(self, batch: Batch) -> Tensor:
        inputs = {"input_ids": batch["tokens"]} | ({} if self.is_gpt else {"token_type_ids": batch["token_types"]})
        with torch.no_grad():
            theirs = self.teacher(**inputs)
        ours, scored, name = self.run(**inputs), batch["labels"] != IGNORE_LABEL, "logits"
        order = 0.0
        if not self.is_gpt:
            name, order = "prediction_logits", F.cross_entropy(ours.seq_relationship_logits, batch["sop_labels"])
        student, teacher = (getattr(each, name)[scored].float() for each in (ours, theirs))
        soft = [(logits / TEMPERATURE).log_softmax(-1) for logits in (student, teacher)]
        divergence = F.kl_div(*soft, reduction="batchmean", log_target=True)
        labels = F.cross_entropy(student, batch["labels"][scored])
        return (1 - TEACHER_WEIGHT) * labels + TEACHER_WEIGHT * TEMPERATURE**2 * divergence + order


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


def hugging_face_model(config: TransformerConfig, seed: int) -> nn.Module:
    """transformers' model with our initial weights, in fp32."""
    import transformers

    ours = dict(build_model(config, ParallelContext(), seed=seed).named_parameters())
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
