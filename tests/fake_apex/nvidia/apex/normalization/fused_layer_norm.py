"""LayerNorm with the interface of NVIDIA's, by its formulas, statistics in fp32 at least."""

import torch


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        wide = x if x.dtype == torch.float64 else x.float()
        mean = wide.mean(-1, keepdim=True)
        scale = (wide.var(-1, keepdim=True, unbiased=False) + eps).rsqrt()
        normal = (wide - mean) * scale
        ctx.save_for_backward(normal, scale, weight)
        return (normal * weight + bias).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        normal, scale, weight = ctx.saved_tensors
        wide = grad.to(normal.dtype)
        d_normal = wide * weight
        centred = d_normal - d_normal.mean(-1, keepdim=True) - normal * (d_normal * normal).mean(-1, keepdim=True)
        rows = tuple(range(grad.ndim - 1))
        d_weight, d_bias = (wide * normal).sum(rows), wide.sum(rows)
        return (scale * centred).to(grad.dtype), d_weight.to(weight.dtype), d_bias.to(weight.dtype), None


def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):  # noqa: A002
    assert list(weight.shape) == list(normalized_shape) == [input.shape[-1]]
    fused_layer_norm_affine.calls += 1
    return _LayerNorm.apply(input, weight, bias, eps)


fused_layer_norm_affine.calls = 0
