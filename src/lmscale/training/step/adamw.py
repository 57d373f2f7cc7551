"""AdamW: torch's fused kernel, or one pass that also unscales, clips, rounds the moments and writes the weight."""

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from ...models.compiler_options import HASH_AGAIN
from ...parallel.rng import counter_bits

HALF_BITS = 16  # bits of fp32 that bf16 keeps; it drops the other 16
BLOCK_ELEMENTS = 2**16  # of one update on a CPU: with its temporaries, about what a core's cache holds
_UPDATE = 0x2C1B3C6D  # odd, so that the updates' keys differ


def update_by_torch(
    group: dict[str, Any], state: dict[Tensor, dict[str, Any]], weights: dict[Tensor, nn.Parameter], step: Tensor
) -> None:
    """Update one parameter group by torch's fused AdamW, after clipping the gradients in place.

    Args:
        group: of the optimizer: `params`, the masters, of which those with a gradient are updated; `lr`, `betas`,
            `eps`, `weight_decay`.
        state: of the optimizer: `exp_avg`, `exp_avg_sq` and, if these are bf16, `place` per master.
        weights: the half-type weight of each master; empty if the masters are the weights.
        step: [5], see `DeviceCounters.advance`.
    """
    masters = [master for master in group["params"] if master.grad is not None]
    if not masters:
        return
    factor, finite, *_, number = step.unbind()
    gradients = [master.grad for master in masters]
    torch._foreach_mul_(gradients, torch.where(finite > 0, factor, 1.0))  # a skipped step leaves them for `diagnose`
    torch._fused_adamw_(
        masters,
        gradients,
        *([state[master][kind] for master in masters] for kind in ("exp_avg", "exp_avg_sq")),
        [],
        [number.float()] * len(masters),
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        found_inf=1.0 - finite.float(),
    )
    if weights:
        torch._foreach_copy_([weights[master] for master in masters], masters)


class OnePass:
    """Updates a parameter group tensor by tensor, each in one pass if it is compiled, else on a CPU block by block.

    Args:
        compiles: let torch.compile fuse the update of a tensor into one kernel, for all sizes.
    """

    def __init__(self, compiles: bool) -> None:
        self.adamw = torch.compile(adamw, dynamic=True, options=HASH_AGAIN) if compiles else adamw_in_blocks

    def __call__(
        self,
        group: dict[str, Any],
        state: dict[Tensor, dict[str, Any]],
        weights: dict[Tensor, nn.Parameter],
        step: Tensor,
    ) -> None:
        """Update the masters with a gradient in `group`; see `update_by_torch`."""
        (beta1, beta2), lr = group["betas"], group["lr"]
        rates = (1.0 - beta1, 1.0 - beta2, lr, lr * group["weight_decay"], group["eps"])
        for master in group["params"]:
            if master.grad is not None:
                entry, weight = state[master], weights.get(master)
                # Parameters would be compiled once per shape, their data is not.
                tensors = [weight if weight is None else weight.data, master.data, master.grad]
                self.adamw(*tensors, entry["exp_avg"], entry["exp_avg_sq"], step, rates, entry.get("place"))


def adamw(
    weight: Tensor | None,
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    rates: tuple[float, float, float, float, float],
    place: Tensor | None,
) -> None:
    """Update one tensor in place: moments, master, and from it the weight of a half type.

    bf16 moments are rounded stochastically. Rounded to nearest, the second moment would not change: with beta2 0.999 it
    moves by a thousandth per step, and bf16 has two to three digits. Stochastic rounding keeps the mean, so it follows.
    The random bits are a hash of (parameter, number of the update, row and column in the logical tensor), so they are
    the same on replicas, at every layout and after resuming.

    Shapes:
        weight, master, gradient, exp_avg, exp_avg_sq: equal, at most two dimensions; step [5].

    Args:
        step: see `DeviceCounters.advance`.
        rates: 1 - beta1, 1 - beta2, the learning rate, its product with the weight decay, eps.
        place: for bf16 moments, see `place_of`.

    Source: Loshchilov and Hutter 2019, algorithm 2, with the decay multiplied by the rate as in torch.
    """
    factor, finite, correction_1, correction_2, number = step.unbind()
    rate_1, rate_2, lr, decay, eps = rates
    gradient = torch.where(finite > 0, gradient * factor, 0.0)  # all rates are 0 in a step that is skipped
    first = exp_avg.to(master.dtype).lerp_(gradient, finite * rate_1)
    second = exp_avg_sq.to(master.dtype).lerp_(gradient.square_(), finite * rate_2)
    change = first / second.sqrt().mul_(correction_2.rsqrt()).add_(eps)
    master.sub_(change.mul_(finite * lr / correction_1).add_(finite * decay * master))
    if weight is not None:
        weight.copy_(master)
    if place is not None:
        del gradient, change  # free memory for the random bits
        bits = _random_bits(place, number.to(torch.int32), master)
        exp_avg.copy_(round_to_bf16(first, bits))
        exp_avg_sq.copy_(round_to_bf16(second, bits >> HALF_BITS))


def adamw_in_blocks(
    weight: Tensor | None,
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    rates: tuple[float, float, float, float, float],
    place: Tensor,
) -> None:
    """`adamw` with bf16 moments; a matrix on a CPU in blocks of rows, whose temporaries stay in the cache.

    The bits are the same; on one core an update of 2,048 x 1,024 numbers takes 0.62 of the time.
    """
    tensors = [weight, master, gradient, exp_avg, exp_avg_sq]
    if master.is_cuda or master.ndim == 1:
        return adamw(*tensors, step, rates, place)
    num_rows = max(1, BLOCK_ELEMENTS // master.shape[1])
    for first in range(0, len(master), num_rows):
        block = (tensor if tensor is None else tensor[first : first + num_rows] for tensor in tensors)
        adamw(*block, step, rates, place + place.new_tensor([0, first, 0]))


def place_of(name: str, master: Tensor, tp_rank: int) -> Tensor:
    """What the random bits depend on: int32 [3], a key of the parameter, and its first row and column on this rank.

    A parameter of one dimension is one row.
    """
    first = {-1: 0, -2: 0}  # of the columns, of the rows
    if master.shard.shard_dim is not None:
        dim = master.shard.shard_dim - master.ndim
        first[dim] = tp_rank * master.shape[dim]
    key = zlib.crc32(f"moments/{name}".encode()) - 2**31
    return torch.tensor([key, first[-2], first[-1]], dtype=torch.int32).to(master.device)


def _random_bits(place: Tensor, number: Tensor, like: Tensor) -> Tensor:
    key, first_row, first_column = place.unbind()
    num_rows, num_columns = like.shape if like.ndim > 1 else (1, len(like))
    rows = first_row + torch.arange(num_rows, dtype=torch.int32, device=place.device)
    columns = first_column + torch.arange(num_columns, dtype=torch.int32, device=place.device)
    return counter_bits((key + number * _UPDATE)[None], rows, columns).view_as(like)


def round_to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """Round stochastically to one of the two neighbouring bf16 numbers; the expectation is `x`.

    Shapes:
        x floating and bits int32 of any equal shape; the low half of `bits` counts. Returns bf16 of that shape.
    """
    lost = (1 << HALF_BITS) - 1
    noisy = x.float().view(torch.int32) + (bits & lost)  # a carry out of the lost bits is one step up in magnitude
    return (noisy & ~lost).view(torch.float32).to(torch.bfloat16)
