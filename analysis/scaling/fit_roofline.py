"""Fit the roofline's three constants to half of a list of published training speeds, and test them on the other half.

    python analysis/scaling/fit_roofline.py

Nothing here was run by this project. The planner counts the products and attention cores of a published run; the other
passes are those of its own software, given below. conf/cluster has the constants for A100, H100 and H200.
"""

import argparse
import dataclasses
import itertools
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import numpy as np

from analysis.scaling.study import with_rates
from lmscale.config import Layout, TransformerConfig
from lmscale.config.cluster import Cluster, load_cluster
from lmscale.planner.flops import TERA, model_flops_per_step
from lmscale.planner.operation import Operation, product, times
from lmscale.planner.operations import step_operations
from lmscale.planner.params import count_parameters
from lmscale.planner.workload import Workload
from lmscale.results import new_record, record_argument, report

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "analysis" / "scaling" / "records" / "roofline.json"
# Constant -> unit, smallest and largest value that can be, and why.
CONSTANTS = {
    "product_share": (
        "of the large-product rate",
        0.75,
        1.0,
        "clocks sink under sustained load, to 1.4 of 1.83 GHz on an H100",
    ),
    "memory_share": ("of the copy rate", 0.7, 1.0, "several tensors and reductions at once"),
    "launch_us": ("us", 0.5, 4.0, "a kernel's end and the next one's start on one stream"),
}


@dataclass(frozen=True)
class Software:
    """What a published run does besides products and attention cores, counted from its source.

    Args:
        layer_passes: over a tensor [tokens, h] of bf16, forward and backward of one layer.
        layer_launches: their kernels.
        logit_passes: over the logits in bf16.
        parameter_bytes: of the optimizer per parameter and step, over the devices that share it.
        message_bytes: sent per parameter and micro-batch within a node, counted as if nothing hid them.
        attention: TFLOP/s of its attention core, forward and backward, not causal, on long sequences.
        attention_work: share of the causal scores that are computed, where there are windows.
        other_share: of the step, work that is not counted here.
        why: where the numbers come from.
    """

    layer_passes: float
    layer_launches: int
    logit_passes: float
    parameter_bytes: float
    why: str
    attention: tuple[float, float]
    message_bytes: float = 0.0
    attention_work: float = 1.0
    other_share: float = 0.0


FA3, CUDNN = (648.0, 561.0), (595.0, 516.0)  # Shah et al. 2024, Figures 5 and 6: head size 128, H100
FOUNDRY = {
    name: Software(
        61.0,
        42,
        4.0,
        10.0,
        "eager: 2 LayerNorms 4 forward and 10 backward, residuals 6 and 6, GELU 8 and 12, packed QKV gradient 6, "
        "biases 9; fused cross-entropy; AdamW in fp32 over 8 devices; FSDP gathers weights in bf16 and sums gradients "
        "in fp32 at every micro-batch, 7/8 of 6 bytes; the attention core's rate is that between the table's rows of "
        "16,384 and 32,768 tokens of the 1B model",
        message_bytes=5.25,
        attention=rates,
    )
    for name, rates in {"h100": (193.0, 193.0), "dgx_a100": (106.0, 106.0)}.items()
}
MEGATRON = Software(
    58.0,
    24,
    22.0,
    12.0,
    "fused bias, dropout and residual, bias and GELU, as our layer without dropout; loss in fp32 pass by pass; sharded "
    "optimizer; messages hidden; "
    "4 sequences at once, which the table does not say",
    attention=CUDNN,
)
NANOCHAT = Software(
    65.0,
    20,
    8.0,
    8.0,
    "compiled: RMSNorm, rotary and QK norm, squared ReLU, value embeddings; 3 of 4 layers with half windows; Muon's "
    "products (1.2 % of the step) and its messages in part",
    attention=FA3,
    attention_work=0.81,
    other_share=0.03,
)


@dataclass(frozen=True)
class Run:
    """A published training speed.

    Args:
        cluster: of conf/cluster.
        sizes: layers, hidden size, heads, vocabulary.
        tokens: tokens/s of one device.
        role: `fit` or `held out`.
    """

    name: str
    cluster: str
    sizes: tuple[int, int, int, int]
    seq_length: int
    micro_batch_size: int
    num_micro_batches: int
    dtype: str
    tokens: float
    software: Software
    role: str
    source: str
    tp_size: int = 1

    @property
    def config(self) -> TransformerConfig:
        """The model without dropout."""
        layers, hidden, heads, vocab = self.sizes
        return TransformerConfig(
            "gpt", layers, hidden, heads, vocab, self.seq_length, 1, hidden_dropout=0.0, attention_dropout=0.0
        )


LLM_FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
MPT = {
    "350M": (24, 1024, 16, 50368),
    "760M": (24, 1536, 12, 50368),
    "1B": (24, 2048, 16, 50368),
    "3B": (32, 2560, 20, 50368),
}


def _mpt(size: str, cluster: str, s: int, b: int, n: int, tokens: float, role: str, dtype: str = "bf16") -> Run:
    name = f"MPT {size}, {s} tokens, {dtype}"
    return Run(name, cluster, MPT[size], s, b, n, dtype, tokens, FOUNDRY[cluster], role, LLM_FOUNDRY)


def _megatron(name: str, sizes: tuple[int, int, int, int], tflops: float, tp_size: int) -> Run:
    run = Run(
        name, "h100", sizes, 4096, 4, 1, "bf16", 0.0, MEGATRON, "held out", "NVIDIA/Megatron-LM, README.md", tp_size
    )
    per_token = model_flops_per_step(run.config, 4096, 1) / 4096
    return dataclasses.replace(run, tokens=tflops * TERA / per_token)


RUNS = (
    _mpt("760M", "h100", 1024, 48, 2, 78_581, "held out"),
    _mpt("1B", "h100", 1024, 18, 4, 48_910, "fit"),
    _mpt("3B", "h100", 1024, 20, 6, 27_046, "fit"),
    _mpt("350M", "dgx_a100", 1024, 64, 2, 64_813, "fit"),
    _mpt("1B", "dgx_a100", 1024, 18, 4, 22_112, "held out"),
    _mpt("3B", "dgx_a100", 1024, 20, 6, 11_580, "fit"),
    _mpt("760M", "h100", 512, 96, 2, 83_749, "held out"),
    _mpt("1B", "h100", 512, 56, 4, 52_275, "held out"),
    _mpt("1B", "h100", 4096, 7, 4, 38_535, "held out"),
    _mpt("3B", "h100", 512, 40, 6, 27_965, "held out"),
    _mpt("3B", "h100", 4096, 5, 6, 20_964, "held out"),
    _mpt("1B", "h100", 512, 56, 4, 70_315, "held out", "fp8"),
    _mpt("3B", "h100", 512, 40, 6, 36_527, "held out", "fp8"),
    _mpt("350M", "dgx_a100", 512, 128, 2, 69_330, "held out"),
    _mpt("1B", "dgx_a100", 2048, 14, 4, 20_513, "held out"),
    _mpt("3B", "dgx_a100", 512, 40, 6, 12_127, "held out"),
    Run(
        *("nanochat d26, bf16", "h100", (26, 1664, 13, 32768), 2048, 16, 2, "bf16", 630e3 / 8, NANOCHAT, "fit"),
        source="karpathy/nanochat, dev/LOG.md, 2026-02-02",
    ),
    Run(
        *("nanochat d26, fp8", "h100", (26, 1664, 13, 32768), 2048, 16, 2, "fp8", 740e3 / 8, NANOCHAT, "held out"),
        source="karpathy/nanochat, dev/LOG.md, 2026-02-02",
    ),
    _megatron("Megatron 1.7B", (24, 2048, 16, 131072), 408.8, 1),
    _megatron("Megatron 7.1B, tp 2", (30, 4096, 32, 131072), 465.9, 2),
)


def tokens_per_s(run: Run, cluster: Cluster) -> float:
    """Tokens/s of one device."""
    config, software = run.config, run.software
    forward, backward = software.attention
    cluster = with_rates(cluster, attention_forward_tflops=forward, attention_backward_tflops=backward)
    layout = Layout(tp_size=run.tp_size, sequence_parallel=run.tp_size > 1)
    batch = run.micro_batch_size * run.num_micro_batches
    counted = step_operations(Workload(config, run.micro_batch_size, batch, run.seq_length, run.dtype), layout)
    products = [o for o in counted if o.kind in ("product", "attention") or o.name == "rounding to float8"]
    products = [o for o in products if not o.name.startswith("logits")]  # chunks are ours
    rows, columns = run.micro_batch_size * run.seq_length, config.padded_vocab_size // run.tp_size
    h = config.hidden_size
    for m, n, k in ((rows, columns, h), (rows, h, columns), (columns, h, rows)):
        products.append(times(run.num_micro_batches, product("logits", "all", m, n, k, 2)))
    tokens = batch * run.seq_length
    passes = config.num_layers * software.layer_passes * config.hidden_size
    passes += software.logit_passes * config.padded_vocab_size
    num_bytes = int(2 * tokens * passes / run.tp_size)
    num_parameters = count_parameters(config, layout).per_rank
    num_bytes += int(software.parameter_bytes * num_parameters)
    launches = config.num_layers * software.layer_launches * run.num_micro_batches
    theirs = Operation("passes of this software", "all", num_bytes, 0, launches)
    seconds = sum(o.launch_s(cluster) for o in (*products, theirs))
    seconds += run.num_micro_batches * software.message_bytes * num_parameters / cluster.bandwidth(8)
    for operation in (*products, theirs):
        share = software.attention_work if operation.kind == "attention" else 1.0
        seconds += share * operation.seconds(cluster, run.dtype)
    return tokens / run.tp_size / seconds * (1 - software.other_share)


def miss(run: Run, constants: dict[str, float]) -> float:
    """Modelled over published tokens/s, less 1."""
    cluster = load_cluster(ROOT / "conf" / "cluster" / f"{run.cluster}.yaml")
    return tokens_per_s(run, with_rates(cluster, **constants)) / run.tokens - 1


def fit(role: str = "fit") -> dict[str, float]:
    """The constants inside their ranges that miss the runs of `role` by the least squares, by shrinking grids."""
    runs = [run for run in RUNS if run.role == role]
    low, high = np.array([entry[1:3] for entry in CONSTANTS.values()]).T
    centre, radius = (low + high) / 2, (high - low) / 2
    for _ in range(14):
        axes = np.clip([centre - radius, centre, centre + radius], low, high).T.tolist()
        points = [dict(zip(CONSTANTS, point, strict=True)) for point in itertools.product(*axes)]
        best = min(points, key=lambda point: sum(miss(run, point) ** 2 for run in runs))
        centre, radius = np.array(list(best.values())), radius * 0.62
    return best


def measure(constants: dict[str, float]) -> dict[str, dict]:
    """Constants and misses as the metrics of a record."""
    metrics = {name: {"value": constants[name], "unit": entry[0]} for name, entry in CONSTANTS.items()}
    for role in ("fit", "held out"):
        found = {run: miss(run, constants) for run in RUNS if run.role == role}
        for run, value in found.items():
            metrics[f"{role}/{run.name}, {run.cluster}"] = {"value": value, "unit": "of the published tokens/s"}
        squares = statistics.mean(value**2 for value in found.values())
        metrics[f"{role}, rms"] = {"value": squares**0.5, "unit": "of the published tokens/s"}
        metrics[f"{role}, largest"] = {"value": max(map(abs, found.values())), "unit": "of the published tokens/s"}
    return metrics


def main() -> None:
    """Fit, print, record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", type=record_argument, default=RECORD)
    options = parser.parse_args()
    constants = {name: float(f"{value:.3g}") for name, value in fit().items()}
    metrics = measure(constants)
    other = fit("held out")
    metrics |= {f"other half/{name}": {"value": other[name], "unit": entry[0]} for name, entry in CONSTANTS.items()}
    config = {
        "ranges": {name: {"unit": e[0], "low": e[1], "high": e[2], "why": e[3]} for name, e in CONSTANTS.items()},
        "runs": [dataclasses.asdict(run) for run in RUNS],
    }
    report(new_record("roofline", "modelled", config, None, metrics), options.record)


if __name__ == "__main__":
    main()
