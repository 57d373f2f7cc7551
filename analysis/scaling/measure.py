"""The scaling study, scaled down and run on this machine: strong and weak scaling, heads, and recomputation.

    python analysis/scaling/measure.py                     # gloo, one thread per rank, up to two ranks
    python analysis/scaling/measure.py --device cuda       # NCCL, one GPU per rank; batch and recompute sweeps on one

Every row is measured and states the machine, the number of threads and the load average, with the cost model's
prediction beside it. Rows measured on a CPU describe that CPU, not GPU scaling.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from analysis.scaling.cases import SCALING, Case, cpu_cases, gpu_cases
from analysis.scaling.clock import Clock
from lmscale.config import Layout
from lmscale.config.cluster import Cluster, load_cluster
from lmscale.config.training import OptimizerConfig, PrecisionConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext, sample_dropout_keys
from lmscale.planner.flops import model_flops_per_step, scored_tokens
from lmscale.planner.memory import estimate_memory
from lmscale.planner.params import count_parameters
from lmscale.planner.plan import make_plan
from lmscale.planner.workload import Workload
from lmscale.results import new_record, record_argument, write_record
from lmscale.training.step.optimizer import MixedPrecisionAdamW

ROOT = Path(__file__).resolve().parents[2]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure_case(case: Case, context: ParallelContext, device: torch.device, steps: int) -> dict[str, float]:
    """Measure median and best seconds per step, the time in collectives, and on a GPU peak memory, on this rank."""
    model = build_model(case.config, context, seed=1, dtype=DTYPES[case.dtype]).to(device)
    optimizer = MixedPrecisionAdamW(
        model.named_parameters(), OptimizerConfig(lr=1e-4), PrecisionConfig(case.dtype), context
    )
    b, s = case.micro_batch_size, case.config.max_position_embeddings
    scored = torch.arange(b * scored_tokens(case.config, s), device=device)
    tokens = (torch.arange(b * s, device=device) * 7919 % case.config.vocab_size).view(b, s)
    keys = sample_dropout_keys(seed=1, sample_numbers=torch.arange(b)).to(device)
    seconds, waits = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with Clock(device) as clock:
        for _ in range(steps + 1):  # the first step allocates and is not counted
            if context.dp_size * context.tp_size > 1:
                dist.barrier()
            clock.communication, start = 0.0, clock.now()
            optimizer.zero_grad()
            one_pass(model, tokens, keys, scored).backward()
            add_gradients(model, optimizer, context)
            optimizer.step()
            seconds.append(clock.now() - start)
            waits.append(clock.communication)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    middle = statistics.median(seconds[1:])
    best = min(range(1, steps + 1), key=seconds.__getitem__)
    return {"median_s": middle, "best_s": seconds[best], "best_communication_s": waits[best], "peak_bytes": peak}


def one_pass(model: torch.nn.Module, tokens: torch.Tensor, keys: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
    """Mean loss of one micro-batch of either architecture; for BERT over the positions `scored`."""
    if model.config.family == "gpt":
        return model(tokens, tokens, keys) / tokens.numel()
    loss, order = model(tokens, torch.zeros_like(tokens), None, tokens, keys, scored)
    return loss / len(scored) + order.float().mean()


def add_gradients(model: torch.nn.Module, optimizer: MixedPrecisionAdamW, context: ParallelContext) -> None:
    """Sum gradients over data ranks: the optimizer's buffer for half types, one flat message for fp32, like DDP."""
    optimizer.reduce_gradients()
    if context.dp_size > 1 and not optimizer.holds_masters:
        flat = torch.cat([param.grad.flatten() for param in model.parameters()])
        dist.all_reduce(flat, group=context.dp_group)


def rank_worker(rank: int, case: Case, folder: str, device_kind: str, steps: int) -> None:
    """Measure one case on one rank; rank 0 writes the result."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    world = case.tp_size * case.dp_size
    device = torch.device(device_kind, rank) if device_kind == "cuda" else torch.device("cpu")
    context = ParallelContext()
    if world > 1:
        if device_kind == "cuda":
            torch.cuda.set_device(device)
        store = dist.FileStore(os.path.join(folder, "store"), world)
        backend = "nccl" if device_kind == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=world, store=store)
        mesh = init_device_mesh(device_kind, (case.dp_size, case.tp_size), mesh_dim_names=("data", "tensor"))
        context = ParallelContext(
            tp_rank=mesh.get_local_rank("tensor"),
            tp_size=case.tp_size,
            dp_rank=mesh.get_local_rank("data"),
            dp_size=case.dp_size,
            tp_group=mesh.get_group("tensor"),
            dp_group=mesh.get_group("data"),
        )
    result = measure_case(case, context, device, steps)
    if rank == 0:
        torch.save(result, Path(folder) / "result")
    if world > 1:
        dist.destroy_process_group()


def run_case(case: Case, device_kind: str, steps: int) -> dict[str, float]:
    """Run one round of a case in fresh processes; the result includes the load average at its end."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_worker, (case, folder, device_kind, steps), nprocs=case.tp_size * case.dp_size, join=True)
        return torch.load(Path(folder) / "result", weights_only=True) | {"load_average": os.getloadavg()[0]}


def run_rounds(cases: list[Case], device_kind: str, steps: int, rounds: int) -> dict[Case, dict[str, float]]:
    """Return the round with the fastest step per case.

    Cases alternate within a round, so that other load on the machine affects all of them alike.
    """
    best: dict[Case, dict[str, float]] = {}
    for number in range(rounds):
        for case in cases:
            result = run_case(case, device_kind, steps)
            print(f"round {number + 1}: {case.study}, {case.label}: {result['best_s'] * 1e3:.1f} ms", flush=True)
            if case not in best or result["best_s"] < best[case]["best_s"]:
                best[case] = result
    return best


def modelled_step_s(case: Case, machine: Cluster | None) -> float | None:
    """Predicted seconds per step; None if no cluster describes the machine."""
    if machine is None:
        return None
    b = case.micro_batch_size
    job = Workload(case.config, b, b * case.dp_size, case.config.max_position_embeddings, case.dtype, 1)
    return make_plan(job, Layout(tp_size=case.tp_size, dp_size=case.dp_size), machine).time.total


def cluster_of(device_name: str) -> Cluster | None:
    """The cluster of conf/cluster that describes this device, if any."""
    name = {"cpu": "cpu", "NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100"}.get(device_name)
    return None if name is None else load_cluster(ROOT / "conf" / "cluster" / f"{name}.yaml")


def row(
    case: Case, result: dict[str, float], first: tuple[Case, dict] | None, machine: Cluster | None
) -> dict[str, Any]:
    """Build a table row: the case, step time, communication time and, in a scaling study, efficiency over `first`."""
    world = case.tp_size * case.dp_size
    s, batch = case.config.max_position_embeddings, case.micro_batch_size * case.dp_size
    estimate = estimate_memory(
        case.config,
        case.tp_size,
        case.micro_batch_size,
        s,
        case.dtype,
        case.dp_size,
        on_gpu=result["peak_bytes"] > 0,
        accumulates=False,
    )
    found = {
        "study": case.study,
        "label": case.label,
        "evidence": "measured",
        "layout": dataclasses.asdict(Layout(tp_size=case.tp_size, dp_size=case.dp_size)),
        "parameters": count_parameters(case.config).total,
        "step_s": result["best_s"],
        "median_step_s": result["median_s"],
        "communication_s": result["best_communication_s"],
        "compute_s": result["best_s"] - result["best_communication_s"],
        "modelled_step_s": modelled_step_s(case, machine),
        "load_average": result["load_average"],
        "model_flops_per_s": model_flops_per_step(case.config, s, batch) / result["best_s"],
        "predicted_rank_bytes": estimate.total,
        "measured_peak_bytes": result["peak_bytes"] or None,
    }
    if first is not None:
        other, other_result = first
        ranks = world / (other.tp_size * other.dp_size)
        work = found["parameters"] * batch
        work /= count_parameters(other.config).total * other.micro_batch_size * other.dp_size
        found["percent_of_linear"] = 100 * work / ranks * other_result["best_s"] / result["best_s"]
    return found


def describe(found: dict[str, Any]) -> str:
    """Format a row for the terminal."""
    modelled = found["modelled_step_s"]
    return (
        f"{found['study']:<12}{found['label']:<24}measured {found['step_s'] * 1e3:>8.1f} ms, messages "
        f"{found['communication_s'] / found['step_s']:>6.1%}, "
        + (f"{found['percent_of_linear']:>6.1f} % of linear, " if "percent_of_linear" in found else " " * 20)
        + f"load {found['load_average']:.1f}; modelled "
        + ("-" if modelled is None else f"{modelled * 1e3:.1f} ms")
    )


def main() -> int:
    """Run every case, print the table and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--ranks", type=int, default=None, help="largest number of ranks; default: 2 on a CPU, else all GPUs"
    )
    parser.add_argument("--steps", type=int, default=3, help="timed steps per round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default=None, help="run only one study: strong, weak, heads, recompute or sweep")
    parser.add_argument("--record", type=record_argument, help="default: outputs/measure_scaling/<time>.json")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device must be cpu on a machine without a GPU, but is cuda")
    for name in ("steps", "rounds", "ranks"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, but is {getattr(options, name)}")
    ranks = options.ranks or (torch.cuda.device_count() if options.device == "cuda" else 2)
    cases = gpu_cases(ranks) if options.device == "cuda" else cpu_cases(ranks)
    cases = [case for case in cases if options.only is None or case.study.startswith(options.only)]
    if not cases:
        parser.error(
            f"--only must name a study of this device (strong, weak, heads, recompute, sweep), but is {options.only}"
        )
    name = torch.cuda.get_device_name(0) if options.device == "cuda" else "cpu"
    threads, rows, first, started, load = 1, [], {}, time.time(), os.getloadavg()[0]
    best, machine = run_rounds(cases, options.device, options.steps, options.rounds), cluster_of(name)
    for case in cases:
        rows.append(row(case, best[case], first.get((case.study, case.subject)), machine))
        if case.study in SCALING:
            first.setdefault((case.study, case.subject), (case, best[case]))
        rows[-1] |= {"machine": name, "threads_per_rank": threads}
        print(describe(rows[-1]))
    record = new_record(
        f"measured_scaling_{options.device}",
        "scaled_down",
        {"rows": rows, "steps": options.steps, "rounds": options.rounds, "load_average_at_start": load},
        1,
        {
            f"{r['study']}/{r['label']}/{key}": {"value": r[key], "unit": unit}
            for r in rows
            for key, unit in (("step_s", "s"), ("communication_s", "s"), ("percent_of_linear", "% of linear"))
            if key in r
        },
        device=name,
        layout={"threads_per_rank": threads},
        started=started,
    )
    path = options.record or ROOT / "outputs" / "measure_scaling" / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}.json"
    write_record(record, path)
    print(f"record: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
