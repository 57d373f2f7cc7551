"""What is not finite: which part of the model when a run has diverged, and how many steps were skipped."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from ..step.counters import Counters
from ..step.training_module import MicroBatch, TrainingModule


def diagnose(module: TrainingModule, micro_batches: list[MicroBatch]) -> dict[str, Any]:
    """List what is not finite on this rank after a step: weights, gradients, and the first output in a forward pass.

    Args:
        micro_batches: of the step.
    """
    report: dict[str, Any] = parameters_that_are_not_finite(module.model, module.optimizer.gradients())
    eager = torch.compiler.set_stance("force_eager")  # hooks break the graphs: each layer would be compiled in pieces
    with torch.no_grad(), eager, FirstNonFiniteOutput(module.model) as watched:
        for micro_batch in micro_batches:  # all: the tensor ranks communicate, and may not see the same values
            module.forward_pass(micro_batch, module.dropout_keys(micro_batch))
    place = {name: getattr(module.parallel, name) for name in ("tp_rank", "pp_rank", "dp_rank")}
    return report | {"forward": watched.name} | place


def parameters_that_are_not_finite(model: nn.Module, gradients: dict[str, Tensor]) -> dict[str, list[str]]:
    """Names of this rank's parameters whose weight, or gradient, is not finite, in registration (forward) order."""
    weights = [name for name, param in model.named_parameters() if not bool(param.isfinite().all())]
    bad = [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]
    return {"weights": weights, "gradients": bad}


def count_updates(counters: Counters) -> dict[str, dict[str, Any]]:
    """The record's counts of updates and skipped steps; prints a warning if no step has changed the weights."""
    if counters.num_skipped and not counters.num_updates:
        scale = "" if counters.loss_scale == 1 else f"; the loss scale is still {counters.loss_scale:g}"
        print(
            f"WARNING: the weights are the initial ones: every step ({counters.num_skipped}) was skipped for a "
            f"gradient that is not finite{scale}",
            file=sys.stderr,
            flush=True,
        )
    counts = {name: getattr(counters, name) for name in ("num_updates", "num_skipped")}
    return {name: {"value": count, "unit": "steps"} for name, count in counts.items()}


class FirstNonFiniteOutput:
    """Watches a forward pass for the first submodule whose output is not finite.

    Use as a context manager around the pass; `name` is then the submodule's dotted name, or None.
    """

    def __init__(self, model: nn.Module) -> None:
        self.name: str | None = None
        self._model = model
        self._handles: list[Any] = []

    def __enter__(self) -> "FirstNonFiniteOutput":
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_hook(lambda _m, _i, out, name=name: self._look(name, out)))
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _look(self, name: str, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        # Logits, whose padded columns are -inf by design, are no module's output: the model returns losses.
        if self.name is None and any(isinstance(o, Tensor) and not o.isfinite().all() for o in outputs):
            self.name = name


def first_cause(reports: list[dict[str, Any]], names: list[str]) -> str:
    """Name the first cause in the ranks' reports: a weight, else a submodule of the forward pass, else a gradient.

    In the backward pass, non-finite values spread from the loss towards the input, so the first gradient is the one
    nearest to the loss: the last in forward order.

    Args:
        names: of the model's parameters in forward order (`MixedPrecisionAdamW.all_names`).
    """
    for report in reports:
        if report["weights"]:
            return f"the weight {report['weights'][0]}"
    for report in reports:
        if report["forward"]:
            return f"the output of {report['forward']} in the forward pass"
    bad = {name.partition("[")[0] for report in reports for name in report["gradients"]}  # with ZeRO-1 of parts
    if bad:
        return f"the gradient of {max(bad, key=names.index)}"
    return "nothing: all weights, outputs and gradients are finite now"
