"""Options of torch.compile for a model's layers."""

from typing import Any

from ..parallel import KEEP_OVERLAP, ParallelContext

# Inductor stores a value that takes more operations than this and that is used several times. At its default of 30 it
# stores the int32 hash of every dropout mask, 4 bytes per element, instead of hashing again, which reads nothing.
# For GPUs, whose element-wise kernels wait for memory; on a CPU it was not measured.
HASH_AGAIN = {"realize_opcount_threshold": 100}


def compiler_options(context: ParallelContext, on_gpu: bool, cuda_graphs: bool = False) -> dict[str, Any]:
    """The options with which a rank compiles its layers.

    Args:
        cuda_graphs: record the layers and replay them.
    """
    options: dict[str, Any] = {}
    if context.tp_size > 1:
        options |= KEEP_OVERLAP
    if on_gpu:
        options |= HASH_AGAIN
    if cuda_graphs:
        options["triton.cudagraphs"] = True
    return options
