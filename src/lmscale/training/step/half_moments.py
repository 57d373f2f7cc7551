"""AdamW with moments in bf16: 4 bytes per parameter instead of 8."""

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

BITS_LOST = 16  # of fp32's 32


def update_with_half_moments(
    named_masters: Iterable[tuple[str, Tensor]],
    state: dict[Tensor, dict[str, Any]],
    group: dict[str, Any],
    number: int,
) -> None:
    """One AdamW update in fp32, tensor by tensor; the moments are then rounded to bf16 stochastically.

    Rounded to nearest, the second moment would not change: with beta2 0.999 it moves by a thousandth per step, and bf16
    has two to three digits. Stochastic rounding keeps the mean, so it follows. The random numbers depend on the
    tensor's name and the number of updates: replicas stay equal, and a resumed run is bitwise equal to an uninterrupted
    one. Another tensor-parallel size rounds differently.

    Args:
        named_masters: (name, fp32 weight with `.grad`).
        state: of the optimizer, `exp_avg`, `exp_avg_sq` (bf16) and `step`; created at the first update.
        group: the optimizer's settings: `lr`, `betas`, `eps`, `weight_decay`.
        number: of this update, from 1; a host number, so that no device is waited for.
    """
    beta1, beta2 = group["betas"]
    settings = {key: group[key] for key in ("lr", "weight_decay", "eps")} | {"beta1": beta1, "beta2": beta2}
    for name, master in named_masters:
        entry = state[master]
        if not entry:
            entry["step"] = torch.zeros((), device=master.device)
            entry |= {kind: torch.zeros_like(master, dtype=torch.bfloat16) for kind in ("exp_avg", "exp_avg_sq")}
        moments = [entry["exp_avg"].float(), entry["exp_avg_sq"].float()]
        adamw(
            [master],
            [master.grad],
            [moments[0]],
            [moments[1]],
            [],
            [entry["step"]],
            fused=True,
            amsgrad=False,
            maximize=False,
            **settings,
        )
        generator = torch.Generator(master.device)
        generator.manual_seed(zlib.crc32(f"moments/{name}/{number}".encode()))
        for kind, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            entry[kind].copy_(round_to_bf16(moment, generator))


def round_to_bf16(x: Tensor, generator: torch.Generator) -> Tensor:
    """Round fp32 stochastically to one of the two neighbouring bf16 numbers; the expectation is `x`.

    Shapes:
        any; returns a new tensor of the same shape.
    """
    noise = torch.randint(0, 1 << BITS_LOST, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    noise += x.view(torch.int32)  # a carry out of the lost bits is one step up in magnitude
    return noise.bitwise_and_(-(1 << BITS_LOST)).view(torch.float32).to(torch.bfloat16)
