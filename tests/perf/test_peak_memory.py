"""The predicted memory of a rank against the bytes of all tensors alive at the fullest moment of a real step."""

import weakref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmscale.config import TransformerConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext, sample_dropout_keys
from lmscale.perf.flops import scored_tokens
from lmscale.perf.memory import estimate_memory
from lmscale.training.optimizer import MixedPrecisionAdamW
from lmscale.training_config import OptimizerConfig, PrecisionConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TensorBytes(TorchDispatchMode):
    """While entered, follows the storages of all tensors that operations return, from birth to end."""

    def __init__(self, held: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()
        for tensor in held:
            self._follow(tensor)

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known and storage.nbytes():
            self._known.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._follow(leaf)
        return out


def tracked_peak(config: TransformerConfig, b: int, s: int, dtype: str, num_micro_batches: int) -> int:
    """Bytes alive at the fullest moment of the second step: weights, state, gradients, activations, temporaries."""
    model = build_model(config, ParallelContext(), seed=1, dtype=DTYPES[dtype])
    optimizer = MixedPrecisionAdamW(
        model.named_parameters(),
        OptimizerConfig(lr=1e-3),
        PrecisionConfig(dtype),
        ParallelContext(),
    )
    tokens = torch.arange(b * s).view(b, s) % config.vocab_size
    keys = sample_dropout_keys(seed=1, sample_numbers=torch.arange(b))
    scored = torch.arange(b * scored_tokens(config, s))

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(num_micro_batches):
            if config.architecture == "gpt":
                (model(tokens, tokens, keys) / tokens.numel()).backward()
            else:
                loss, order = model(tokens, torch.zeros_like(tokens), None, tokens, keys, scored)
                (loss / tokens.numel() + order.float().mean()).backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    held = [*model.parameters(), *optimizer.tensors().values(), *optimizer.gradients().values()]
    held += [param.grad for param in model.parameters() if param.grad is not None]
    with TensorBytes(held) as tracked:
        step()
    return tracked.peak


def sized(architecture: str, layers: int, hidden: int, heads: int, vocab: int, s: int, **changes) -> TransformerConfig:
    return TransformerConfig(
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        vocab_size=vocab,
        max_position_embeddings=s,
        vocab_multiple=8,
        **changes,
    )


# Micro-batch, type, micro-batches of the step. The terms of the estimate were found on other shapes.
CASES = {
    "gpt, fp32": (sized("gpt", 7, 288, 6, 1700, 160, attention_dropout=0.0), 5, "fp32", 1),
    "gpt, fp32, two micro-batches": (sized("gpt", 9, 128, 2, 3000, 96, ffn_hidden_size=640), 7, "fp32", 2),
    "gpt, fp32, full recomputation": (sized("gpt", 17, 192, 3, 600, 112, recompute="full"), 9, "fp32", 1),
    "gpt, fp32, large vocabulary": (sized("gpt", 3, 96, 3, 16000, 80, recompute="selective"), 5, "fp32", 1),
    "gpt, bf16, selective": (
        sized("gpt", 8, 224, 7, 1100, 144, recompute="selective", attention="exact"),
        5,
        "bf16",
        2,
    ),
    "gpt, bf16, scores kept": (sized("gpt", 5, 160, 5, 500, 208, attention="exact"), 3, "bf16", 1),
    "bert, fp32, post-norm": (sized("bert", 6, 224, 7, 1300, 144, norm_order="post"), 5, "fp32", 1),
    "gpt, fp32, long and exact": (sized("gpt", 3, 96, 6, 300, 320, attention="exact"), 5, "fp32", 1),
    "gpt, fp32, long, exact, without dropout": (
        sized("gpt", 4, 64, 4, 300, 288, attention="exact", attention_dropout=0.0),
        6,
        "fp32",
        1,
    ),
    "gpt, bf16, long, exact, full recomputation": (
        sized("gpt", 4, 96, 6, 300, 320, attention="exact", recompute="full"),
        5,
        "bf16",
        1,
    ),
    "bert, bf16, long, exact, selective": (
        sized("bert", 3, 64, 4, 300, 352, attention="exact", recompute="selective"),
        4,
        "bf16",
        2,
    ),
    "gpt, fp32, long, scores of SDPA": (sized("gpt", 3, 64, 4, 300, 320), 6, "fp32", 1),
    "gpt, bf16, several pieces of logits": (sized("gpt", 2, 64, 4, 50000, 512), 5, "bf16", 1),
    "gpt, fp32, several pieces of logits": (sized("gpt", 2, 64, 4, 50000, 512), 5, "fp32", 1),
    "bert, bf16, full recomputation": (sized("bert", 14, 256, 4, 1000, 128, recompute="full"), 5, "bf16", 1),
}


@pytest.mark.parametrize("name", CASES)
def test_the_predicted_peak_is_within_5_percent_of_the_tracked_one(name: str) -> None:
    config, b, dtype, num_micro_batches = CASES[name]
    s = config.max_position_embeddings
    predicted = estimate_memory(config, 1, b, s, dtype, on_gpu=False, accumulates=num_micro_batches > 1).total
    tracked = tracked_peak(config, b, s, dtype, num_micro_batches)
    print(
        f"{name}: predicted {predicted / 2**20:.1f} MiB, tracked {tracked / 2**20:.1f}, {predicted / tracked - 1:+.2%}"
    )
    assert abs(predicted / tracked - 1) < 0.05
