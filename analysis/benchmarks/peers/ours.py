"""This project's own training step."""

import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.benchmarks.config import TEACHER_WEIGHT, TEMPERATURE, BenchConfig
from lmscale.config import TransformerConfig
from lmscale.config.teacher import TeacherConfig
from lmscale.config.training import OptimizerConfig
from lmscale.kernels import Kernels
from lmscale.models import build_model
from lmscale.models.attention_backend import fastest_backend, preferred_backend
from lmscale.parallel import IGNORE_LABEL, ParallelContext, sample_dropout_keys, seed_rank_generator
from lmscale.runtime.accelerator import check_products, keep_partial_sums_in_fp32, set_allocator
from lmscale.runtime.cpu_settings import keep_heap
from lmscale.training.kernel_choice import check_attention, choose_attention
from lmscale.training.step.optimizer import MixedPrecisionAdamW
from lmscale.training.step.training_module import DTYPES
from lmscale.training.teacher import Teacher

from .contender import MAX_NORM, Batch, Contender


class Ours(Contender):
    """This project's model and optimizer, as `train.py` uses them on one device."""

    def __init__(self, bench: BenchConfig, device: torch.device) -> None:
        dtype = bench.precision.dtype
        if device.type == "cpu":
            keep_heap()
        else:
            set_allocator(bench.cuda_graphs)
            check_products(dtype)
            keep_partial_sums_in_fp32()
        config = resolve_attention(bench, device)
        self.bench, self.attention, context = bench, config.attention, ParallelContext()
        kernels = Kernels(float8=dtype == "fp8", compiles=bench.compiles, cuda_graphs=bench.cuda_graphs)
        self.model = build_model(config, context, seed=bench.seed, dtype=DTYPES[dtype], device=device, kernels=kernels)
        self.teacher, sizes = None, {"dtype": DTYPES[dtype], "device": device, "kernels": kernels}
        if bench.teacher is not None:
            teacher = bench.transformer_config(config.attention, of_teacher=True)
            model = build_model(teacher, context, seed=bench.seed, **sizes).eval().requires_grad_(False)
            settings = TeacherConfig("random", temperature=TEMPERATURE, weight=TEACHER_WEIGHT)
            self.teacher = Teacher(settings, model, teacher.vocab_size)
        optimizer = OptimizerConfig(lr=bench.lr, max_grad_norm=MAX_NORM)
        parameters = self.model.named_parameters()
        self.optimizer = MixedPrecisionAdamW(parameters, optimizer, bench.precision, context, bench.compiles)

    def step(self, batches: list[Batch], number: int) -> Tensor:
        self.optimizer.zero_grad()
        with preferred_backend(self.model.config.attention):
            losses = [self._backward(batch, number, index, len(batches)) for index, batch in enumerate(batches)]
        self.optimizer.step()
        return sum(losses)

    def _backward(self, batch: Batch, number: int, index: int, count: int) -> Tensor:
        tokens, labels = batch["tokens"], batch["labels"]
        seed_rank_generator(self.bench.seed, number, index, 0, 0)
        numbers = (number * count + index) * len(tokens) + torch.arange(len(tokens), device=tokens.device)
        keys = sample_dropout_keys(self.bench.seed, numbers)
        batch, order = batch | {"attention_mask": None}, 0.0
        targets = None if self.teacher is None else self.teacher.targets(batch)
        if self.model.config.family == "gpt":
            words = self.model(tokens, labels, keys, targets=targets) / (labels != IGNORE_LABEL).sum()
        else:
            inputs = tokens, batch["token_types"], None, labels, keys, batch["scored"], targets
            words, order = self.model(*inputs)
            words, order = words / len(batch["scored"]), F.cross_entropy(order.float(), batch["sop_labels"])
        loss = (order + (words if targets is None else self.teacher.mix(words))) / count
        loss.backward()
        return loss.detach()


def resolve_attention(bench: BenchConfig, device: torch.device) -> TransformerConfig:
    """The model with `model.attention=auto` resolved as `train.py` does.

    Raises:
        ValueError: as `check_attention`.
    """
    config, dtype = bench.transformer_config(), bench.precision.dtype
    if bench.model.get("attention") != "auto":
        check_attention(config.attention, device.type == "cuda", dtype)
        return config
    if device.type == "cuda":
        sizes = 1, bench.micro_batch_size, bench.length
        return bench.transformer_config(fastest_backend(config, *sizes, DTYPES[dtype], device))
    return bench.transformer_config(choose_attention(bench.compiles, config.attention_dropout))
