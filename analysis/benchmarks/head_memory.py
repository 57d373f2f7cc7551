"""Memory of the output projection and its loss, chunked and with full logits.

    python analysis/benchmarks/head_memory.py --record analysis/benchmarks/records/head_memory.json

Forward and backward pass on fake tensors (nothing is computed): peak bytes of all tensors except the input rows and the
word embedding. The metrics `in_pieces` are for our chunked loss, `at_once` for F.linear followed by torch's
cross-entropy on fp32 logits. With a hidden size of 16 the gradient of the word embedding is negligible, so the bytes
are those of the logits and their gradients.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from analysis.correctness.peak_memory import TensorBytes
from lmscale.parallel import ParallelContext, linear_cross_entropy
from lmscale.results import new_record, record_argument, write_record

VOCAB = 51_200
SHAPES = {"logits alone, 8 x 1,024": (8 * 1024, 16), "gpt_355m, 8 x 1,024": (8 * 1024, 1024)}  # rows, hidden size
SHAPES |= {"gpt_355m, 32 x 1,024": (32 * 1024, 1024), "gpt_1.2b, 16 x 1,024": (16 * 1024, 1536)}
SHAPES |= {"gpt_8.3b, 8 x 1,024": (8 * 1024, 3072)}


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Our chunked loss."""
    return linear_cross_entropy(hidden, weight, None, labels, VOCAB, ParallelContext())


def full_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """torch's cross-entropy on full fp32 logits, as in Hugging Face's and nanoGPT's models."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def peak_bytes(head: Callable[[Tensor, Tensor, Tensor], Tensor], rows: int, hidden_size: int) -> int:
    """Peak bytes of a forward and backward pass, without the input rows and the word embedding."""
    with FakeTensorMode():
        hidden = torch.empty(rows, hidden_size, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(VOCAB, hidden_size, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.empty(rows, dtype=torch.int64)
        with TensorBytes([hidden, weight, labels]) as tracked:
            start = tracked.now
            head(hidden, weight, labels).backward()
    return tracked.peak - start


def main() -> int:
    """Count the bytes, print them and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", type=record_argument, help="path of the record; none by default")
    options = parser.parse_args()
    metrics = {}
    for name, (rows, hidden_size) in SHAPES.items():
        pieces, whole = (peak_bytes(head, rows, hidden_size) for head in (chunked, full_logits))
        logits = rows * VOCAB * 4
        metrics[f"{name}/in_pieces"] = {"value": pieces, "unit": "bytes"}
        metrics[f"{name}/at_once"] = {"value": whole, "unit": "bytes"}
        metrics[f"{name}/share_of_at_once"] = {"value": pieces / whole, "unit": "of at once"}
        metrics[f"{name}/share_of_fp32_logits"] = {"value": pieces / logits, "unit": "of the logits in fp32"}
    for name, entry in metrics.items():
        print(f"{name:<44} {entry['value']:.6g} {entry['unit']}")
    if options.record is not None:
        config = {"shapes": {n: list(s) for n, s in SHAPES.items()}, "vocab_size": VOCAB, "dtype": "bf16"}
        layout = {"tp_size": 1, "dp_size": 1, "threads_per_rank": 1}
        write_record(
            new_record("head_memory", "modelled", config, None, metrics, device="cpu", layout=layout), options.record
        )
        print(f"record: {options.record}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
