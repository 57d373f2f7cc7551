"""Compile layers, or a micro-batch of a model, for a simulated GPU; prints what torch.compile generated, as JSON.

Runs in its own process: `python compiled_layer.py GUARD '{"tp_size": 2, "tp_rank": 1, ...}'`; a list of cases gives the
list of their results.
"""

import json
import sys
from pathlib import Path
from typing import Any

import fake_gpu

SAMPLES, LENGTH, HIDDEN, HEADS = 2, 256, 512, 8


def compile_layer(case: dict, sources: list[str]) -> dict:
    """Compile forward and backward pass of a layer, and each of its Triton kernels to cubins.

    Args:
        case: what differs from one GPT layer in bf16 on one rank: `tp_size`, `tp_rank`, `sequence_parallel`,
            `batch_halves`, `family` (BERT's layer gets an attention mask), `dtype`, `float8`, `model` (other fields of
            its config), and `fault` (`planted_faults.py`); with `num_layers` a micro-batch of a whole model is
            compiled; with `cubins` false, kernels are not.
        sources: collects the generated modules (`capture_generated_code`).
    """
    import torch
    from fake_ranks import grid
    from planted_faults import planted
    from torch._functorch import partitioners
    from torch._functorch._aot_autograd import utils as aot
    from torch._subclasses.fake_tensor import FakeTensorMode
    from triton_kernels import describe, start_over

    from lmscale.config import TransformerConfig
    from lmscale.kernels import Kernels
    from lmscale.models import build_model
    from lmscale.training.step.training_module import DTYPES

    clones = []
    get_generator = aot.get_default_generator
    partitioners.get_default_generator = lambda device: clones.append(str(device)) or get_generator(device)
    start_over(sources)
    tp_size, cut = case.get("tp_size", 1), case.get("sequence_parallel", False)
    family, num_layers = case.get("family", "gpt"), case.get("num_layers", 1)
    config = TransformerConfig(family, num_layers, HIDDEN, HEADS, 50257, LENGTH, **case.get("model", {}))
    kernels, dtype = Kernels(float8=case.get("float8", False), compiles=True), DTYPES[case.get("dtype", "bf16")]
    faulty, like = planted(case.get("fault")), {"device": "cuda", "dtype": dtype}
    options = {"sequence_parallel": cut, "batch_halves": case.get("batch_halves", False)}
    with grid(tp_size, rank=case.get("tp_rank", 0), **options) as context, FakeTensorMode(), faulty:
        model = build_model(config, context, seed=None, **like, kernels=kernels)
        if "num_layers" in case:
            run_micro_batch(model)
        else:
            x = torch.empty(SAMPLES, LENGTH // tp_size if cut else LENGTH, HIDDEN, requires_grad=True, **like)
            mask = torch.ones(SAMPLES, 1, 1, LENGTH, dtype=torch.bool, device="cuda") if family == "bert" else None
            y = model.transformer.layers[0](x, mask, torch.empty(3, SAMPLES, dtype=torch.int32, device="cuda"))
            y.backward(torch.empty_like(y))
    return describe(sources, case.get("cubins", True)) | {"cloned_generators": clones}


def run_micro_batch(model: Any) -> None:
    """Forward and backward pass of one micro-batch."""
    import torch

    from lmscale.config.family import family_of, load

    tokens, keys = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in ((SAMPLES, LENGTH), SAMPLES))
    batch = {"tokens": tokens, "token_types": tokens, "labels": tokens, "attention_mask": tokens.bool()}
    batch |= {"sop_labels": tokens[:, 0], "scored": tokens.flatten()[:37]}
    loss = load(family_of(model.config.family).loss)
    loss.loss_sums(model, batch, keys.int()).sum().backward()


if __name__ == "__main__":
    fake_gpu.install(Path(sys.argv[1]))
    sources, cases = fake_gpu.capture_generated_code(), json.loads(sys.argv[2])
    several = isinstance(cases, list)
    found = [compile_layer(case, sources) for case in (cases if several else [cases])]
    print(json.dumps(found if several else found[0]))
