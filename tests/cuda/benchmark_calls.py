"""The measurements of `analysis/benchmarks/h200.sh` on fake CUDA tensors: the products of its rows at their real sizes,
and two steps of each comparison with two layers and two micro-batches.

Runs in its own process: `python benchmark_calls.py GUARD '{"steps": [...], "rows": [[...], ...]}'` prints, as JSON, the
number of products, and for each row what `DeviceWatch` recorded.
"""

import json
import sys
from pathlib import Path

import fake_gpu

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]  # for `analysis`, and `composed`


def count_products(step: str) -> int:
    """Call every product of a step, in each kind; torch's shape functions refuse an operand laid out another way."""
    import torch

    from analysis.benchmarks.gpu.products import KINDS, Shape, make_product

    count = 0
    for shape in Shape.of_step(step):
        for kind in KINDS["fp8" if shape.float8 else "bf16"]:
            out = make_product(shape, kind, torch.device("cuda", 0))()
            assert (out.shape, out.dtype, out.is_cuda) == ((shape.m, shape.n), torch.bfloat16, True)
            count += 1
    return count


def run_row(words: list[str]) -> dict:
    """Two steps of our contender by a command of the script."""
    import torch
    from composed import composed
    from device_watch import DeviceWatch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from analysis.benchmarks.config import BenchConfig
    from analysis.benchmarks.peers.contender import make_batches
    from analysis.benchmarks.peers.ours import Ours

    keys = dict(word.split("=", 1) for word in words)
    changes = ["model.num_layers=2", f"global_batch_size={2 * int(keys['micro_batch_size'])}", "compiles=false"]
    if "model.attention" not in keys:  # `auto` measures
        changes.append("model.attention=sdpa")
    bench = BenchConfig.from_dict(composed("bench", *words, *changes, "cuda_graphs=false"))
    (drawn,) = make_batches(bench.transformer_config(), bench, 1, torch.device("cpu"))
    with FakeTensorMode():
        ours = Ours(bench, torch.device("cuda", 0))
        batches = [
            {key: torch.empty(value.shape, dtype=value.dtype, device="cuda") for key, value in batch.items()}
            for batch in drawn
        ]
        with DeviceWatch() as watch:
            for number in range(2):
                loss = ours.step(batches, number)
    assert loss.is_cuda and len(batches) == 2
    return {"mixed": sorted(watch.mixed), "syncs": sorted(watch.syncs), "error": None}


def main() -> None:
    """Run all and print what was found."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = json.loads(sys.argv[2])
    with FakeTensorMode():
        products = [count_products(step) for step in case["steps"]]
    print(json.dumps({"products": products, "rows": [run_row(words) for words in case["rows"]]}))


if __name__ == "__main__":
    fake_gpu.install(Path(sys.argv[1]))
    main()
