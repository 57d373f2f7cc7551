"""Bytes that each generated kernel of a compiled layer loads and stores, as JSON, counted without a GPU.

Runs in its own process: `python layer_bytes.py GUARD '{"hidden_size": 1536, "heads": 16, "s": 1024, "b": 16}'`.
Inductor counts every tensor that a kernel reads or writes once, however often the kernel comes back to it.
"""

import json
import re
import sys
from pathlib import Path

import fake_gpu


def main(guard: str, case: dict) -> None:
    """Compile forward and backward pass of one layer and print each launch with its bytes; None: not Inductor's own."""
    fake_gpu.install(Path(guard))
    import torch
    import torch._inductor.config as inductor_config
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from triton_kernels import calls_in, kernels_in

    from lmscale.config import TransformerConfig
    from lmscale.models.build import _default_dtype
    from lmscale.models.layer import TransformerLayer
    from lmscale.parallel import ParallelContext

    def flash(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False):  # the choice of a GPU without a mask
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]

    F.scaled_dot_product_attention = flash
    inductor_config.profile_bandwidth = True  # writes the bytes of each kernel into its source
    for name, value in case.get("inductor", {}).items():
        setattr(inductor_config, name, value)
    sources = fake_gpu.capture_generated_code()
    tp_size, cut = case.get("tp_size", 1), case.get("sequence_parallel", False)
    context = ParallelContext()
    if tp_size > 1:
        dist.init_process_group("fake", rank=0, world_size=tp_size, store=FakeStore())
        context = ParallelContext(tp_size=tp_size, tp_group=dist.group.WORLD, sequence_parallel=cut)
    b, s, h = case["b"], case["s"], case["hidden_size"]
    config = TransformerConfig(case.get("family", "gpt"), 2, h, case["heads"], 50257, s, **case.get("model", {}))
    with FakeTensorMode():
        with torch.device("cuda"), _default_dtype(torch.bfloat16):
            layer = TransformerLayer(config, context, 0)
        if case.get("float8", False):
            for module in layer.modules():
                if hasattr(module, "use_float8"):
                    module.use_float8()
        layer.compile(dynamic=False)
        x = torch.empty(b, s // tp_size if cut else s, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y = layer(x, None, torch.empty(3, b, device="cuda", dtype=torch.int32))
        y.backward(torch.empty_like(y))
    graphs = []
    for source in sources:
        found = {name: re.search(r"'kernel_num_gb': ([\d.e+-]+)", text) for name, text in kernels_in(source).items()}
        num_bytes = {name: round(float(match.group(1)) * 1e9) for name, match in found.items() if match}
        graphs.append([[call, num_bytes.get(call)] for call in calls_in(source)])
    print(json.dumps(graphs))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
