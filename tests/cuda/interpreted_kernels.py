"""Kernels generated for a simulated GPU, run by Triton's interpreter and compared with eager torch on the CPU.

Runs in its own process, with TRITON_INTERPRET=1: `python interpreted_kernels.py GUARD '["dropout", ...]'` prints, by
name, the largest relative error of a result or gradient and whether all zeros are at the same places. `name/fault`
plants a fault (`planted_faults.py`) in what is compiled.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_gpu

P = 0.1  # of dropout
FP32, BF16 = 1e-6, 1e-2  # the interpreter truncates to bf16, where a device rounds: up to 2^-7
TOLERANCES = {  # relative
    "dropout": 0.0,
    "dropout in bf16": BF16,
    "dropout of the embedding": FP32,
    "LayerNorm": FP32,
    "LayerNorm in bf16": BF16,
    "GELU tanh": FP32,
    "GELU erf": FP32,
    "loss: maximum and sum": FP32,
    "loss: softmax": BF16,
    "AdamW": FP32,
    "AdamW with bf16 moments": FP32,
    "layer": FP32,
    "weights drawn by counter": 0.0,
    "weights drawn by counter in fp16": 0.0,
}


def cases() -> dict[str, Callable[[], tuple[Callable, Callable, list]]]:
    """By name: the function to compile, the eager function to compare with, and the inputs of both."""
    import torch
    import torch.nn.functional as F

    from lmscale.config import TransformerConfig
    from lmscale.models.layer import TransformerLayer
    from lmscale.models.transformer import Transformer
    from lmscale.parallel import (
        ParallelContext,
        chunked_cross_entropy,
        counter_dropout,
        initialize_parameters,
    )
    from lmscale.parallel.rng import counter_normal, normal_keys, normal_quantiles
    from lmscale.parallel.sequence_parallel import keys_of_own_tokens, sequence_shard
    from lmscale.training.step.adamw import adamw

    class Combine(torch.nn.Module):
        """`Transformer._combine` as a module."""

        def __init__(self, transformer: Transformer) -> None:
            super().__init__()
            self.transformer = transformer

        def forward(self, *inputs: Any) -> torch.Tensor:
            return self.transformer._combine(*inputs)

    rank_1 = ParallelContext(tp_rank=1, tp_size=2, sequence_parallel=True)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_()

    def keys(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(7)).int()

    def dropout(dtype: torch.dtype) -> tuple:
        """Of the second half of the tokens, which begins within a sequence, against all tokens on one rank."""

        of_samples = keys(3)
        own = keys_of_own_tokens(of_samples.unsqueeze(0), 26, slice(0), rank_1)[0]  # as in a model, not compiled

        def on_rank_1(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            return counter_dropout(x, P, keys)

        def whole(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            tokens = torch.cat([x, x]).view(len(x), -1, x.shape[2])
            return sequence_shard(counter_dropout(tokens, P, of_samples), rank_1)

        return on_rank_1, whole, [normal(3, 13, 72, dtype=dtype), own]

    def embedding() -> tuple:
        """What follows the lookups of BERT's embeddings, with post-norm's LayerNorm."""
        config = TransformerConfig("bert", 1, 48, 3, 100, 12, norm_order="post", hidden_dropout=P)
        module = Combine(Transformer(config, ParallelContext()))
        names = ["position_embedding", "embedding_norm.weight", "embedding_norm.bias"]

        def combine(words: torch.Tensor, types: torch.Tensor, keys: torch.Tensor, *parameters: torch.Tensor) -> Any:
            named = {f"transformer.{name}": value for name, value in zip(names, parameters, strict=True)}
            return torch.func.functional_call(module, named, (words, types, keys, None))

        inputs = [normal(5, 12, 48), normal(5, 12, 48), keys(5), normal(12, 48), normal(48), normal(48)]
        return combine, combine, inputs

    def layer_norm(dtype: torch.dtype) -> tuple:
        def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(x, weight.shape, weight, bias)

        return norm, norm, [normal(2, 13, 96, dtype=dtype), normal(96, dtype=dtype), normal(96, dtype=dtype)]

    def gelu(form: str) -> tuple:
        def activation(x: torch.Tensor) -> torch.Tensor:
            return F.gelu(x, approximate=form)

        return activation, activation, [normal(3, 130)]

    def layer() -> tuple:
        """A whole layer with dropout everywhere; exact attention, because a CPU has no flash kernel."""
        config = TransformerConfig("gpt", 1, 48, 3, 100, 12, attention="exact", gelu="tanh")
        module = TransformerLayer(config, ParallelContext(), 0)
        initialize_parameters(module, 5, ParallelContext())
        names = [name for name, _ in module.named_parameters()]

        def forward(x: torch.Tensor, keys: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
            named = dict(zip(names, parameters, strict=True))
            return torch.func.functional_call(module, named, (x, None, keys))

        parameters = [param.detach().requires_grad_() for param in module.parameters()]
        return forward, forward, [normal(2, 12, 48), keys(3, 2), *parameters]

    def update(dtype: torch.dtype) -> tuple:
        """A step of the optimizer, number 7, with moments of a type; bf16 ones are rounded stochastically."""
        rates = 1 - 0.9, 1 - 0.999, 1e-3, 1e-5, 1e-8
        step = torch.tensor([0.5, 1.0, 1 - 0.9**7, 1 - 0.999**7, 7.0])
        place = torch.stack([keys(31), torch.full((31,), 40, dtype=torch.int32)])

        def updated(step: torch.Tensor, place: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            new = [tensor.clone() for tensor in tensors]
            adamw(None, *new, step, rates, place if dtype == bf16 else None)
            return new[0], *new[2:]

        master, gradient, first, second = (normal(31, n).detach() for n in range(70, 74))
        second = second[:, :70].square()
        tensors = master, gradient[:, :70], first[:, :70].to(dtype), second.to(dtype)
        return updated, updated, [step, place, *(tensor.contiguous() for tensor in tensors)]

    def weights(dtype: torch.dtype) -> tuple:
        """A part of a large weight, as a rank draws it."""

        def draw(keys: torch.Tensor, quantiles: torch.Tensor) -> tuple[torch.Tensor]:
            return ((counter_normal(keys, 37, 200, 2**20, 5, quantiles) * 0.02).to(dtype),)

        return draw, draw, [normal_keys(1, "w"), normal_quantiles(torch.device("cpu"))]

    logits, bf16 = normal(7, 300).detach() * 3, torch.bfloat16
    maximum_and_sum, softmax = chunked_cross_entropy._maximum_and_sum, chunked_cross_entropy._softmax_in_place
    return {
        "dropout": lambda: dropout(torch.float32),
        "dropout in bf16": lambda: dropout(bf16),
        "dropout of the embedding": embedding,
        "LayerNorm": lambda: layer_norm(torch.float32),
        "LayerNorm in bf16": lambda: layer_norm(bf16),
        "GELU tanh": lambda: gelu("tanh"),
        "GELU erf": lambda: gelu("none"),
        "loss: maximum and sum": lambda: (maximum_and_sum, maximum_and_sum, [logits.to(bf16)]),
        "loss: softmax": lambda: (softmax, softmax, [logits.to(bf16), logits.logsumexp(dim=-1)]),
        "AdamW": lambda: update(torch.float32),
        "AdamW with bf16 moments": lambda: update(bf16),
        "layer": layer,
        "weights drawn by counter": lambda: weights(torch.float32),
        "weights drawn by counter in fp16": lambda: weights(torch.float16),
    }


def compare(name: str, runs: list, sources: list[str]) -> dict[str, Any]:
    """Largest relative error over results and gradients; whether their zeros are at the same places."""
    import torch
    from interpreter import compile_and_run
    from planted_faults import planted

    name, _, fault = name.partition("/")
    with planted(fault or None):  # inputs too may come from the package: dropout keys
        compiled, eager, inputs = cases()[name]()
    expected = eager(*(x.clone() if not x.requires_grad else x for x in inputs))
    expected = list(expected) if isinstance(expected, tuple) else [expected]
    with planted(fault or None):
        result, gradients = compile_and_run(compiled, inputs, runs, sources, dynamic=name.startswith("loss"))
    if gradients:
        expected[0].backward(torch.ones_like(expected[0]))
        pairs = [(result, expected[0])]
        pairs += [(g, x.grad) for g, x in zip(gradients, inputs, strict=True) if x.requires_grad]
    else:
        pairs = list(zip(result, expected, strict=True))
    errors = [((a - b).double().norm() / b.double().norm()).item() for a, b in pairs]
    return {"error": max(errors), "same_zeros": all(torch.equal(a == 0, b == 0) for a, b in pairs)}


if __name__ == "__main__":
    fake_gpu.install(Path(sys.argv[1]))
    runs: list = []
    sources = fake_gpu.capture_generated_code(runs)
    print(json.dumps({name: compare(name, runs, sources) for name in json.loads(sys.argv[2])}))
