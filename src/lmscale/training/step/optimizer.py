"""AdamW with fp32 master weights, a dynamic loss scale and clipping by the norm of the whole model."""

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...config.training import OptimizerConfig, PrecisionConfig
from ...models.transformer import Transformer
from ...parallel import ParallelContext, global_gradient_norm, sync_replicated_gradients
from ...parallel.pipeline import add_to_owner, copy_from_owner, gather_from_stages
from .adamw import OnePass, update_by_torch
from .counters import DeviceCounters
from .gradient_buffer import GradientBuffer

MOMENTS = ("exp_avg", "exp_avg_sq")


class MixedPrecisionAdamW(torch.optim.Optimizer):
    """AdamW over one rank's shard: unscale, agree on overflow, clip by the global norm, update fp32 masters, copy back.

    Parameters of half types have an fp32 master; fp32 and fp64 parameters are their own masters. A `GradientBuffer`
    adds the gradients. With `context.zero1` a data rank has masters and moments only of its part of the buffer. Weight
    decay applies to matrices and embeddings, not to biases and LayerNorms (section 4.2), which are the parameters of
    one dimension. Rates, decay and eps have the factors of `ShardSpec`. If a gradient is not finite on any rank, all
    ranks skip the step: weights and moments stay, `Counters.num_skipped` increases.

    A parameter with `requires_grad_(False)` stays to the bit, with its moments, and is not in the norm. All ranks that
    hold it must freeze it. One that no micro-batch uses has a gradient of zero, and decays.

    Norm, overflow, clipping, loss scale and counters stay on the device: `step` has no host synchronization.

    Args:
        named_parameters: (name, parameter) of the rank's model; their storage moves into the buffer.
        config, precision: see `config.training`.
        context: gives the groups for norm, overflow and sums.
        compiles: one compiled kernel updates all parameters; it differs from torch's AdamW in the last bits.

    Attributes:
        all_names: names of all parameters of the model.
        tied: the word embedding in the first or the last of several stages (`ShardSpec.tie`).
        copy_buffer: the gradient of its copy, in the last stage.
        names, masters: parallel lists of what this rank updates: parameters, with `context.zero1` also parts of them,
            flat and named as `name[start:stop]`.
        own: all masters and moments, by kind (`GradientBuffer.own`).
        weights: the half-type weight of each master; empty if the masters are the weights.
        dtypes: of the masters and of both moments, by kind: `model`, `exp_avg`, `exp_avg_sq`.
        counters: updates and skipped steps, gradient norm and loss scale.

    Communicates:
        as `reduce_gradients`, and per step as `global_gradient_norm`; with `context.zero1` the weights as
        `GradientBuffer.begin_gather`; with several stages as `copy_from_owner`.
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
        tied = next((name for name, param in parameters.items() if param.shard.tie), None)
        self.tied, self.copy_buffer, self._overlaps_gather = parameters.get(tied), None, False
        if self.tied is not None and self.tied.shard.tie == "copy":
            self.copy_buffer = GradientBuffer({tied: parameters.pop(tied)}, ParallelContext())
        self.buffer = GradientBuffer(parameters, context, held=self.tied)
        self._tied_gradient = (self.copy_buffer or self.buffer).views.get(tied)
        self.context, self.device, dtype = context, self.buffer.flat.device, self.buffer.weights.dtype
        self.holds_masters = dtype != self.buffer.flat.dtype
        self.all_names = [name for names in gather_from_stages(list(parameters), context) for name in names]
        rounds = config.moments == "bf16"
        moments_dtype = torch.bfloat16 if rounds else self.buffer.flat.dtype
        self.dtypes = {"model": self.buffer.flat.dtype} | dict.fromkeys(MOMENTS, moments_dtype)
        weights, gradients = (self.buffer.own(flat) for flat in (self.buffer.weights, self.buffer.flat))
        masters = weights.to(gradients.dtype)
        self.own = {"model": masters} | {k: torch.zeros_like(masters, dtype=moments_dtype) for k in MOMENTS}
        parts = self.buffer.parts
        self.names = [p.name if p.is_whole else f"{p.name}[{p.start}:{p.start + p.size}]" for p in parts]
        self.masters, *moments = (self.buffer.part_views(each) for each in self.own.values())
        for part, master, gradient in zip(parts, self.masters, self.buffer.part_views(gradients), strict=True):
            master.shard, master.grad = part.param.shard, gradient
        self._parameters, self._part_of = parameters, dict(zip(self.masters, parts, strict=True))
        self._frozen: set[str] = set()
        self.weights: dict[Tensor, Tensor] = {}
        if self.holds_masters:
            self.weights = dict(zip(self.masters, self.buffer.part_views(weights), strict=True))
        self.max_grad_norm = config.max_grad_norm
        betas = (config.beta1, config.beta2)
        self.counters = DeviceCounters(precision, betas, self.device)
        # A data rank may have parts of neither kind, but torch wants a group; these two are those of `standard`.
        groups: dict[tuple[bool, float, float], list[Tensor]] = {(True, 1.0, 1.0): [], (False, 1.0, 1.0): []}
        for part, master in zip(parts, self.masters, strict=True):
            key = part.param.ndim > 1, master.shard.rate_factor, master.shard.eps_factor
            groups.setdefault(key, []).append(master)
        super().__init__(
            [
                {
                    "params": masters,
                    "weight_decay": config.weight_decay / rate_factor if decays else 0.0,
                    "lr": config.lr * rate_factor,  # a schedule of torch's starts from it
                    "rate_factor": rate_factor,
                    "eps": config.eps * eps_factor,
                }
                for (decays, rate_factor, eps_factor), masters in groups.items()
            ],
            {"betas": betas},
        )
        for master, *values in zip(self.masters, *moments, strict=True):
            self.state[master] = dict(zip(MOMENTS, values, strict=True))
        self._advance = torch.compile(self.counters.advance) if compiles else self.counters.advance
        self._one_pass: OnePass | None = None
        if compiles or rounds:
            tensors = [weights if self.holds_masters else None, masters, gradients, *(self.own[k] for k in MOMENTS)]
            tp_rank = context.tp_rank if rounds else None
            self._one_pass = OnePass(tensors, self.param_groups, self._part_of, self.buffer.width, tp_rank, compiles)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's; raises `ValueError` once the optimizer is complete, which has all parameters from the start."""
        if hasattr(self, "_advance"):
            raise ValueError(
                "`add_param_group` must not be called: this optimizer has all parameters of the model; freeze some by "
                "`requires_grad_(False)`"
            )
        super().add_param_group(param_group)

    def gather_behind(self, transformer: Transformer) -> None:
        """With ZeRO-1, let `step` return before the weights are there: each layer of the next forward pass waits for
        its own. Whatever else reads weights must call `GradientBuffer.wait_for_weights` before."""
        buffer = self.buffer  # a function with the optimizer would keep the moments as long as the model
        transformer.before_layer = lambda layer: buffer.wait_for_weights(None if layer is None else layer.parameters())
        self._overlaps_gather = True

    def start_grad_sync(self) -> None:
        """Reduce the gradients during the next backward pass, the last of the step (`GradientBuffer`)."""
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
            add_to_owner(self._tied_gradient, self.context)
        self.buffer.reduce()
        sync_replicated_gradients(self.masters, self.context)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the step by name."""
        return {name: master.grad for name, master in zip(self.names, self.masters, strict=True)}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients."""
        if self.copy_buffer is not None:
            self.copy_buffer.clear()
        self.buffer.clear()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the weights, or skip the step if a gradient is not finite; see the class.

        Raises:
            ValueError: a parameter was frozen in an earlier step and is not any more.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.buffer.wait_for_weights()  # this rank's part, which is sent, is overwritten next
        self.buffer.complete()
        frozen = self._find_frozen()
        norm = global_gradient_norm((m for m in self.masters if m not in frozen), self.context, self.device)
        self.counters.take_betas(self.param_groups[0]["betas"])
        step = self._advance(norm, self.max_grad_norm, self.dtypes["model"])
        if self._one_pass is not None:
            self._one_pass(self.param_groups, step, frozen)
        else:
            for group in self.param_groups:
                update_by_torch(group, self.state, self.weights, step, frozen)
        if self.context.zero1:
            self.buffer.begin_gather()
            if not self._overlaps_gather:
                self.buffer.wait_for_weights()
        if self.tied is not None:
            if self.copy_buffer is None:
                self.buffer.wait_for_weights([self.tied])
            copy_from_owner(self.tied.detach(), self.context)
        self.counters.publish()

    def _find_frozen(self) -> set[Tensor]:
        """The masters of frozen parameters."""
        frozen = {name for name, param in self._parameters.items() if not param.requires_grad}
        if thawed := sorted(self._frozen - frozen):
            # Adam's corrections count the updates of all: the first ones of these would be up to 7 times too large.
            raise ValueError(
                f"`requires_grad` of {thawed[0]} must stay False until another `fit`, because it was frozen in an "
                "earlier step, but is True"
            )
        self._frozen = frozen
        return {master for master, part in self._part_of.items() if part.name in frozen} if frozen else set()

    @property
    def kinds(self) -> dict[str, torch.dtype]:
        """The kinds of tensors that a checkpoint has, and their types: moments only after the first update."""
        return self.dtypes if self.counters.read().num_updates else {"model": self.dtypes["model"]}

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments of `names` by checkpoint key, `model/<name>`, `exp_avg/<name>`, `exp_avg_sq/<name>`:
        shards, not copies. For half types the weights are the fp32 masters.
        """
        return {
            f"{kind}/{name}": master.detach() if kind == "model" else self.state[master][kind]
            for name, master in zip(self.names, self.masters, strict=True)
            for kind in self.kinds
        }

    @torch.no_grad()
    def whole_tensors(self, keys: Container[str]) -> dict[str, Tensor]:
        """`tensors` of whole parameters: with ZeRO-1 copies in host memory of those in `keys`, else all.

        Communicates:
            with ZeRO-1 as `GradientBuffer.gather` for each kind, in the place of the gradients.
        """
        if not self.context.zero1:
            return self.tensors()
        found = {}
        for kind, dtype in self.kinds.items():
            self.buffer.own(self.buffer.flat).copy_(self.own[kind])
            self.buffer.gather(self.buffer.flat)
            for name, view in self.buffer.views.items():
                if (key := f"{kind}/{name}") in keys:
                    found[key] = view.to("cpu", dtype, copy=True)
        return found

    def state_dict(self) -> dict[str, Any]:
        """The counters, which a checkpoint has besides the tensors."""
        counters = self.counters.read()._asdict()
        del counters["grad_norm"]
        return counters if self.counters.dynamic else counters | {"loss_scale": None}

    @torch.no_grad()
    def take_weights(self) -> None:
        """Let the masters be half-type weights where these were written since; elsewhere they keep their other bits."""
        for master, weight in self.weights.items():
            master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight))

    @torch.no_grad()
    def load_masters(self, read_into: Callable[[str, Tensor], None]) -> None:
        """Load the fp32 masters of half-type parameters from a checkpoint.

        Args:
            read_into: fills a tensor with this rank's shard of the logical tensor of a checkpoint key.
        """
        if self.holds_masters:
            self._load("model", read_into)

    @torch.no_grad()
    def load_moments(self, counters: dict[str, Any], read_into: Callable[[str, Tensor], None]) -> None:
        """Load the moments in place, and the counters of `state_dict`."""
        self.counters.load(counters)
        if counters["num_updates"]:
            for kind in MOMENTS:
                self._load(kind, read_into)

    def _load(self, kind: str, read_into: Callable[[str, Tensor], None]) -> None:
        own = self.buffer.own(self.buffer.flat)  # in the place of the gradients
        own.copy_(self.own[kind])  # `read_into` may leave some as they are
        for name, view in self.buffer.views.items():
            read_into(f"{kind}/{name}", view)
        self.own[kind].copy_(own)
