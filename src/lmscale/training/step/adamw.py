"""AdamW: torch's fused kernel, or one pass that also unscales, clips, rounds the moments and writes the weight."""

import zlib
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ...models.compiler_options import HASH_AGAIN
from ...parallel.rng import counter_bits, keys_from_row
from ...partition import UPDATED_AT_ONCE_ON_GPU
from .gradient_buffer import Part

HALF_BITS = 16  # bits of fp32 that bf16 keeps; it drops the other 16
BLOCK_ELEMENTS = 2**16  # of one update on a CPU: with its temporaries, about what a core's cache holds
_UPDATE = 0x2C1B3C6D  # odd, so that the updates' keys differ


def update_by_torch(
    group: dict[str, Any],
    state: dict[Tensor, dict[str, Any]],
    weights: dict[Tensor, nn.Parameter],
    step: Tensor,
    frozen: set[Tensor],
) -> None:
    """Update one parameter group by torch's fused AdamW, after clipping the gradients in place.

    Args:
        group: of the optimizer: `params`, the masters with their gradients; `lr`, `betas`, `eps`, `weight_decay`.
        state: of the optimizer: `exp_avg` and `exp_avg_sq` per master.
        weights: the half-type weight of each master; empty if the masters are the weights.
        step: [5], see `DeviceCounters.advance`.
        frozen: masters that stay.
    """
    masters = [master for master in group["params"] if master not in frozen]
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
    """Updates all parameters of a rank in one pass: by one kernel if it is compiled, else block by block.

    They are in tensors [k, n], and a table has the group of every row of `width` numbers and what its rounding depends
    on.

    Args:
        tensors: those of `adamw`, [k, n] and in one order.
        groups: the parameter groups, of parts of the masters.
        parts: the place of each master.
        width: numbers per row of the table; it divides n.
        tp_rank: for `place_of`; None: moments are not rounded.
        compiles: let torch.compile fuse the update.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor | None],
        groups: list[dict[str, Any]],
        parts: dict[Tensor, Part],
        width: int,
        tp_rank: int | None,
        compiles: bool,
    ) -> None:
        fuse = partial(torch.compile, dynamic=False, options=HASH_AGAIN)
        self.adamw = fuse(adamw_of_groups) if compiles else adamw_in_blocks
        self.rates = tensors[1].new_zeros(len(groups) + 1, 5)
        self.rates[-1, -1] = 1.0  # of frozen parameters: all others are 0, and eps keeps the change from being 0 / 0
        self.parts, self.width, self.frozen = parts, width, set()
        self.tensors = [each if each is None else each.unflatten(1, (-1, width)) for each in tensors]
        self.index = torch.zeros(self.tensors[1].shape[:2], dtype=torch.int32, device=self.rates.device)
        self.place = None if tp_rank is None else torch.stack([self.index, self.index])
        for number, group in enumerate(groups):
            for master in group["params"]:
                name, param, start, _, _, size = parts[master]
                rows = self._rows(master)
                self.index[rows] = number
                if tp_rank is not None:
                    self.place[:, *rows] = place_of(name, param, tp_rank, width, start, start + size)

    def _rows(self, master: Tensor) -> tuple[int, slice]:
        """Where the table has a master."""
        part = self.parts[master]
        return part.row, slice(part.column // self.width, -(-(part.column + part.size) // self.width))

    def __call__(self, groups: list[dict[str, Any]], step: Tensor, frozen: set[Tensor]) -> None:
        """Update every parameter that is not frozen; see `update_by_torch`."""
        for master in frozen - self.frozen:
            self.index[self._rows(master)] = len(groups)
        self.frozen = frozen
        for row, group in zip(self.rates[:-1], groups, strict=True):
            for entry, rate in zip(row, _rates(group), strict=True):
                entry.fill_(rate)  # copying them from the host would wait for the device
        self.adamw(*self.tensors, step=step, rates=self.rates, groups=self.index, place=self.place)


def _rates(group: dict[str, Any]) -> tuple[float, float, float, float, float]:
    """The `rates` of `adamw`."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    return 1.0 - beta1, 1.0 - beta2, lr, lr * group["weight_decay"], group["eps"]


def adamw_of_groups(*tensors: Tensor | None, step: Tensor, rates: Tensor, groups: Tensor, place: Tensor | None) -> None:
    """`adamw` with the rates [number of groups, 5] of the parameter group of each row, int32 [..., k]."""
    adamw(*tensors, step, rates[groups].unsqueeze(-1).unbind(-2), place)


def adamw_in_blocks(*tensors: Tensor | None, step: Tensor, rates: Tensor, groups: Tensor, place: Tensor) -> None:
    """`adamw_of_groups` in blocks of rows: in a CPU's cache, an update takes 0.62 of the time."""
    at_once = UPDATED_AT_ONCE_ON_GPU if groups.is_cuda else BLOCK_ELEMENTS
    num_rows = max(1, at_once // tensors[1].shape[-1])
    num_pieces = max(1, num_rows // groups.shape[1])
    for piece, first in product(range(0, len(groups), num_pieces), range(0, groups.shape[1], num_rows)):
        block = slice(piece, piece + num_pieces), slice(first, first + num_rows)
        rows = (each if each is None else each[block] for each in tensors)
        adamw_of_groups(*rows, step=step, rates=rates, groups=groups[block], place=place[:, *block])


def adamw(
    weight: Tensor | None,
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    rates: Sequence[float | Tensor],
    place: Tensor | None,
) -> None:
    """Update rows of parameters in place: moments, masters, and from these the weights of a half type.

    bf16 moments are rounded stochastically. Rounded to nearest, the second moment would not change: with beta2 0.999 it
    moves by a thousandth per step, and bf16 has two to three digits. Stochastic rounding keeps the mean, so it follows.
    The random bits are a hash of (parameter, number of the update, row and column in the logical tensor), so they are
    the same on replicas, at every layout and after resuming.

    Shapes:
        weight, master, gradient, exp_avg, exp_avg_sq [..., k, n]; step [5]; place int32 [2, ..., k].

    Args:
        step: see `DeviceCounters.advance`.
        rates: 1 - beta1, 1 - beta2, the learning rate, its product with the weight decay, eps; numbers or [..., k, 1].
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
        bits = _random_bits(place, number.to(torch.int32), master.shape[-1])
        exp_avg.copy_(round_to_bf16(first, bits))
        exp_avg_sq.copy_(round_to_bf16(second, bits >> HALF_BITS))


def place_of(name: str, param: Tensor, tp_rank: int, width: int, first: int = 0, last: int | None = None) -> Tensor:
    """What the random bits depend on, for every `width` numbers of the part [first, last) of a parameter.

    A parameter of one dimension is one row.

    Shapes:
        returns int32 [2, k], keys of the parameter's rows and columns in the logical tensor where each starts.
    """
    start = {-1: 0, -2: 0}  # columns and rows on the tensor ranks before this one
    if param.shard.shard_dim is not None:
        dim = param.shard.shard_dim - param.ndim
        start[dim] = tp_rank * param.shape[dim]
    key = zlib.crc32(f"moments/{name}".encode()) - 2**31
    firsts = torch.arange(first, param.numel() if last is None else last, width, device=param.device)
    rows, columns = firsts // param.shape[-1] + start[-2], firsts % param.shape[-1] + start[-1]
    keys = keys_from_row(torch.full((1,), key, dtype=torch.int32, device=param.device), rows.int())
    return torch.stack([keys, columns.int()])


def _random_bits(place: Tensor, number: Tensor, width: int) -> Tensor:
    keys, first_columns = place.flatten(1).unbind()
    columns = first_columns[:, None, None] + torch.arange(width, dtype=torch.int32, device=place.device)
    rows = torch.zeros(1, dtype=torch.int32, device=place.device)  # that of each key is in it
    return counter_bits(keys + number * _UPDATE, rows, columns).view(*place.shape[1:], width)


def round_to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """Round stochastically to one of the two neighbouring bf16 numbers; the expectation is `x`.

    Shapes:
        x floating and bits int32 of any equal shape; the low half of `bits` counts. Returns bf16 of that shape.
    """
    lost = (1 << HALF_BITS) - 1
    noisy = x.float().view(torch.int32) + (bits & lost)  # a carry out of the lost bits is one step up in magnitude
    return (noisy & ~lost).view(torch.float32).to(torch.bfloat16)
