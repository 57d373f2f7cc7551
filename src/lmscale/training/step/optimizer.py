"""AdamW with fp32 master weights, a dynamic loss scale and clipping by the norm of the whole model."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...config.training import OptimizerConfig, PrecisionConfig
from ...parallel import ParallelContext, global_gradient_norm, sync_replicated_gradients
from ...parallel.pipeline import add_to_owner, copy_from_owner, gather_from_stages
from .adamw import OnePass, update_by_torch
from .counters import DeviceCounters
from .gradient_buffer import GradientBuffer, needs_buffer
from .optimizer_state import MOMENTS, OptimizerState


class MixedPrecisionAdamW(OptimizerState, torch.optim.Optimizer):
    """AdamW over one rank's shard: unscale, agree on overflow, clip by the global norm, update fp32 masters, copy back.

    Parameters of half types have an fp32 master; fp32 and fp64 parameters are their own masters. Gradients are added,
    in fp32 for half types, in a `GradientBuffer`, or by autograd if `needs_buffer` is false. With `context.zero1` a
    data rank has masters and moments only of its part of the buffer. Weight decay applies to matrices and embeddings,
    not to biases and LayerNorms (section 4.2), which are the parameters of one dimension. Rates, decay and eps have the
    factors of `ShardSpec`. If a gradient is not finite on any rank, all ranks skip the step: weights and moments stay,
    `Counters.num_skipped` increases.

    Norm, overflow, clipping, loss scale and counters stay on the device: `step` has no host synchronization.

    Args:
        named_parameters: (name, parameter) of the rank's model; with a buffer their storage moves.
        config, precision: see `config.training`.
        context: gives the groups for norm, overflow and sums.
        compiles: where there is a buffer, one compiled kernel updates all parameters; it differs from torch's AdamW in
            the last bits.

    Attributes:
        all_names: names of all parameters of the model.
        tied: the word embedding in the first or the last of several stages (`ShardSpec.tie`).
        copy_buffer: the gradient of its copy, in the last stage.
        names, masters: parallel lists of what this rank updates: parameters, with `context.zero1` also parts of them,
            flat and named as `name[start:stop]`.
        own: with a buffer, all masters and moments, by kind (`GradientBuffer.own`).
        weights: the half-type weight of each master; empty if the masters are the weights.
        dtypes: of the masters and of both moments, by kind: `model`, `exp_avg`, `exp_avg_sq`.
        counters: updates and skipped steps, gradient norm and loss scale.

    Communicates:
        as `reduce_gradients`, and per step as `global_gradient_norm`; with `context.zero1` the weights as
        `GradientBuffer.gather`; with several stages as `copy_from_owner`.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        precision: PrecisionConfig,
        context: ParallelContext,
        compiles: bool = False,
    ) -> None:
        parameters = dict(named_parameters)
        self.tied = next((param for param in parameters.values() if param.shard.tie), None)
        self.copy_buffer: GradientBuffer | None = None
        if self.tied is not None and self.tied.shard.tie == "copy":
            parameters = {name: param for name, param in parameters.items() if param is not self.tied}
            self.copy_buffer = GradientBuffer({"copy": self.tied}, ParallelContext())
        first = next(iter(parameters.values()))
        self.holds_masters = first.dtype in (torch.float16, torch.bfloat16)
        self.context, self.device = context, first.device
        self.buffer: GradientBuffer | None = None
        rounds = config.moments == "bf16"
        accumulation_dtype = torch.promote_types(first.dtype, torch.float32)
        moments_dtype = torch.bfloat16 if rounds else accumulation_dtype
        self.dtypes = {"model": accumulation_dtype} | dict.fromkeys(MOMENTS, moments_dtype)
        if needs_buffer(first.dtype, context, rounds):
            self.buffer = GradientBuffer(parameters, context, held=self.tied)
        views = [None] * len(parameters) if self.buffer is None else self.buffer.views
        tied = (view for view, param in zip(views, parameters.values(), strict=True) if param is self.tied)
        self._tied_gradient = next(tied, None) if self.copy_buffer is None else self.copy_buffer.views[0]
        self.all_names = [name for names in gather_from_stages(list(parameters), context) for name in names]
        self.own: dict[str, Tensor] = {}
        if self.buffer is None:
            updated = self.masters = list(parameters.values())
            self.names = list(parameters)
            moments = [[torch.zeros_like(m, dtype=moments_dtype) for m in self.masters] for _ in MOMENTS]
        else:
            weights, gradients = (self.buffer.own(flat) for flat in (self.buffer.weights, self.buffer.flat))
            masters = weights.to(accumulation_dtype)
            self.own = {"model": masters} | {k: torch.zeros_like(masters, dtype=moments_dtype) for k in MOMENTS}
            parts = self.buffer.parts
            self.names = [p.name if p.is_whole else f"{p.name}[{p.start}:{p.start + p.size}]" for p in parts]
            updated, views = [part.param for part in parts], self.buffer.part_views(gradients)
            self.masters, *moments = (self.buffer.part_views(each) for each in self.own.values())
            for param, master, gradient in zip(updated, self.masters, views, strict=True):
                master.shard, master.grad = param.shard, gradient
        self.weights: dict[Tensor, Tensor] = {}
        if self.holds_masters:
            self.weights = dict(zip(self.masters, self.buffer.part_views(weights), strict=True))
        self.max_grad_norm = config.max_grad_norm
        betas = (config.beta1, config.beta2)
        self.counters = DeviceCounters(precision, betas, self.device)
        # A data rank may have parts of neither kind, but torch wants a group; these two are those of `standard`.
        groups: dict[tuple[bool, float, float], list[Tensor]] = {(True, 1.0, 1.0): [], (False, 1.0, 1.0): []}
        for param, master in zip(updated, self.masters, strict=True):
            key = param.ndim > 1, param.shard.rate_factor, param.shard.eps_factor
            groups.setdefault(key, []).append(master)
        super().__init__(
            [
                {
                    "params": masters,
                    "weight_decay": config.weight_decay / rate_factor if decays else 0.0,
                    "rate_factor": rate_factor,
                    "eps": config.eps * eps_factor,
                }
                for (decays, rate_factor, eps_factor), masters in groups.items()
            ],
            {"lr": config.lr, "betas": betas},
        )
        for master, *values in zip(self.masters, *moments, strict=True):
            self.state[master] = dict(zip(MOMENTS, values, strict=True))
        self._advance = torch.compile(self.counters.advance) if compiles else self.counters.advance
        self._one_pass: OnePass | None = None
        if self.buffer is not None and (compiles or rounds):
            model, *moments = self.own.values()
            tensors = [weights if self.holds_masters else None, model, gradients, *moments]
            places, tp_rank = dict(zip(self.masters, parts, strict=True)), context.tp_rank if rounds else None
            self._one_pass = OnePass(tensors, self.param_groups, places, self.buffer.width, tp_rank, compiles)

    def start_grad_sync(self) -> None:
        """Reduce the gradients during the next backward pass, the last of the step (`GradientBuffer`)."""
        if self.buffer is not None:
            self.buffer.start_grad_sync()

    def reduce_gradients(self) -> None:
        """Add the gradients over the data group, and make those of replicated parameters the same on all ranks.

        Communicates:
            as `GradientBuffer.reduce`; as `sync_replicated_gradients`, of the replicated parameters that this rank
            updates; in a pipeline first as `add_to_owner`.
        """
        if self.copy_buffer is not None:
            self.copy_buffer.complete()
        if self.tied is not None:
            add_to_owner(self.tied.grad if self._tied_gradient is None else self._tied_gradient, self.context)
        if self.buffer is not None:
            self.buffer.reduce()
        sync_replicated_gradients(self.masters, self.context)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the step by parameter name; parameters without one are left out."""
        return {n: m.grad for n, m in zip(self.names, self.masters, strict=True) if m.grad is not None}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients."""
        if self.copy_buffer is not None:
            self.copy_buffer.clear()
        if self.buffer is not None:
            self.buffer.clear()
            return
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the weights, or skip the step if a gradient is not finite; see the class."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        if self.buffer is not None:
            self.buffer.complete()
        norm = global_gradient_norm(self.masters, self.context, self.device)
        step = self._advance(norm, self.max_grad_norm, self.dtypes["model"])
        if self._one_pass is not None:
            self._one_pass(self.param_groups, step)
        else:
            for group in self.param_groups:
                update_by_torch(group, self.state, self.weights, step)
        if self.context.zero1:
            self.buffer.gather(self.buffer.weights)
        if self.tied is not None:
            copy_from_owner(self.tied.detach(), self.context)
        self.counters.publish()
