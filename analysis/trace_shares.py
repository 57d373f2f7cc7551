"""Where the time of a traced step goes, by kind of work: shares of a trace that `trainer.profiler=torch` has written.

    python analysis/trace_shares.py outputs/RUN/profile/rank_0.json

An operation counts with the time it takes itself, without the operations it calls. Its kind is that of the innermost
enclosing region (optimizer, loss) or else of its name. On a GPU kernels are counted, by the operation they come from.
"""

import argparse
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

REGIONS = {
    "Optimizer.step": "optimizer",
    "_LinearCrossEntropy": "projection and loss",
    "aten::scaled_dot_product": "attention",
}
# First match of a part of the name counts. A CPU's attention with dropout is products, softmax and bernoulli: in its
# backward pass the products cannot be told from others.
KINDS = (
    ("communication", ("c10d::", "gloo:", "nccl", "record_param_comms")),
    ("projection and loss", ("log_softmax", "nll_loss", "cross_entropy")),
    ("attention", ("scaled_dot_product", "flash_attention", "efficient_attention", "_softmax", "bernoulli")),
    ("matrix products", ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "scaled_mm", "mkldnn_linear")),
    ("LayerNorm", ("layer_norm",)),
    ("embedding", ("embedding", "aten::index")),
    ("GELU", ("gelu",)),
    ("casts and copies", ("aten::copy_", "aten::clone", "aten::contiguous", "aten::to", "aten::_to_copy")),
)
OTHER = "other element-wise (dropout, residuals, biases)"
HOST = "between operations"  # Python, and waiting


def shares(events: Iterable[dict]) -> dict[str, float]:
    """Share of the traced steps' time by kind, largest first; they add up to 1.

    Args:
        events: `traceEvents` of a Chrome trace: complete events (`ph` X) with `ts` and `dur` in microseconds.

    Raises:
        ValueError: no traced step in it.
    """
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = [e for e in complete if e["name"].startswith("ProfilerStep#") and e.get("cat") != "gpu_user_annotation"]
    if not steps:
        raise ValueError("a trace must hold a step that was kept, but has none: trainer.max_steps must be at least 6")
    ops = [e for e in complete if e.get("cat") in ("cpu_op", "user_annotation") and e not in steps]
    kernels = [e for e in complete if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    total = sum(step["dur"] for step in steps)
    seconds = _of_kernels(ops, kernels, complete) if kernels else _of_operations(ops)
    seconds[HOST] = total - sum(seconds.values())
    return {kind: time / total for kind, time in sorted(seconds.items(), key=lambda item: -item[1])}


def kind_of(names: list[str]) -> str:
    """Kind of an operation from its name and those of what encloses it, outermost first."""
    for name in reversed(names):
        for region, kind in REGIONS.items():
            if name.startswith(region):
                return kind
    for name in reversed(names):
        for kind, parts in KINDS:
            if any(part in name for part in parts):
                return kind
    return OTHER


def _nested(ops: list[dict]) -> Iterable[tuple[dict, list[str], float]]:
    """Every operation with the names that enclose it, its own last, and the microseconds it takes itself."""
    threads = defaultdict(list)
    for event in ops:
        threads[event["pid"], event["tid"]].append(event)
    for thread in threads.values():
        thread.sort(key=lambda event: (event["ts"], -event["dur"]))
        stack: list[tuple[dict, list[str], list[float]]] = []
        for event in [*thread, None]:
            while stack and (event is None or event["ts"] >= stack[-1][0]["ts"] + stack[-1][0]["dur"]):
                done, names, inner = stack.pop()
                yield done, names, max(0.0, done["dur"] - sum(inner))
            if event is not None:
                if stack:
                    stack[-1][2].append(event["dur"])
                stack.append((event, [*(stack[-1][1] if stack else []), event["name"]], []))


def _of_operations(ops: list[dict]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for event, names, own in _nested(ops):
        if event.get("cat") == "cpu_op" or kind_of(names) != OTHER:
            found[kind_of(names)] += own
    return found


def _of_kernels(ops: list[dict], kernels: list[dict], complete: list[dict]) -> dict[str, float]:
    """Kernels by the operation in which the host launched them (`correlation`), or else by their own name."""
    launches = {
        e["args"]["correlation"]: e for e in complete if "correlation" in e.get("args", {}) and e not in kernels
    }
    threads = defaultdict(list)
    for event, names, _ in _nested(ops):
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], names))
    for spans in threads.values():
        spans.sort(key=lambda span: span[0])
    found: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        launch = launches.get(kernel.get("args", {}).get("correlation"))
        names: list[str] = []
        if launch is not None:
            spans = threads[launch["pid"], launch["tid"]]
            before = spans[: bisect_right(spans, launch["ts"], key=lambda span: span[0])]
            names = next((names for _, end, names in reversed(before) if end >= launch["ts"]), [])
        found[kind_of([*names, kernel["name"]])] += kernel["dur"]
    return found


def main() -> None:
    """Print a table of shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    path = parser.parse_args().trace
    for kind, share in shares(json.loads(path.read_text(encoding="utf-8"))["traceEvents"]).items():
        print(f"{kind:<52}{share:>7.1%}")


if __name__ == "__main__":
    main()
