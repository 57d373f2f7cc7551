"""Compare the predicted peak memory per rank with the peak bytes of all live tensors in a step.

    python analysis/correctness/peak_memory.py                                    # 5 to 10 minutes on one core
    python analysis/correctness/peak_memory.py --record outputs/peak_memory.json  # and write a record

`real`: a full step on this CPU, on one rank or on two over gloo. `traced`: forward and backward pass of the paper's
models on fake tensors, with a GPU's attention kernels and LayerNorms. Neither includes allocations inside kernels,
rounding by the allocator and the framework; no GPU was used.
"""

import argparse
import sys
import weakref
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from analysis.ranks import TIMEOUT, on_ranks
from lmscale import partition
from lmscale.config import Layout, TransformerConfig
from lmscale.config.family import load
from lmscale.config.training import OptimizerConfig, PrecisionConfig
from lmscale.models import build_model
from lmscale.parallel import (
    CachedTargets,
    ParallelContext,
    ProjectedTargets,
    SoftTargets,
    make_context,
    replicated_layers,
    sample_dropout_keys,
)
from lmscale.planner.flops import scored_tokens
from lmscale.planner.memory import estimate_memory
from lmscale.planner.workload import Workload
from lmscale.results import new_record, record_argument, write_record
from lmscale.training.step.optimizer import MixedPrecisionAdamW

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = {"355m": (24, 1024, 16), "1.2b": (40, 1536, 16), "8.3b": (72, 3072, 32), "bert_336m": (24, 1024, 16)}


@dataclass(frozen=True)
class Case:
    """One configuration; `traced` ones use a GPU's kernels.

    Args:
        micro_batch_size: sequences, each as long as the model's number of positions.
        num_micro_batches: micro-batches per step.
        teacher: sizes of the model that it is distilled from, at `temperature`.
        top_k: log-probabilities per scored token in place of a teacher.
    """

    config: TransformerConfig
    micro_batch_size: int
    dtype: str
    num_micro_batches: int = 1
    tp_size: int = 1
    sequence_parallel: bool = False
    traced: bool = False
    batch_halves: bool = False
    teacher: TransformerConfig | None = None
    temperature: float = 2.0
    top_k: int | None = None

    @property
    def job(self) -> Workload:
        """For the planner."""
        config, b = self.config, self.micro_batch_size
        sizes = b, b * self.num_micro_batches, config.max_position_embeddings, self.dtype
        return Workload(config, *sizes, on_gpu=self.traced, teacher=self.teacher, top_k=self.top_k)

    @property
    def predicted(self) -> int:
        """Predicted bytes."""
        return estimate_memory(self.job, self.layout).total

    @property
    def layout(self) -> Layout:
        """The tensor ranks and their options."""
        options = {"sequence_parallel": self.sequence_parallel, "batch_halves": self.batch_halves}
        return Layout(tp_size=self.tp_size, **options)

    def context(self) -> ParallelContext:
        """Of this rank, in a process group of `tp_size` ranks."""
        if self.tp_size == 1:
            return ParallelContext()
        return make_context(self.layout, "cpu", TIMEOUT, shared_memory=False)


def sized(
    architecture: str, layers: int, hidden: int, heads: int, vocab: int, s: int, **more: Any
) -> TransformerConfig:
    """A small model; sizes are mutually different so that all terms of the estimate differ."""
    more = {"vocab_multiple": 8} | more
    return TransformerConfig(architecture, layers, hidden, heads, vocab, s, **more)


def of_the_paper(name: str, **more: Any) -> TransformerConfig:
    """A model of the paper."""
    kind = ("bert", 30522, 512) if name.startswith("bert") else ("gpt", 50257, 1024)
    return TransformerConfig(kind[0], *SIZES[name], *kind[1:], **more)


# The terms of the estimate were derived on other shapes.
CASES = {
    "gpt, fp32": Case(sized("gpt", 7, 288, 6, 1700, 160, attention_dropout=0.0), 5, "fp32"),
    "gpt, fp32, two micro-batches": Case(sized("gpt", 9, 128, 2, 3000, 96, ffn_hidden_size=640), 7, "fp32", 2),
    "gpt, fp32, full recomputation": Case(sized("gpt", 17, 192, 3, 600, 112, recompute="full"), 9, "fp32"),
    "gpt, fp32, large vocabulary": Case(sized("gpt", 3, 96, 3, 16000, 80, recompute="selective"), 5, "fp32"),
    "gpt, bf16, selective": Case(
        sized("gpt", 8, 224, 7, 1100, 144, recompute="selective", attention="exact"), 5, "bf16", 2
    ),
    "gpt, bf16, scores kept": Case(sized("gpt", 5, 160, 5, 500, 208, attention="exact"), 3, "bf16"),
    "bert, fp32, post-norm": Case(sized("bert", 6, 224, 7, 1300, 144, norm_order="post"), 5, "fp32"),
    "gpt, fp32, long and exact": Case(sized("gpt", 3, 96, 6, 300, 320, attention="exact"), 5, "fp32"),
    "gpt, fp32, long, exact, without dropout": Case(
        sized("gpt", 4, 64, 4, 300, 288, attention="exact", attention_dropout=0.0), 6, "fp32"
    ),
    "gpt, bf16, long, exact, full recomputation": Case(
        sized("gpt", 4, 96, 6, 300, 320, attention="exact", recompute="full"), 5, "bf16"
    ),
    "bert, bf16, long, exact, selective": Case(
        sized("bert", 3, 64, 4, 300, 352, attention="exact", recompute="selective"), 4, "bf16", 2
    ),
    "gpt, fp32, long, scores of SDPA": Case(sized("gpt", 3, 64, 4, 300, 320), 6, "fp32"),
    "gpt, bf16, several pieces of logits": Case(sized("gpt", 2, 64, 4, 50000, 512), 5, "bf16"),
    "gpt, fp32, several pieces of logits": Case(sized("gpt", 2, 64, 4, 50000, 512), 5, "fp32"),
    "bert, bf16, full recomputation": Case(sized("bert", 14, 256, 4, 1000, 128, recompute="full"), 5, "bf16"),
}
_TWO = {
    "gpt, fp32": Case(sized("gpt", 7, 288, 6, 1700, 160, attention_dropout=0.0, vocab_multiple=4), 5, "fp32"),
    "gpt, bf16, selective": Case(
        sized("gpt", 8, 256, 8, 1104, 144, recompute="selective", attention="exact"), 5, "bf16", 2
    ),
    "gpt, fp32, full recomputation": Case(sized("gpt", 17, 192, 4, 608, 112, recompute="full"), 9, "fp32"),
    "bert, bf16": Case(sized("bert", 8, 256, 4, 1008, 128, attention_dropout=0.0), 8, "bf16"),
}
CASES |= {f"{name}, 2 ranks": replace(case, tp_size=2) for name, case in _TWO.items()}
CASES |= {f"{n}, 2 ranks, sequence": replace(c, tp_size=2, sequence_parallel=True) for n, c in _TWO.items()}
CASES |= {
    "355M, bf16": Case(of_the_paper("355m"), 8, "bf16", traced=True),
    "355M, fp32, two micro-batches": Case(of_the_paper("355m", recompute="selective"), 4, "fp32", 2, traced=True),
    "1.2B, bf16, full recomputation": Case(of_the_paper("1.2b", recompute="full"), 32, "bf16", traced=True),
    "1.2B, bf16": Case(of_the_paper("1.2b"), 8, "bf16", traced=True),
    "BERT 336M, bf16": Case(of_the_paper("bert_336m"), 32, "bf16", traced=True),
    "1.2B, bf16, exact, full recomputation": Case(
        of_the_paper("1.2b", recompute="full", attention="exact"), 8, "bf16", traced=True
    ),
    "8.3B, fp16, 8 ranks": Case(of_the_paper("8.3b"), 4, "fp16", tp_size=8, traced=True),
    "8.3B, bf16, 8 ranks, sequence": Case(
        of_the_paper("8.3b", recompute="full"), 8, "bf16", 2, tp_size=8, sequence_parallel=True, traced=True
    ),
}


class TensorBytes(TorchDispatchMode):
    """While active, tracks the storages of all tensors returned by operations, from allocation to release."""

    def __init__(self, held: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()
        for tensor in held:
            self._follow(tensor)

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known and storage.nbytes():
            self._known.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._follow(leaf)
        return out


def soft_targets(case: Case, teacher: nn.Module | None, tokens: Tensor, scored: Tensor) -> SoftTargets | None:
    """The targets of one micro-batch, from a teacher's forward pass or as from a cache; None without either."""
    config, top_k, mix = case.config, case.top_k, (case.temperature, 0.5)
    if top_k is not None:
        log_p = torch.zeros(len(scored), top_k + 1, dtype=torch.promote_types(DTYPES[case.dtype], torch.float32))
        return CachedTargets(*mix, log_p, torch.arange(top_k).repeat(len(scored), 1))
    if teacher is None:
        return None
    batch = {"tokens": tokens, "token_types": torch.zeros_like(tokens), "attention_mask": None, "scored": scored}
    with torch.no_grad():
        return ProjectedTargets(*mix, *load(config.traits.loss).output_projection(teacher, batch), config.vocab_size)


def measure(case: Case, context: ParallelContext) -> int:
    """Peak bytes of live tensors in a step after the first: weights, state, gradients, activations, temporaries.

    A traced case excludes the update, which needs less memory.
    """
    config, b, s = case.config, case.micro_batch_size, case.config.max_position_embeddings
    seed = None if case.traced else 1
    model = build_model(config, context, seed=seed, dtype=DTYPES[case.dtype])
    optimizer = MixedPrecisionAdamW(
        model.named_parameters(), OptimizerConfig(lr=1e-3), PrecisionConfig(case.dtype, 1.0), context
    )
    tokens = torch.arange(b * s).view(b, s) % config.vocab_size
    keys = sample_dropout_keys(seed=1, sample_numbers=torch.arange(b))
    scored = torch.arange(b * scored_tokens(config, s))
    teacher = None
    if case.teacher is not None:
        teacher = build_model(case.job.teacher_job.config, context, seed=seed, dtype=DTYPES[case.dtype]).eval()

    def targets() -> SoftTargets | None:
        return soft_targets(case, teacher, tokens, scored)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(case.num_micro_batches):
            if config.family == "gpt":
                (model(tokens, tokens, keys, targets=targets()).sum() / tokens.numel()).backward()
            else:
                loss, order = model(tokens, torch.zeros_like(tokens), None, tokens, keys, scored, targets())
                (loss.sum() / tokens.numel() + order.float().mean()).backward()
        optimizer.reduce_gradients()
        if not case.traced:
            optimizer.step()

    if case.traced:
        counters = {"num_updates": 1, "num_skipped": 0, "skipped_in_a_row": 0, "loss_scale": None}
        optimizer.load_moments(counters, lambda key, out: None)
    else:
        step()
    optimizer.zero_grad()
    held = [*model.parameters(), *optimizer.tensors().values(), *optimizer.gradients().values()]
    held += [] if teacher is None else teacher.parameters()
    with TensorBytes(held) as tracked:
        step()
    return tracked.peak


def _gpu_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: None, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    """scaled_dot_product_attention as on a GPU: flash for half types, the memory-efficient kernel for fp32."""
    if q.dtype == torch.float32:
        kernel, options = torch.ops.aten._scaled_dot_product_efficient_attention, (None, True)
    else:
        kernel, options = torch.ops.aten._scaled_dot_product_flash_attention, ()
    return kernel(q, k, v, *options, dropout_p, is_causal, scale=scale)[0]


def measure_traced(case: Case) -> int:
    """`measure` on fake tensors with a GPU's kernels; the other tensor ranks are simulated."""
    dist.init_process_group("fake", rank=0, world_size=case.tp_size, store=FakeStore())
    try:
        context = case.context()
        with (
            FakeTensorMode(),
            patch.object(torch.nn.functional, "scaled_dot_product_attention", _gpu_attention),
            patch.object(replicated_layers, "sums_in_half", lambda x: False),
            patch.object(partition, "LOGITS_AT_ONCE", partition.LOGITS_AT_ONCE_ON_GPU),
        ):
            return measure(case, context)
    finally:
        dist.destroy_process_group()


def _on_a_rank(rank: int, names: list[str]) -> dict[str, int]:
    return {name: measure(CASES[name], CASES[name].context()) for name in names}


def measure_on_two_ranks(names: list[str]) -> dict[str, int]:
    """`measure` for cases with two tensor ranks, on two processes; returns the larger peak."""
    found = on_ranks(2, _on_a_rank, names)
    return {name: max(peaks[name] for peaks in found) for name in names}


def main() -> int:
    """Measure all cases, print the differences and optionally write a record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", type=record_argument, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = measure_on_two_ranks([name for name, case in CASES.items() if case.tp_size == 2])
    rows, metrics = [], {}
    for name, case in CASES.items():
        if name not in measured:
            measured[name] = measure_traced(case) if case.traced else measure(case, ParallelContext())
        evidence = "traced" if case.traced else "real"
        rows.append({"name": name, "evidence": evidence, "predicted": case.predicted, "tracked": measured[name]})
        rows[-1]["case"] = asdict(case) | {"config": case.config.to_dict()}
        metrics[name] = {"value": 100 * (case.predicted / measured[name] - 1), "unit": "% over the tracked bytes"}
        print(f"{name:<50}{evidence:<8}{case.predicted / 2**20:>12.1f}{measured[name] / 2**20:>12.1f} MiB", end="")
        print(f"{metrics[name]['value']:>8.2f} %", flush=True)
    if options.record is not None:
        write_record(
            new_record("peak_memory", "scaled_down", {"rows": rows, "threads_per_rank": 1}, None, metrics),
            options.record,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
