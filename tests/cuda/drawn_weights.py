"""Draw weights by counter with the kernel that torch.compile writes for a GPU, by Triton's interpreter; prints JSON.

Runs in its own process: `python drawn_weights.py GUARD`.
"""

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import fake_gpu

SHAPE, FIRST_ROW, FIRST_COLUMN = (37, 200), 2**20, 5


def main(guard: str) -> None:
    """Whether the kernel's numbers have the bits of eager ones, by type."""
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    fake_gpu.install(Path(guard))
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from triton_kernels import kernels_in

    from lmscale.parallel.rng import counter_normal, normal_keys, normal_quantiles

    def fill(out: torch.Tensor, keys: torch.Tensor, quantiles: torch.Tensor) -> None:
        out.copy_(counter_normal(keys, *out.shape, FIRST_ROW, FIRST_COLUMN, quantiles) * 0.02)

    keys, quantiles = normal_keys(1, "w"), normal_quantiles(torch.device("cpu"))
    sources, equal = fake_gpu.capture_generated_code(), {}
    for dtype in (torch.float32, torch.float16):  # to bf16 the interpreter truncates, where a GPU rounds to nearest
        expected, drawn = torch.zeros(2, *SHAPE, dtype=dtype)
        fill(expected, keys, quantiles)
        with FakeTensorMode():
            on_gpu = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in (drawn, keys, quantiles)]
            torch.compile(fill, dynamic=False, fullgraph=True)(*on_gpu)
        (kernel,) = kernels_in(sources[-1]).values()
        run(kernel, drawn, [keys, quantiles])
        equal[str(dtype)] = torch.equal(drawn, expected) and drawn.unique().numel() > 1000
    print(json.dumps(equal))


def run(source: str, out: Any, inputs: list) -> None:
    """Run a point-wise kernel on CPU tensors: its only output, and inputs that differ in type."""
    from torch._inductor.runtime import triton_heuristics

    kernel: dict[str, Any] = {}

    def take(size_hints: Any, configs: list, triton_meta: dict, *_: Any, **__: Any) -> Any:
        kernel.update(config=configs[0], signature=triton_meta["signature"])
        return lambda function: kernel.setdefault("function", function)

    triton_heuristics.cached_autotune = take
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(source)
    spec = importlib.util.spec_from_file_location("generated_kernel", file.name)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    by_type = {"*" + {"int32": "i32", "float32": "fp32"}[str(t.dtype).removeprefix("torch.")]: t for t in inputs}
    arguments, block = {"xnumel": out.numel()}, kernel["config"].kwargs["XBLOCK"]
    for name, kind in kernel["signature"].items():
        if name.startswith(("in_ptr", "out_ptr")):
            arguments[name] = out if name.startswith("out") else by_type[kind]
    kernel["function"][(-(-out.numel() // block),)](**arguments, XBLOCK=block)


if __name__ == "__main__":
    main(sys.argv[1])
