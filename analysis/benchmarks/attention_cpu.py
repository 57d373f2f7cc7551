"""Time our training step on a CPU with `model.attention` sdpa and exact, compiled and eager, with and without dropout.

    python analysis/benchmarks/attention_cpu.py --record analysis/benchmarks/records/attention_cpu.json

This is what `model.attention=auto` and `compile=auto` are decided by on a CPU. The four variants take turns on the same
batches; ratios are the medians of ratios within rounds. The compiler starts with an empty cache, so `compilation`, the
first step less a later one, is what a first run pays; the very first one also precompiles torch's headers.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import lmscale.cli.conf_files  # noqa: F401  the resolvers of conf/
from analysis.benchmarks.config import BenchConfig
from analysis.benchmarks.peers.batches import make_batches
from analysis.benchmarks.peers.ours import Ours
from lmscale.results import new_record, record_argument, write_record

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
VARIANTS = {
    f"{attention}_{'compiled' if compiles else 'eager'}": (attention, compiles)
    for attention in ("sdpa", "exact")
    for compiles in (True, False)
}
NUM_BATCHES = 4


def make_bench(options: argparse.Namespace, length: int, dropout: float, attention: str, compiles: bool) -> BenchConfig:
    """The step of one variant; `tokens` tokens at any length."""
    layers, hidden = options.size
    overrides = [
        *(f"model={options.family}_355m" if options.family == "gpt" else "model=bert_336m", "peers=[]"),
        *(f"model.num_layers={layers}", f"model.hidden_size={hidden}", f"model.num_attention_heads={hidden // 64}"),
        *(f"model.hidden_dropout={dropout}", f"model.attention_dropout={dropout}", f"model.attention={attention}"),
        *(f"precision={options.precision}", f"compiles={str(compiles).lower()}", "accelerator=cpu"),
        *(f"seq_length={length}", f"micro_batch_size={options.tokens // length}", f"seed={options.seed}"),
    ]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return BenchConfig.from_dict(OmegaConf.to_container(compose("bench", overrides), resolve=True))


def time_variants(options: argparse.Namespace, length: int, dropout: float) -> dict[str, dict]:
    """Metrics of one length and dropout: medians, ratios to `sdpa_eager`, and what compilation costs."""
    case = f"s{length}/dropout_{dropout:g}"
    benches = {name: make_bench(options, length, dropout, *variant) for name, variant in VARIANTS.items()}
    contenders = {name: Ours(bench, CPU, options.precision) for name, bench in benches.items()}
    bench = benches["sdpa_eager"]
    batches = make_batches(bench.transformer_config(), bench, NUM_BATCHES, CPU)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(options.rounds + 2):  # the first compiles, the second warms up
        for name, contender in contenders.items():
            started = time.perf_counter()
            contender.step(batches[number % NUM_BATCHES], number)
            times[name].append(time.perf_counter() - started)
            print(f"{case} {name}, step {number}: {times[name][-1]:.3f} s", file=sys.stderr, flush=True)
    metrics = {}
    for name, taken in times.items():
        steps, base = taken[2:], times["sdpa_eager"][2:]
        metrics[f"{case}/{name}/step"] = {"value": statistics.median(steps), "unit": "s"}
        paired = statistics.median(b / s for b, s in zip(base, steps, strict=True))
        metrics[f"{case}/{name}/speedup"] = {"value": paired, "unit": "step of sdpa_eager / its own"}
        if VARIANTS[name][1]:
            cost = taken[0] - statistics.median(steps)
            metrics[f"{case}/{name}/compilation"] = {"value": cost, "unit": "s"}
    return metrics


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=("gpt", "bert"), default="gpt")
    parser.add_argument("--size", type=int, nargs=2, default=(6, 512), metavar=("LAYERS", "HIDDEN"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--tokens", type=int, default=1024, help="of a step")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each variant")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--record", type=record_argument, help="where the record goes; nowhere by default")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("medium")
    load, metrics = os.getloadavg()[0], {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        for length in options.lengths:
            for dropout in (0.0, options.dropout):
                torch.compiler.reset()
                metrics |= time_variants(options, length, dropout)
    metrics["load_average_before"] = {"value": load, "unit": "processes"}
    for name, entry in metrics.items():
        print(f"{name:<44} {entry['value']:.4g} {entry['unit']}")
    if options.record is not None:
        config = {key: value for key, value in vars(options).items() if key != "record"}
        layout = {"tp_size": 1, "dp_size": 1, "threads_per_rank": torch.get_num_threads()}
        record = new_record("attention_cpu", "run", config, options.seed, metrics, device="cpu", layout=layout)
        write_record(record, options.record)


if __name__ == "__main__":
    main()
