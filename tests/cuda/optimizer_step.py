"""Run optimizer steps on fake CUDA tensors; prints what the host and the device do, as JSON.

Runs in its own process: `python optimizer_step.py GUARD '{"dtype": "bf16", "compiles": true, ...}'`.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path

import fake_gpu

VIEWS = {"alias", "as_strided", "detach", "device", "expand", "select", "slice", "split", "t", "unbind", "unsqueeze"}
VIEWS |= {"view", "_unsafe_view"}
SYNCS = {"_local_scalar_dense", "equal", "is_nonzero", "item", "nonzero"}


def main(guard: str, case: dict) -> None:
    """Take optimizer steps of a small GPT: two that compile, one that runs every operation eagerly under `Watch`, and
    one under `Watch` without what is compiled."""
    fake_gpu.install(Path(guard))
    import torch
    from fake_ranks import grid
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from triton_kernels import calls_in, compile_to_cubin, kernels_in

    from lmscale.config import TransformerConfig
    from lmscale.config.training import OptimizerConfig, PrecisionConfig
    from lmscale.models import build_model
    from lmscale.training.step.optimizer import MixedPrecisionAdamW
    from lmscale.training.step.training_module import DTYPES

    class Watch(TorchDispatchMode):
        """Counts the operations of the device, and notes what makes the host wait or mixes devices."""

        def __init__(self) -> None:
            super().__init__()
            self.launches, self.syncs, self.mixed, self.copies = Counter(), Counter(), Counter(), Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            result = func(*args, **(kwargs or {}))
            made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            name = func.overloadpacket.__name__
            devices = {t.device.type for t in found}
            if name in SYNCS:
                self.syncs[name] += 1
            elif len({t.device.type for t in [*found, *made]}) > 1:
                waits = not (kwargs or {}).get("non_blocking") and not any(a is True for a in args)
                (self.copies if name in ("copy_", "_to_copy") and not waits else self.mixed)[name] += 1
            elif "cuda" in devices | {t.device.type for t in made} and name not in VIEWS:
                self.launches[name] += 1
            return result

    class Event:
        def record(self) -> None: ...

    torch.cuda.Event = Event
    sources = fake_gpu.capture_generated_code()
    cut = {name: case[name] for name in ("tp_size", "dp_size", "sequence_parallel", "zero1") if name in case}
    last = cut.get("tp_size", 1) * cut.get("dp_size", 1) - 1
    config = TransformerConfig("gpt", 3, 256, 8, 50257, 128)
    dtype, device = case["dtype"], torch.device("cuda")
    with grid(rank=last, **cut) as context, FakeTensorMode():
        model = build_model(config, context, seed=1, dtype=DTYPES[dtype], device=device)
        optimizer = MixedPrecisionAdamW(
            model.named_parameters(),
            OptimizerConfig(lr=1e-4, moments=case.get("moments", "fp32")),
            PrecisionConfig(dtype),
            context,
            case["compiles"],
        )
        parameters = list(model.parameters())

        def set_gradients(lr: float) -> None:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.zero_grad()
            for index, (param, view) in enumerate(zip(parameters, optimizer.buffer.views.values(), strict=True)):
                param.grad = torch.empty_like(param)
                optimizer.buffer._move_gradient(index, view, param)

        graphs = []
        for lr in (1e-4, 2e-4):
            set_gradients(lr)
            optimizer.reduce_gradients()
            optimizer.step()
            graphs.append(len(sources))
        set_gradients(3e-4)
        with Watch() as watch:
            optimizer.reduce_gradients()
            optimizer.step()
        calls = Counter()
        if case["compiles"]:

            def count(name: str, result=None):
                def called(*_, **__):
                    calls[name] += 1
                    return result

                return called

            optimizer._advance = count("advance", torch.empty(5, device=device))
            if optimizer._one_pass is not None:
                optimizer._one_pass.adamw = count("adamw")
        set_gradients(4e-4)
        optimizer.reduce_gradients()
        with Watch() as rest:
            optimizer.step()
    kernels = {name: kernel for source in sources for name, kernel in kernels_in(source).items()}
    print(
        json.dumps(
            {
                "graphs": [calls_in(source) for source in sources],
                "graphs_after_step": graphs,
                "syncs": watch.syncs,
                "mixed": watch.mixed,
                "copies": watch.copies,
                "eager_launches": rest.launches,
                "compiled_calls": calls,
                "cubins": {name: compile_to_cubin(kernel, 90) for name, kernel in kernels.items()},
                "bytes": {name: bytes_of(kernel) for name, kernel in kernels.items()},
            }
        )
    )


def bytes_of(kernel: str) -> int:
    """Bytes that a generated kernel loads and stores per element; numbers that several elements share do not count."""
    (signature,) = re.findall(r"'signature': \{(.*?)\}", kernel)
    sizes = {"fp64": 8, "fp32": 4, "i32": 4, "bf16": 2, "fp16": 2, "i1": 1}
    types = {name: sizes[kind] for name, kind in re.findall(r"'(\w+)': '\*(\w+)'", signature)}
    (element,) = re.findall(r"(x\d+) = xindex$", kernel, re.MULTILINE)
    # Where a rank updates parts of several pieces, an index into these is a sum.
    accesses = re.findall(rf"tl\.(?:load|store)\((\w+) \+ \((?:{element}|x\d+ \+ \d+\*x\d+)\)", kernel)
    return sum(types[name] for name in accesses)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
