"""What each sublayer does at chosen steps: the branch against the residual, its gradient, and attention's entropy."""

import json
import math
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from ...models.attention import SelfAttention
from ...models.layer import TransformerLayer
from ...parallel import gather_tokens
from ...parallel.pipeline import gather_from_stages
from ...shared_files import write_atomically
from ..loggers import LinesFile, keep_damaged
from ..step.layer_gradients import layer_gradient_norms

FILE = "layer_statistics.jsonl"
_SUBLAYER = re.compile(r"transformer\.layers\.(\d+)\.(attention|mlp)")


class LayerStatistics(L.Callback):
    """Records the statistics of each sublayer at chosen steps, before their update, in `layer_statistics.jsonl`.

    Per step one line: `step`, `num_sequences` of the micro-batch, and `sublayers`, for each layer attention and MLP:

    - `variance_ratio`: variance of the branch over that of the residual, both over the hidden dimension and averaged
      over positions. The branch is what is added: a sublayer's output, after its LayerNorm if that precedes the
      addition. The residual is what it is added to, without B2T's third term.
    - `constant_share`: share of the branch's mean square that does not depend on the sequence: at each position the
      square of its mean over the sequences. It is at least 1 / `num_sequences` by chance.
    - `gradient_norm`: L2 norm of the step's gradient of its weights and LayerNorms, before clipping.
    - `attention_entropy` in nats, averaged over heads and queries; attention only.

    All but the gradients are of one more forward pass, without dropout and uncompiled, of the step's first micro-batch
    on data rank 0, padding included. Training is not changed.

    Args:
        steps: steps counted from 1.
        folder: of the run.

    Communicates:
        at such a step over the tensor group: the forward pass, one all-reduce of 5 numbers per sublayer, and with
        sequence parallelism two all-gathers of [b, s, h] each; and as `gradient_norms_of_parts`.
    """

    def __init__(self, steps: list[int], folder: Path) -> None:
        self.steps, self.file = frozenset(steps), LinesFile(folder / FILE)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Drop the lines of steps that will be repeated."""
        if trainer.is_global_zero and self.file.path.is_file():
            path, done = self.file.path, pl_module.completed_steps
            try:
                lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
                kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= done]
                write_atomically(path, "".join(kept).encode())
            except ValueError:
                keep_damaged(path)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, *_: Any) -> None:
        """Measure the first micro-batch of a chosen step."""
        if self._is_chosen(pl_module) and pl_module.parallel.dp_rank == 0:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                self.sublayers = measure_sublayers(pl_module.model, lambda: pl_module.forward_pass(batch[0], None))
            self.num_sequences = len(batch[0]["tokens"])

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        """Add the gradients of a chosen step, and write its line."""
        if not self._is_chosen(pl_module):
            return
        norms = layer_gradient_norms(optimizer, lambda name: "/".join(_sublayer_of(name)))
        if not trainer.is_global_zero:
            return
        for entry in self.sublayers:
            entry["gradient_norm"] = norms[f"{entry['layer']}/{entry['sublayer']}"]
        line = {"step": pl_module.completed_steps + 1, "num_sequences": self.num_sequences, "sublayers": self.sublayers}
        self.file.append(line)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write what could not be written before."""
        self.file.finalize()

    def _is_chosen(self, pl_module: L.LightningModule) -> bool:
        return pl_module.completed_steps + 1 in self.steps


def _sublayer_of(parameter_name: str) -> tuple[str, ...]:
    found = _SUBLAYER.match(parameter_name)
    return ("other",) if found is None else found.groups()


def measure_sublayers(model: nn.Module, forward: Callable[[], Any]) -> list[dict[str, Any]]:
    """Statistics of every sublayer over one forward pass in evaluation mode, equal on all ranks of the model.

    Args:
        forward: computes `model` once.

    Communicates:
        what `forward` does, and over the tensor group one all-reduce of 5 numbers per sublayer and, with sequence
        parallelism, two all-gathers of [b, s, h] each; the entries over the stages.
    """
    was_training = model.training
    with ExitStack() as stack:
        observed = {
            (index, name): _Sublayer(model.transformer.layers[index], name, model.config.num_attention_heads, stack)
            for index in model.transformer.own_layers
            for name in ("attention", "mlp")
        }
        stack.callback(model.train, was_training)
        model.eval()
        forward()
    # All ranks have the same sums, except that of the entropies of their heads.
    totals = model.context.tp_communicator.all_reduce(torch.stack([each.sums() for each in observed.values()]))
    heads, found = model.config.num_attention_heads, []
    for (index, name), (branch, residual, constant, square, entropy) in zip(observed, totals.tolist(), strict=True):
        found.append({"layer": index, "sublayer": name})
        found[-1] |= {"variance_ratio": branch / residual, "constant_share": constant / square if square else math.nan}
        if name == "attention":
            found[-1]["attention_entropy"] = entropy / heads
    return [entry for entries in gather_from_stages(found, model.context) for entry in entries]


class _Sublayer:
    """Hooks on one sublayer, until `stack` ends, that add up what its statistics need; a batch may come in halves."""

    def __init__(self, layer: TransformerLayer, name: str, num_heads: int, stack: ExitStack) -> None:
        self.num_heads = num_heads
        sublayer, placement = getattr(layer, name), layer.placement
        entry = getattr(layer, f"{name}_{placement.before[0]}") if placement.before else sublayer
        exit_ = getattr(layer, f"{name}_{placement.after[0]}") if placement.before and placement.after else sublayer
        self.context, self.scale = layer.context, placement.residual_scale
        self.residual = self.branch = self.square = self.mean = self.entropy = 0.0
        self.num_sequences = 0
        stack.enter_context(entry.register_forward_pre_hook(self._see_residual))
        stack.enter_context(exit_.register_forward_hook(self._see_branch))
        if name == "attention":
            stack.enter_context(sublayer.qkv.register_forward_hook(self._see_qkv))
            stack.enter_context(sublayer.register_forward_hook(self._see_attention))

    def _see_residual(self, module: nn.Module, args: tuple) -> None:
        residual = gather_tokens(args[0], self.context)
        self.residual += (self.scale * residual.double()).var(-1, correction=0).sum()

    def _see_branch(self, module: nn.Module, args: tuple, output: Tensor) -> None:
        output = gather_tokens(output, self.context).double()  # [b, s, h]
        self.branch += output.var(-1, correction=0).sum()
        self.square += output.square().sum()
        self.mean += output.sum(0)
        self.num_sequences += len(output)

    def _see_qkv(self, module: nn.Module, args: tuple, output: Tensor) -> None:
        self.qkv = output

    def _see_attention(self, module: SelfAttention, args: tuple, output: Tensor) -> None:
        wide = torch.promote_types(self.qkv.dtype, torch.float32)
        q, k = (x.to(wide) for x in module.split_heads(self.qkv)[:2])
        s, mask, own = q.shape[-2], args[1], max(self.num_heads - module.first_head, 0)  # the others are dummies
        if mask is None and module.causal:
            mask = torch.ones(1, 1, s, s, dtype=torch.bool, device=q.device).tril()
        for i in range(len(q)):
            scores = module.scores(q[i, :own], k[i, :own])  # of one sequence: [n/p, s, s]
            if mask is not None:
                scores = scores.masked_fill(~mask[i % len(mask)], float("-inf"))
            self.entropy += torch.special.entr(scores.softmax(-1).double()).sum() / s
        del self.qkv

    def sums(self) -> Tensor:
        """This rank's fp64 [5]: the sums over positions, and of the entropies of its heads the mean over sequences."""
        constant = self.mean.square().sum() / self.num_sequences
        numbers = (self.branch, self.residual, constant, self.square, self.entropy / self.num_sequences)
        return torch.stack([torch.as_tensor(n, dtype=torch.float64, device=constant.device) for n in numbers])
