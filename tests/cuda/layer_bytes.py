"""Bytes that each generated kernel of a compiled layer, or of the embedding, loads and stores, and those of the
activations that the forward pass keeps, as JSON, without a GPU.

Runs in its own process: `python layer_bytes.py GUARD '{"hidden_size": 1536, "heads": 16, "s": 1024, "b": 16}'`.
Inductor counts every tensor that a kernel reads or writes once, however often the kernel comes back to it.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_gpu


def main(guard: str, case: dict) -> None:
    """Compile forward and backward pass and print each launch with its bytes (None: not Inductor's own)."""
    fake_gpu.install(Path(guard))
    import torch
    import torch._inductor.config as inductor_config
    from fake_ranks import grid
    from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
    from torch._subclasses.fake_tensor import FakeTensorMode
    from triton_kernels import calls_in, kernels_in

    from lmscale.config import TransformerConfig
    from lmscale.kernels import Kernels
    from lmscale.models import build_model

    inductor_config.profile_bandwidth = True  # writes the bytes of each kernel into its source
    SIMDKernelFeatures.buf_accesses = accesses_by_argument(SIMDKernelFeatures.buf_accesses)
    sources = fake_gpu.capture_generated_code()
    tp_size, cut = case.get("tp_size", 1), case.get("sequence_parallel", False)
    b, s, h = case["b"], case["s"], case["hidden_size"]
    config = TransformerConfig(case.get("family", "gpt"), 1, h, case["heads"], 50257, s, **case.get("model", {}))
    kernels = Kernels(float8=case.get("float8", False), compiles=True)
    like = {"device": "cuda", "dtype": torch.bfloat16}
    with grid(tp_size, rank=0, sequence_parallel=cut) as context, FakeTensorMode():
        transformer = build_model(config, context, seed=None, **like, kernels=kernels).transformer
        x, other = (torch.empty(b, s // tp_size if cut else s, h, requires_grad=True, **like) for _ in range(2))
        keys = torch.empty(3, b, device="cuda", dtype=torch.int32)
        kept: dict[tuple, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape not in weights:  # Q, K and V are views of one tensor
                storage = tensor.untyped_storage()
                whole = storage.nbytes() > tensor.nbytes
                kept[storage.nbytes() if whole else storage._cdata, whole] = storage.nbytes()
            return tensor

        weights = {shape for w in transformer.layers[0].parameters() for shape in (w.shape, w.shape[::-1])}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            if case.get("part") == "embedding":
                y = transformer._combine(x, other if config.family == "bert" else None, keys[0], None)
            else:
                y = transformer.layers[0](x, None, keys)
        y.backward(torch.empty_like(y))
    graphs = []
    for source in sources:
        found = {name: re.search(r"'kernel_num_gb': ([\d.e+-]+)", text) for name, text in kernels_in(source).items()}
        num_bytes = {name: round(float(match.group(1)) * 1e9) for name, match in found.items() if match}
        graphs.append([[call, num_bytes.get(call)] for call in calls_in(source)])
    print(json.dumps({"graphs": graphs, "kept": sum(kept.values())}))


def accesses_by_argument(buf_accesses: Callable) -> Callable:
    """Inductor's table of what a kernel reads and writes, without single numbers and by the names of its arguments.

    A collective works in place: what reads its result names the result, but the argument is the buffer that it was
    computed in, for which Inductor would count nothing. For a single number of a tensor it would count the tensor.
    """

    def renamed(features: Any) -> dict[str, list]:
        from torch._inductor.dependencies import MemoryDep
        from torch._inductor.virtualized import V

        found: dict[str, list] = {}
        for name, accesses in buf_accesses(features).items():
            several = [one for one in accesses if not isinstance(one, MemoryDep) or one.get_numel() != 1]
            if several:
                found.setdefault(V.graph.scheduler.mutation_real_name.get(name, name), []).extend(several)
        return found

    return renamed


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
