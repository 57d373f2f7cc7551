"""Build this rank's shard of a model."""

from contextlib import ExitStack

import torch
from torch import nn

from ..config import TransformerConfig
from ..config.family import load
from ..kernels import PLAIN, Kernels, layer_norm_of
from ..parallel import ColumnParallelLinear, LayerNorm, ParallelContext, RowParallelLinear, initialize_parameters
from .attention_backend import leave_cudnn_out


def build_model(
    config: TransformerConfig,
    context: ParallelContext,
    *,
    seed: int | None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    kernels: Kernels = PLAIN,
) -> nn.Module:
    """Build this rank's shard of a model directly on its device and in its dtype; no rank holds the whole model.

    While it builds, it changes torch's default dtype, which is global to the process: one thread at a time. On a GPU it
    takes cuDNN's attention out of torch's choice for this process, unless the model is built to use it.

    Args:
        seed: of the initial weights, the same logical tensors at every layout; None leaves them uninitialized (the
            meta device, or weights about to be loaded).
        kernels: implementations that compute the layers; see `training.kernel_choice`.

    Returns:
        the model of `config.family`, in training mode.

    Raises:
        ValueError: `context.tp_size` does not divide the model.
    """
    if torch.device(device).type == "cuda":
        leave_cudnn_out()
    kind = load(config.traits.model)
    with torch.device(device), ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(dtype)
        model = kind(config, context)
    if seed is not None:
        initialize_parameters(model, seed, context, config.initializer)
    layer_norm = layer_norm_of(kernels)
    if layer_norm is not None:
        for module in model.modules():
            if isinstance(module, LayerNorm):
                module.kernel = layer_norm
    if kernels.float8:  # not the heads: their products are few, or affect the loss directly
        for module in model.transformer.layers.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.use_float8()
    if kernels.compiles:
        # All layers share one code object. Each combination of a mask or none, a training, validation or last batch,
        # and a kind of layer (`mix` has two) is a graph; beyond torch's 8 a layer would run eagerly.
        torch._dynamo.config.recompile_limit = 64
        model.compile_layers(kernels.cuda_graphs)
    return model
