"""Compile one transformer layer for a simulated GPU; prints what torch.compile generated, as JSON.

Runs in its own process: `python compiled_layer.py GUARD '{"tp_size": 2, "tp_rank": 1, ...}'`.
"""

import json
import sys
from pathlib import Path

import fake_gpu


def main(guard: str, case: dict) -> None:
    """Compile forward and backward pass of a layer, and each of its Triton kernels to cubins.

    Args:
        case: what differs from a GPT layer on one rank; `cubins` false leaves its kernels alone.
    """
    fake_gpu.install(Path(guard))
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch._dynamo.utils import counters
    from torch._functorch import partitioners
    from torch._functorch._aot_autograd import utils as aot
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from triton_kernels import calls_in, compile_to_cubin, kernels_in, products_behind_collectives

    from lmscale.config import TransformerConfig
    from lmscale.kernels import Kernels
    from lmscale.models import build_model
    from lmscale.parallel import ParallelContext

    def flash(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False):  # the choice of a GPU without a mask
        assert attn_mask is None
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]

    F.scaled_dot_product_attention = flash
    clones = []
    get_generator = aot.get_default_generator
    partitioners.get_default_generator = lambda device: clones.append(str(device)) or get_generator(device)
    sources = fake_gpu.capture_generated_code()
    tp_size, tp_rank, cut = case.get("tp_size", 1), case.get("tp_rank", 0), case.get("sequence_parallel", False)
    context = ParallelContext()
    if tp_size > 1:
        dist.init_process_group("fake", rank=tp_rank, world_size=tp_size, store=FakeStore())
        context = ParallelContext(tp_rank=tp_rank, tp_size=tp_size, tp_group=dist.group.WORLD, sequence_parallel=cut)
    b, s, h = 2, 256, 512
    config = TransformerConfig(case.get("family", "gpt"), 1, h, 8, 50257, s, **case.get("model", {}))
    kernels = Kernels(float8=case.get("float8", False), compiles=True)
    with FakeTensorMode():
        model = build_model(config, context, seed=None, dtype=torch.bfloat16, device="cuda", kernels=kernels)
        x = torch.empty(b, s // tp_size if cut else s, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y = model.transformer.layers[0](x, None, torch.empty(3, b, device="cuda", dtype=torch.int32))
        y.backward(torch.empty_like(y))
    cubins, refused = {}, {}
    for source in sources if case.get("cubins", True) else []:
        for name, kernel in kernels_in(source).items():
            try:
                cubins[name] = [compile_to_cubin(kernel, capability) for capability in (80, 90)]
            except Exception as error:  # any error of Triton
                refused[name] = str(error.__cause__ or error).splitlines()[-1]
    print(
        json.dumps(
            {
                "graphs": len(sources),
                "breaks": sum(counters["graph_break"].values()),
                "calls": [calls_in(source) for source in sources],
                "collectives": [products_behind_collectives(source) for source in sources],
                "cubins": cubins,
                "refused": refused,
                "cloned_generators": clones,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
