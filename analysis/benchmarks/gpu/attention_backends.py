"""Time torch's attention backends on the same inputs, forward and backward, and compare each with plain softmax.

python analysis/benchmarks/gpu/attention_backends.py --shape gpt_1.2b:16:16:1024:96 --record FILE
"""

import argparse
import math
import statistics
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `analysis`, which is not installed

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from analysis.benchmarks.gpu.device import median_time_s, require_device
from lmscale.cli.errors import one_line_errors
from lmscale.config.model import WITHOUT_DROPOUT
from lmscale.models.attention_backend import ALL_BACKENDS, only_backend
from lmscale.results import new_record, record_argument, report

BACKENDS = (*ALL_BACKENDS, "math")
LARGEST_ERROR = 0.02  # relative, in bf16; a wrong mask gives a fast kernel


@dataclass(frozen=True)
class AttentionShape:
    """One model's attention on one rank: b sequences, n heads, s tokens, head size d."""

    name: str
    b: int
    n: int
    s: int
    d: int

    @property
    def causal(self) -> bool:
        """Whether attention is causal (GPT)."""
        return self.name.startswith("gpt")

    @classmethod
    def parse(cls, text: str) -> "AttentionShape":
        """From `name:b:n:s:d`, for example `gpt_1.2b:16:16:1024:96`.

        Raises:
            ValueError: the text has another form, or a size is below 1.
        """
        name, *sizes = text.split(":")
        if not name.startswith(("gpt", "bert")) or len(sizes) != 4 or not all(s.isdigit() and int(s) for s in sizes):
            raise ValueError(
                f"an attention shape must be name:b:n:s:d with a name that starts with gpt or bert, but is {text!r}"
            )
        return cls(name, *map(int, sizes))


def time_backends(
    shape: AttentionShape, backends: list[str], dropout: float, device: torch.device, rounds: int, repeats: int
) -> tuple[dict[str, float], dict[str, str]]:
    """Time one forward and backward pass per backend in bf16; returns seconds, and the reason for each that cannot run.

    The inputs are strided views of the fused QKV output, as in the models, and the gradient is computed for it, so a
    backend that needs contiguous inputs includes the copies. Backends alternate; each time is the median over `rounds`
    of the medians over `repeats` calls.

    Args:
        backends: names of `BACKENDS`.
    """
    qkv, grad = _inputs(shape, shape.b, device)
    step = partial(_forward_and_backward, qkv, grad, shape, dropout)
    times: dict[str, list[float]] = {}
    refused = {}
    for name in backends:
        try:
            with _backend(name):
                step()
            times[name] = []
        except (RuntimeError, ImportError) as error:  # inputs that a backend does not support; no FlashAttention-3
            refused[name] = str(error).strip().splitlines()[0]
    for _ in range(rounds):
        for name, found in times.items():
            with _backend(name):
                found.append(median_time_s(step, device, repeats))
    return {name: statistics.median(found) for name, found in times.items()}, refused


def relative_errors(shape: AttentionShape, backend: str, device: torch.device) -> tuple[float, float]:
    """||out - reference|| / ||reference|| of one sequence without dropout, and of the gradient of Q, K and V.

    The reference is plain softmax in fp32, as with `model.attention=exact`.
    """
    qkv, grad = _inputs(shape, 1, device)
    with _backend(backend):
        out = _forward_and_backward(qkv, grad, shape, 0.0)
    exact = qkv.detach().float().requires_grad_()
    q, k, v = exact.permute(3, 0, 2, 1, 4)  # each [1, n, s, d]
    scores = q @ k.transpose(-1, -2) / math.sqrt(shape.d)
    if shape.causal:
        hidden = torch.ones(shape.s, shape.s, dtype=torch.bool, device=device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    reference = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    reference.backward(grad.float())
    pairs = (out.float(), reference.detach()), (qkv.grad.float(), exact.grad)
    return tuple(float((found - wanted).norm() / wanted.norm()) for found, wanted in pairs)


def _inputs(shape: AttentionShape, b: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The fused QKV output [b, s, n, 3, d] and a gradient of the attention's output [b, s, n d]."""
    options = {"dtype": torch.bfloat16, "device": device}
    qkv = torch.randn(b, shape.s, shape.n, 3, shape.d, **options, requires_grad=True)
    return qkv, torch.randn(b, shape.s, shape.n * shape.d, **options)


def _backend(name: str) -> AbstractContextManager:
    return sdpa_kernel(SDPBackend.MATH) if name == "math" else only_backend(name)


def _forward_and_backward(qkv: Tensor, grad: Tensor, shape: AttentionShape, dropout: float) -> Tensor:
    qkv.grad = None
    q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each [b, n, s, d], as models/attention.py makes them
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=shape.causal)
    out = out.transpose(1, 2).flatten(2)  # [b, s, n d]
    out.backward(grad)
    return out.detach()


def measure(options: argparse.Namespace) -> dict:
    """Measure all shapes, dropouts and backends; a refused input has torch's reason, and a wrong result no time."""
    device, name = require_device(options.accelerator)
    torch.manual_seed(options.seed)
    metrics, refused = {}, {}
    for shape in map(AttentionShape.parse, options.shape):
        wrong = set()
        for dropout in (0.0, options.dropout):
            case = f"{shape.name}/dropout_{dropout:g}"
            without = [backend for backend in options.backends if dropout and backend in WITHOUT_DROPOUT]
            tried = [backend for backend in options.backends if backend not in without]
            times, reasons = time_backends(shape, tried, dropout, device, options.rounds, options.repeats)
            reasons |= dict.fromkeys(without, "its dropout is wrong or missing")
            if dropout == 0.0:
                for backend in times:
                    errors = dict(zip(("error", "gradient"), relative_errors(shape, backend, device), strict=True))
                    for what, error in errors.items():
                        metrics[f"{shape.name}/{what}/{backend}"] = {"value": error, "unit": "relative to exact"}
                    if not max(errors.values()) <= LARGEST_ERROR:
                        wrong.add(backend)
            refused |= {f"{case}/{backend}": reason for backend, reason in reasons.items()}
            refused |= {f"{case}/{backend}": "wrong: it differs from exact attention" for backend in wrong}
            right = {backend: time for backend, time in times.items() if backend not in wrong}
            metrics |= {f"{case}/{backend}": {"value": time, "unit": "s"} for backend, time in right.items()}
    config = {key: value for key, value in vars(options).items() if key != "record"}
    return new_record("attention_backends", "run", config, options.seed, metrics, device=name) | {"refused": refused}


@one_line_errors()
def main() -> None:
    """Measure, print the times and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", required=True, help="name:b:n:s:d")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=3, help="rounds in which the backends alternate")
    parser.add_argument("--repeats", type=int, default=10, help="calls per round and backend")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--record", type=record_argument, default=Path("outputs/attention_backends.json"))
    options = parser.parse_args()
    record = measure(options)
    report(record, options.record)
    for key, reason in record["refused"].items():
        print(f"{key:<44} refused: {reason}")


if __name__ == "__main__":
    main()
