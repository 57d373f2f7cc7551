"""Time of a traced step by kind of work, from a trace written by `trainer.profiler=torch`.

    python analysis/benchmarks/trace_shares.py outputs/RUN/profile/rank_0.json
    python analysis/benchmarks/trace_shares.py outputs/RUN/profile/rank_0.json --record outputs/shares.json

An operation counts with its self time, without the operations it calls. Its kind is that of the innermost enclosing
region (optimizer, loss), or else that of its name. On a GPU, kernels are counted by the operation that launched them.
A record has the configuration, seed and machine of the traced run.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from lmscale.results import new_record, record_argument, write_record

PROJECTION, LOSS, LOGITS_COPIED = "vocabulary: products", "vocabulary: loss", "vocabulary: casts and copies"
REGIONS = {
    "Optimizer.step": "optimizer",
    "_LinearCrossEntropy": LOSS,  # except for its products and copies
    "aten::scaled_dot_product": "attention",
}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "scaled_mm", "mkldnn_linear")
# The first matching substring counts. Attention with dropout on a CPU consists of products, softmax and bernoulli; its
# products in the backward pass cannot be distinguished from others.
KINDS = (
    ("communication", ("c10d::", "c10d_functional::", "lmscale::", "gloo:", "nccl", "record_param_comms")),
    (LOSS, ("log_softmax", "nll_loss", "cross_entropy")),
    ("attention", ("scaled_dot_product", "flash_attention", "efficient_attention", "_softmax", "bernoulli")),
    ("matrix products", PRODUCTS),
    ("LayerNorm", ("layer_norm",)),
    ("embedding", ("embedding", "aten::index")),
    ("GELU", ("gelu",)),
    ("casts and copies", ("aten::copy_", "aten::clone", "aten::contiguous", "aten::to", "aten::_to_copy")),
)
OTHER = "other element-wise (dropout, residuals, biases)"
OPERATIONS, KERNELS = ("cpu_op", "user_annotation"), ("kernel", "gpu_memcpy", "gpu_memset")
HOST = "between operations"  # Python and waiting


def shares(events: Iterable[dict]) -> dict[str, float]:
    """Share of the traced steps' time by kind, largest first; they add up to 1.

    Args:
        events: `traceEvents` of a Chrome trace: complete events (`ph` X) with `ts` and `dur` in microseconds.

    Raises:
        ValueError: the trace contains no step.
    """
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = [e for e in complete if _is_step(e) and e.get("cat") != "gpu_user_annotation"]
    if not steps:
        raise ValueError("a trace must hold a step that was kept, but has none: trainer.max_steps must be at least 6")
    ops = [e for e in complete if e.get("cat") in OPERATIONS and not _is_step(e)]
    kernels = [e for e in complete if e.get("cat") in KERNELS]
    total = sum(step["dur"] for step in steps)
    seconds = _of_kernels(ops, kernels, complete) if kernels else _of_operations(ops)
    seconds[HOST] = total - sum(seconds.values())
    return {kind: time / total for kind, time in sorted(seconds.items(), key=lambda item: -item[1])}


def kind_of(names: list[str]) -> str:
    """Kind of an operation from its name and the enclosing names, outermost first."""
    for place in reversed(range(len(names))):
        for region, kind in REGIONS.items():
            if names[place].startswith(region):
                return _part_of_loss(names[place:]) if kind == LOSS else kind
    for name in reversed(names):
        for kind, parts in KINDS:
            if any(part in name for part in parts):
                return kind
    return OTHER


def _part_of_loss(names: list[str]) -> str:
    if any(part in name for name in names for part in PRODUCTS):
        return PROJECTION
    return LOGITS_COPIED if any("aten::copy_" in name for name in names) else LOSS


def _is_step(event: dict) -> bool:
    return event["name"].startswith("ProfilerStep#")


def _nested(ops: list[dict]) -> Iterable[tuple[dict, list[str], float]]:
    """Yield every operation with its enclosing names (its own last) and its self time in microseconds."""
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
    others = (*OPERATIONS, *KERNELS)
    launches = [e for e in complete if "correlation" in e.get("args", {}) and e.get("cat") not in others]
    launched_in = {
        event["args"]["correlation"]: names[:-1]
        for event, names, _ in _nested([*ops, *launches])
        if event.get("cat") not in others
    }
    found: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        names = launched_in.get(kernel.get("args", {}).get("correlation"), [])
        found[kind_of([*names, kernel["name"]])] += kernel["dur"]
    return found


def read_events(path: Path) -> list[dict]:
    """Events of a trace.

    Raises:
        ValueError: the file is missing or not a trace.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"`trace` must be a Chrome trace, but {path} is not: {error}") from None


def to_record(found: dict[str, float], trace: Path) -> dict:
    """Build a record of the shares, with the configuration, seed and machine of the traced run.

    Raises:
        ValueError: the trace is not in the folder of a finished run.
    """
    path = trace.absolute().parent.parent / "record.json"
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"`trace` must be in a run folder for a record, but: {error}") from None
    metrics = {kind: {"value": share, "unit": "of the traced time"} for kind, share in found.items()}
    name = f"profile_{run['config']['model']['architecture']}"
    record = new_record(name, "run", run["config"], run["seed"], metrics, layout=run["layout"], steps=run["steps"])
    return record | {"environment": run["environment"]}


def main() -> int:
    """Print the shares; with `--record` also write a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--record", type=record_argument, help="path of the record; none by default")
    options = parser.parse_args()
    try:
        found = shares(read_events(options.trace))
        record = to_record(found, options.trace) if options.record is not None else None
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for kind, share in found.items():
        print(f"{kind:<52}{share:>7.1%}")
    if record is not None:
        write_record(record, options.record)
        print(f"record: {options.record}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
