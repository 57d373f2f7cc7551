"""What is not finite: which part of the model when a run has diverged, and how many steps were skipped."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from ..runtime.messages import warn
from .step.counters import Counters
from .step.training_module import MicroBatch, TrainingModule


def diagnose(module: TrainingModule, micro_batches: list[MicroBatch]) -> dict[str, Any]:
    """List what is not finite on this rank after a step: weights, gradients, and the first output in a forward pass.

    Names are in registration (forward) order; the output's is that of its submodule, or None.

    Args:
        micro_batches: of the step.
    """
    module.optimizer.buffer.wait_for_weights()
    weights, gradients = module.model.named_parameters(), module.optimizer.gradients().items()
    layers, outputs = {layer: name for name, layer in module.model.named_modules()}, []

    def look(layer: nn.Module, inputs: Any, output: Any) -> None:
        # Logits, whose padded columns are -inf by design, are no module's output: the model returns losses.
        found = output if isinstance(output, tuple) else (output,)
        if layer in layers and any(isinstance(each, Tensor) and not each.isfinite().all() for each in found):
            outputs.append(layers[layer])

    report: dict[str, Any] = {
        "weights": [name for name, param in weights if not param.isfinite().all()],
        "gradients": [name for name, gradient in gradients if not gradient.isfinite().all()],
    }
    eager = torch.compiler.set_stance("force_eager")  # hooks break the graphs: each layer would be compiled in pieces
    with torch.no_grad(), eager, register_module_forward_hook(look):
        for micro_batch in micro_batches:  # all: the tensor ranks communicate, and may not see the same values
            module.forward_pass(micro_batch, module.dropout_keys(micro_batch))
    place = {name: getattr(module.parallel, name) for name in ("tp_rank", "pp_rank", "dp_rank")}
    return report | {"forward": next(iter(outputs), None)} | place


def count_updates(counters: Counters) -> dict[str, dict[str, Any]]:
    """The record's counts of updates and skipped steps; prints a warning if no step has changed the weights."""
    if counters.num_skipped and not counters.num_updates:
        scale = "" if counters.loss_scale == 1 else f"; the loss scale is still {counters.loss_scale:g}"
        warn(
            f"the weights are the initial ones: every step ({counters.num_skipped}) was skipped for a gradient that is "
            f"not finite{scale}"
        )
    counts = {name: getattr(counters, name) for name in ("num_updates", "num_skipped")}
    return {name: {"value": count, "unit": "steps"} for name, count in counts.items()}


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
