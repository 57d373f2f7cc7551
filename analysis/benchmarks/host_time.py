"""Measure what a training step costs the host: thread time of forward pass, backward pass and optimizer.

    OMP_NUM_THREADS=1 python analysis/benchmarks/host_time.py --record FILE

Compiled GPTs in bf16 with tensors so small that their arithmetic is nothing, on a CPU. A GPU's driver is not measured.
Two depths alternate in every round; medians over the rounds give a time per layer and the rest of a micro-batch.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import torch

from lmscale.config import TransformerConfig
from lmscale.config.training import OptimizerConfig, PrecisionConfig
from lmscale.kernels import Kernels
from lmscale.models import build_model
from lmscale.parallel import ParallelContext, sample_dropout_keys
from lmscale.results import new_record, record_argument, report
from lmscale.training.step.optimizer import MixedPrecisionAdamW

DEPTHS = 24, 72
PARTS = "forward", "backward", "optimizer"


class Step:
    """A model, its optimizer and one micro-batch."""

    def __init__(self, num_layers: int) -> None:
        config = TransformerConfig("gpt", num_layers, 16, 2, 64, 16)
        self.model = build_model(
            config, ParallelContext(), seed=1, dtype=torch.bfloat16, kernels=Kernels(compiles=True)
        )
        optimizer, precision = OptimizerConfig(lr=1e-4), PrecisionConfig("bf16")
        named = self.model.named_parameters()
        self.optimizer = MixedPrecisionAdamW(named, optimizer, precision, ParallelContext(), compiles=True)
        self.tokens = torch.arange(16)[None] * 7 % 64
        self.keys = sample_dropout_keys(1, torch.arange(1))

    def __call__(self) -> list[float]:
        """Seconds of thread time of each of `PARTS`."""
        times = [time.thread_time()]
        self.optimizer.zero_grad()
        loss = self.model(self.tokens, self.tokens, self.keys)
        times.append(time.thread_time())
        loss.backward()
        times.append(time.thread_time())
        self.optimizer.reduce_gradients()
        self.optimizer.step()
        times.append(time.thread_time())
        return [after - before for before, after in zip(times, times[1:], strict=False)]


def measure(rounds: int) -> dict[str, dict]:
    """The metrics of the record."""
    steps = {depth: Step(depth) for depth in DEPTHS}
    found: dict[int, list[list[float]]] = {depth: [] for depth in DEPTHS}
    for number in range(rounds + 2):
        for depth, step in steps.items():
            times = [step() for _ in range(5)]
            if number > 1:  # the first rounds compile
                found[depth].append([statistics.median(each) for each in zip(*times, strict=True)])
    metrics = {}
    medians = {depth: [statistics.median(each) for each in zip(*found[depth], strict=True)] for depth in DEPTHS}
    for part, few, many in zip(PARTS, *medians.values(), strict=True):
        per_layer = (many - few) / (DEPTHS[1] - DEPTHS[0])
        values = {f"{DEPTHS[0]}_layers": few, f"{DEPTHS[1]}_layers": many, "per_layer": per_layer}
        values["rest"] = few - DEPTHS[0] * per_layer
        metrics |= {f"{part}/{name}": {"value": value, "unit": "s"} for name, value in values.items()}
    number = len(steps[DEPTHS[1]].optimizer.masters)
    return metrics | {"parameters": {"value": number, "unit": f"tensors at {DEPTHS[1]} layers"}}


def main() -> None:
    """Measure, print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--record", type=record_argument, help="path of the record; none by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    metrics = measure(options.rounds)
    config = {"rounds": options.rounds, "dtype": "bf16", "num_layers": DEPTHS}
    layout = {"threads_per_rank": 1}
    report(new_record("host_time", "run", config, 1, metrics, device="cpu", layout=layout), options.record)


if __name__ == "__main__":
    main()
