"""A compiled layer with exact attention and dropout has the gradients of the eager one, in every precision."""

import pytest
import torch
from torch import Tensor

from lmscale.config import TransformerConfig
from lmscale.models.build import _default_dtype
from lmscale.models.layer import TransformerLayer
from lmscale.parallel import ParallelContext, initialize_parameters

B, S, H = 3, 40, 64  # more positions than a vector register has numbers


def gradients(dtype: torch.dtype, compiled: bool) -> dict[str, Tensor]:
    config = TransformerConfig("gpt", 1, H, 4, 200, S, attention="exact", hidden_dropout=0.2, attention_dropout=0.1)
    with _default_dtype(dtype):
        layer = TransformerLayer(config, ParallelContext(), 0)
    initialize_parameters(layer, 1, ParallelContext())
    if compiled:
        torch.compiler.reset()
        layer.compile(dynamic=False)
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(2, B, S, H, generator=generator, dtype=torch.float64).to(dtype)
    keys = torch.randint(-(2**31), 2**31, (3, B), generator=generator).int()
    x.requires_grad_()
    (layer(x, None, keys) * weight).sum().backward()
    return {"x": x.grad} | {name: param.grad for name, param in layer.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # The compiler keeps fp32 between the operations of a half type, so these differ by roundings of those.
    [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)],
    ids=["fp64", "fp32", "bf16", "fp16"],
)
def test_compiled_gradients_equal_eager_ones(dtype, tolerance) -> None:
    eager, compiled = gradients(dtype, False), gradients(dtype, True)
    for name, expected in eager.items():
        difference = (compiled[name] - expected).double().abs().max() / expected.double().abs().max()
        assert difference < tolerance, name
