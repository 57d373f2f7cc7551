"""Measure the effect of a second tensor rank: speed on two cores, and activation memory with sequence parallelism.

    python analysis/benchmarks/tensor_parallel_cost.py --record outputs/tensor_parallel_cost.json

Two processes with one thread each. In every round the first trains the full model alone while the other waits; then
both train it together, without and with sequence parallelism (bf16, vocabulary 8,192, 8 x 256 tokens, dropout 0):
forward pass, backward pass, update. Then each trains a full model of its own at the same time: two busy cores share
memory and clock, and twice the step alone over this step (`two_models`) is what they give without any communication.
Ratios are of the fastest steps overall and, paired, of the fastest steps per round. Other load on the same cores hides
the speed-up, so the record has the load average. Activations are the bytes that a forward pass saves for its backward
pass with the paper's dropout, without parameters.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import torch
import torch.distributed as dist
from torch import Tensor, nn

from analysis.ranks import TIMEOUT, on_ranks
from lmscale.cli.errors import one_line_errors
from lmscale.config import TransformerConfig
from lmscale.config.training import OptimizerConfig, PrecisionConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext, open_channel, sample_dropout_keys
from lmscale.results import new_record, record_argument, report
from lmscale.runtime.cpu_settings import keep_heap
from lmscale.training.step.optimizer import MixedPrecisionAdamW

SHAPES = {"h512_l4": (512, 8, 4), "h1024_l2": (1024, 16, 2)}  # hidden size, heads, layers
VOCAB, BATCH, SEQ_LENGTH = 8192, 8, 256


def make_config(shape: str, dropout: float) -> TransformerConfig:
    """The GPT of a named shape."""
    hidden, heads, layers = SHAPES[shape]
    dropouts = {"hidden_dropout": dropout, "attention_dropout": dropout}
    return TransformerConfig("gpt", layers, hidden, heads, VOCAB, SEQ_LENGTH, **dropouts)


class Trainee:
    """One model, AdamW, and the same tokens at every step."""

    def __init__(self, config: TransformerConfig, context: ParallelContext, dtype: torch.dtype) -> None:
        self.model = build_model(config, context, seed=1, dtype=dtype)
        self.optimizer = MixedPrecisionAdamW(
            self.model.named_parameters(), OptimizerConfig(lr=1e-4), PrecisionConfig("bf16"), context
        )
        self.tokens = (torch.arange(BATCH * SEQ_LENGTH) * 7919 % VOCAB).view(BATCH, SEQ_LENGTH)
        self.keys = sample_dropout_keys(seed=1, sample_numbers=torch.arange(BATCH))

    def loss(self) -> Tensor:
        """Mean loss in nats per token."""
        return self.model(self.tokens, self.tokens, self.keys) / self.tokens.numel()

    def fastest_step(self, steps: int) -> tuple[float, float]:
        """Seconds of the fastest of `steps`, and the last loss."""
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            self.optimizer.reduce_gradients()
            self.optimizer.step()
            times.append(time.perf_counter() - started)
        return min(times), loss.item()

    def activation_bytes(self) -> int:
        """Bytes that the forward pass up to the loss saves for the backward pass: distinct storages, no parameters."""
        known = {param.untyped_storage().data_ptr() for param in self.model.parameters()}
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        transformer: nn.Module = self.model.transformer
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            hidden = transformer(self.tokens, sample_keys=self.keys)
        del hidden
        return sum(kept.values())


def measure(rank: int, rounds: int, steps: int) -> dict[str, dict]:
    """Step times and activation bytes by shape and case, on one of the two ranks."""
    keep_heap()
    channel = open_channel(dist.group.WORLD, TIMEOUT)
    both = ParallelContext(tp_rank=rank, tp_size=2, tp_group=dist.group.WORLD, tp_communicator=channel)
    cut = dataclasses.replace(both, sequence_parallel=True)
    found: dict[str, dict] = {}
    for shape in SHAPES:
        config = make_config(shape, dropout=0.0)
        contexts = {"tp1": ParallelContext(), "tp2": both, "tp2_sequence": cut, "two_models": ParallelContext()}
        own = [name for name in contexts if rank == 0 or name != "tp1"]  # only the first rank trains the full model
        trainees = {name: Trainee(config, contexts[name], torch.bfloat16) for name in own}
        times: dict[str, list[float]] = {name: [] for name in contexts}
        for number in range(rounds + 1):  # the first round is a warm-up
            losses: dict[str, float] = {}
            for name in contexts:
                dist.barrier()
                if name in trainees:
                    seconds, losses[name] = trainees[name].fastest_step(steps)
                    times[name].append(seconds)
            # Later, repeated steps on the same tokens amplify differences in bf16 rounding.
            if not number and max(losses.values()) / min(losses.values()) > 1.001:
                raise RuntimeError(f"the losses of one rank and of two must agree, but are {losses}")
            if rank == 0 and number:
                taken = ", ".join(f"{name} {times[name][-1] * 1e3:.0f} ms" for name in contexts)
                print(f"{shape}, round {number}: {taken}", flush=True)
        times = {name: measured[1:] for name, measured in times.items()}
        dropped = make_config(shape, dropout=0.1)
        cases = [name for name in own if name != "two_models"]
        sizes = {name: Trainee(dropped, contexts[name], torch.bfloat16).activation_bytes() for name in cases}
        found[shape] = {"times": times, "bytes": sizes}
    return found


def to_metrics(found: dict[str, dict], load: float) -> dict[str, dict]:
    """The metrics of the record; `load` is the machine's load without the two ranks."""
    metrics = {}
    for shape, parts in found.items():
        ones = parts["times"]["tp1"]
        for name, times in parts["times"].items():
            metrics[f"{shape}/{name}_step_least"] = {"value": min(times), "unit": "s"}
            if name != "tp1":
                work = 2 if name == "two_models" else 1
                paired = work * statistics.median(one / two for one, two in zip(ones, times, strict=True))
                least = work * min(ones) / min(times)
                metrics[f"{shape}/{name}_speedup_least"] = {"value": least, "unit": "of one core"}
                metrics[f"{shape}/{name}_speedup_paired"] = {"value": paired, "unit": "of one core"}
        for name, size in parts["bytes"].items():
            metrics[f"{shape}/{name}_activations"] = {"value": size, "unit": "bytes"}
            if name != "tp1":
                metrics[f"{shape}/{name}_share"] = {"value": size / parts["bytes"]["tp1"], "unit": "of tp 1"}
    return metrics | {"load_average_before": {"value": load, "unit": "processes"}}


@one_line_errors()
def main() -> None:
    """Measure, print the speed-ups and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="steps per turn")
    parser.add_argument("--record", type=record_argument, help="path of the record; none by default")
    options = parser.parse_args()
    if options.rounds < 1 or options.steps < 1:
        raise ValueError("`--rounds` and `--steps` must be at least 1")
    load = os.getloadavg()[0]  # before our own processes start
    metrics = to_metrics(on_ranks(2, measure, options.rounds, options.steps)[0], load)
    config = {"shapes": {n: list(s) for n, s in SHAPES.items()}, "vocab_size": VOCAB, "dtype": "bf16"}
    config |= {"micro_batch_size": BATCH, "seq_length": SEQ_LENGTH} | vars(options) | {"record": None}
    layout = {"tp_size": 2, "dp_size": 1, "threads_per_rank": 1}
    report(new_record("tensor_parallel_cost", "run", config, 1, metrics, device="cpu", layout=layout), options.record)


if __name__ == "__main__":
    main()
