"""`make check-gpus`: check training on the GPUs of this machine (2 to 8) in about ten minutes, and print one report.

    python analysis/correctness/check_gpus.py                 # all visible GPUs
    python analysis/correctness/check_gpus.py --rehearse      # two CPU processes over gloo instead, with tiny models

Each part runs `src/train.py` or a measurement as a subprocess under a time limit. Ten minutes are an estimate: nine
launches in a row (on fewer than eight GPUs ten), of which each takes 30 to 90 s to import, connect and compile.

1. layouts: tensor, data and sequence parallelism and stages against one rank in fp64, every loss and gradient norm;
2. the same in bf16 with the kernels that a run uses (compiled on a GPU), made deterministic;
3. replicas, compared to the bit after every step, with newly tuned kernels;
4. kill -9 of one rank: the job must end by itself, resume from its checkpoint, and end bitwise equal to a run that was
   not disturbed;
5. time and bus bandwidth of the collectives by message size, and their share of a training step.

The report is printed, and written with all figures as `report.txt` and `record.json` into `outputs/check_gpus/<time>`,
next to the logs. Exit code 0: every part passed; 1: one failed; 2: there are fewer than 2 GPUs, or the folder cannot be
made.
"""

import argparse
import json
import shutil
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import torch

from analysis.benchmarks.gpu.gpu_facts import environment, nvidia_smi
from analysis.correctness.check_parts import (
    Check,
    compare_layouts,
    compare_replicas,
    kill_and_resume,
    layouts_of,
    name_of,
    train_arguments,
    train_one_rank,
)
from analysis.running import ROOT, Subprocess
from lmscale.cli.errors import one_line_errors
from lmscale.results import new_record, path_argument, write_record

OUTPUTS = ROOT / "outputs" / "check_gpus"
MOST_GPUS = 8
MIB = {"gpu": ("1", "4", "16", "64", "256"), "cpu": ("0.0625", "1")}


def count_devices(rehearse: bool) -> int:
    """Ranks to check with: the visible GPUs, at most 8, or two processes.

    Raises:
        ValueError: fewer than 2 GPUs.
    """
    if rehearse:
        return 2
    found = torch.cuda.device_count()
    if found < 2:
        raise ValueError(
            f"the GPUs that torch sees must be at least 2, but are {found}; --rehearse checks two CPU processes instead"
        )
    return min(found, MOST_GPUS)


def describe_machine(accelerator: str, ranks: int) -> tuple[list[str], dict]:
    """The first lines of the report, and the same facts for the record."""
    facts = environment(torch.device("cuda", 0) if accelerator == "gpu" else torch.device("cpu"))
    names = (
        [torch.cuda.get_device_name(i) for i in range(ranks)] if accelerator == "gpu" else ["process on a CPU"] * ranks
    )
    topology = (nvidia_smi("topo", "-m") or "").split("\nLegend")[0].strip() if accelerator == "gpu" else ""
    facts |= {"devices": names, "topology": topology or None}
    devices = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    driver = (facts["nvidia_smi"] or "").splitlines()[1:2]
    lines = [
        f"lmscale on {devices}",
        f"torch {torch.__version__}, CUDA {facts['cuda']}, NCCL {facts.get('nccl')}, cuDNN {facts['cudnn']}, "
        f"Python {sys.version.split()[0]}",
        f"driver (nvidia-smi): {driver[0] if driver else 'not available'}",
    ]
    return lines + topology.splitlines(), facts


def measure_bandwidth(check: Check) -> None:
    """Add a line per collective and size."""
    path = check.folder / "bandwidth.json"
    script = ROOT / "analysis" / "benchmarks" / "gpu" / "collective_bandwidth.py"
    arguments = [script, "--ranks", check.ranks, "--accelerator", check.accelerator, "--record", path]
    words = [*map(str, arguments), "--mib", *MIB[check.accelerator]]
    Subprocess(check.folder / "bandwidth.log", words).wait(60)
    metrics = json.loads(path.read_text(encoding="utf-8"))["metrics"]
    check.metrics |= metrics
    for name, entry in metrics.items():
        if name.endswith("/time"):
            case = name.removesuffix("/time")
            rate = metrics[f"{case}/bus_bandwidth"]["value"]
            check.add(f"{case.replace('_mib', ' MiB')}: {1e6 * entry['value']:,.0f} us, {rate:.3g} GB/s on the bus")


def communication_share(trace: Path) -> float:
    """Time of a rank's messages over that of its traced steps: of NCCL's kernels, or on a CPU of gloo's operations."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    events = [event for event in events if "dur" in event and event.get("cat") != "gpu_user_annotation"]
    steps = [event["dur"] for event in events if event["name"].startswith("ProfilerStep#")]
    kernels = [event["dur"] for event in events if "nccl" in event["name"] and event["cat"] == "kernel"]
    return sum(kernels or [event["dur"] for event in events if event["name"].startswith("gloo:")]) / sum(steps)


def measure_share(check: Check) -> None:
    """Add the share of communication in the traced steps of the undisturbed run, of the traced ranks the largest."""
    traces = sorted((check.folder / "whole" / "profile").glob("rank_*.json"))
    if not traces:
        raise RuntimeError("the profiled run must leave a trace, but left none")
    share = max(map(communication_share, traces))
    check.metrics["communication_share"] = {"value": share, "unit": "of a traced step, overlapped or not"}
    check.add(f"communication takes {share:.0%} of a step of the bf16 model ({check.describe_model()})")


def report_text(check: Check, machine: list[str], seconds: float) -> str:
    """The report: the machine, a line per result, and the verdict."""
    verdict = f"FAILED: {check.failed} of {check.parts} parts" if check.failed else f"all {check.parts} parts passed"
    return "\n".join([*machine, "", *check.lines, "", f"{verdict} in {seconds:.0f} s; logs in {check.folder}"])


@one_line_errors()
def main() -> int:
    """Check, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="two CPU processes over gloo, tiny models")
    parser.add_argument(
        "--folder", type=path_argument, help="of runs, logs and report; default outputs/check_gpus/<time>"
    )
    options = parser.parse_args()
    ranks = count_devices(options.rehearse)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the parts then end their processes
    started = time.monotonic()
    folder = (options.folder or OUTPUTS / time.strftime("%Y-%m-%d_%H-%M-%S")).absolute()
    folder.mkdir(parents=True)
    check = Check(folder, "cpu" if options.rehearse else "gpu", ranks)
    machine, facts = describe_machine(check.accelerator, ranks)
    check.run("one rank", train_one_rank)
    for layout in layouts_of(ranks):
        check.run(f"fp64, {name_of(layout)}", compare_layouts, "fp64", layout)
    check.run("bf16, the undisturbed run", compare_layouts, "bf16", check.whole_layout)
    check.run("replicas", compare_replicas)
    check.run("kill and resume", kill_and_resume)
    check.run("bandwidth", measure_bandwidth)
    check.run("share of communication", measure_share)
    for left in folder.glob("*/checkpoints"):
        shutil.rmtree(left)
    text = report_text(check, machine, time.monotonic() - started)
    print(text)
    (folder / "report.txt").write_text(text + "\n", encoding="utf-8")
    check.metrics["time"] = {"value": time.monotonic() - started, "unit": "s"}
    config = {"ranks": ranks, "accelerator": check.accelerator, "overrides": train_arguments(check, "bf16")}
    device = facts["devices"][0] if check.accelerator == "gpu" else "cpu"
    record = new_record("check_gpus", "run", config, None, check.metrics, device=device)
    record["environment"] |= facts
    write_record(record | {"report": text.splitlines(), "num_failed": check.failed}, folder / "record.json")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
