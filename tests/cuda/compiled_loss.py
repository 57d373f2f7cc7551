"""Compile the passes over the logits (`linear_cross_entropy`) for a simulated GPU; prints as `compiled_layer.py` does.

Runs in its own process: `python compiled_loss.py GUARD '[{"tp_size": 8, "tp_rank": 7, "bias": true}, ...]'`.
"""

import json
import sys
from pathlib import Path

import fake_gpu

VOCABULARY, PADDED = 50257, 51200
ROWS_AT_ONCE, ROWS = 1024, 2560  # of a chunk; two chunks and a shorter one
HIDDEN = 512


def compile_loss(case: dict, sources: list[str]) -> dict:
    """Compile the loss's kernels for one rank, and each of them to cubins.

    Args:
        case: any of `tp_size`, `tp_rank`, `dtype` and `bias`.
        sources: collects the generated modules (`capture_generated_code`).
    """
    import torch
    from fake_ranks import grid
    from torch._subclasses.fake_tensor import FakeTensorMode
    from triton_kernels import describe, start_over

    from lmscale import partition
    from lmscale.parallel import chunked_cross_entropy
    from lmscale.training.step.training_module import DTYPES

    start_over(sources)
    chunked_cross_entropy._kernel.cache_clear()
    tp_size, dtype = case.get("tp_size", 1), DTYPES[case.get("dtype", "bf16")]
    partition.LOGITS_AT_ONCE_ON_GPU = ROWS_AT_ONCE * PADDED // tp_size
    with grid(tp_size, rank=case.get("tp_rank", 0)) as context, FakeTensorMode():
        like = {"dtype": dtype, "device": "cuda", "requires_grad": True}
        hidden = torch.empty(ROWS, HIDDEN, **like)
        weight = torch.empty(PADDED // tp_size, HIDDEN, **like)
        bias = torch.empty(PADDED // tp_size, **like) if case.get("bias") else None
        labels = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
        loss = chunked_cross_entropy.linear_cross_entropy(
            hidden, weight, bias, labels, VOCABULARY, context, compiled=True
        )
        loss.backward()
    return describe(sources)


if __name__ == "__main__":
    fake_gpu.install(Path(sys.argv[1]))
    sources = fake_gpu.capture_generated_code()
    print(json.dumps([compile_loss(case, sources) for case in json.loads(sys.argv[2])]))
