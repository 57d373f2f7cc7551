"""Short trainings of the best modelled layouts on this machine: step time and memory measured, beside the model."""

import contextlib
import csv
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

import torch

from ..config.checks import require
from ..config.plan import PlanConfig
from ..planner.memory import GIB
from ..planner.plan import Plan
from ..planner.question import plans_of_machine
from ..results import METRICS, new_record, record_path, write_record
from ..runtime.machine import usable_cores

LAYOUT = ("tp_size", "dp_size", "zero1", "batch_halves")  # what is compared; threads follow from it
WARM_UP_STEPS, TIMED_STEPS = 3, 7
_GRACE_S = 5.0  # for a training to end by itself, when the measurement is stopped
_TIMED_ONLY = (  # one row per step, and no checkpoint
    "trainer.validate_every_steps=0",
    "trainer.num_validation_samples=1",
    "trainer.progress_bar=false",
    "checkpoint.save_every_steps=0",
    "checkpoint.save_every_minutes=null",
    "checkpoint.save_last=false",
    "checkpoint.keep_best=null",
    "logger.log_every_steps=1",
    "logger.tensorboard=false",
)


def measure_layouts(question: PlanConfig, train: list[str]) -> dict[str, Any]:
    """Train the best `measure` modelled layouts for a few steps, one after the other, and write the record.

    Each is a run of `src/train.py` on the documentation that ships with Python: the time of a step does not depend on
    what the tokens are.

    Args:
        train: the words that start `src/train.py` with all of the training but its layout.

    Returns:
        the record: `layouts`, fastest first, each with its rank in the model's order; `failed`, with their reasons.

    Raises:
        ValueError: `cluster` is not of this machine; the training is shorter; no layout fits; all have failed.
    """
    is_gpu = torch.cuda.is_available()
    _check(question, is_gpu)
    plans = plans_of_machine(question, count_devices(is_gpu))
    path, load, layouts, failed = record_path(question.record), os.getloadavg()[0], [], []
    for rank, plan in enumerate(plans, start=1):
        layout = _describe(question, plan, rank, is_gpu)
        print(f"measuring {rank} of {len(plans)}: {' '.join(layout_overrides(layout))}", file=sys.stderr, flush=True)
        layout |= time_training([*train, *layout_overrides(layout)], WARM_UP_STEPS + TIMED_STEPS, is_gpu)
        (failed if "reason" in layout else layouts).append(layout)
    if not layouts:
        raise ValueError(f"`measure` must find a layout that trains, but all have failed: {failed[0]['reason']}")
    layouts.sort(key=lambda layout: layout["step_time_s"])
    for layout in layouts:
        layout["tokens_per_s"] = question.global_batch_size * question.data.seq_length / layout["step_time_s"]
    units = {"step_time_s": "s", "tokens_per_s": "tokens/s", "memory_bytes": "bytes"}
    metrics = {f"{label(each)}/{key}": {"value": each[key], "unit": units[key]} for each in layouts for key in units}
    metrics["load_average_before"] = {"value": load, "unit": "processes"}
    device = torch.cuda.get_device_name() if is_gpu else "cpu"
    record = new_record(question.name, "run", question.to_dict(), None, metrics, device=device)
    record |= {"layouts": layouts, "failed": failed}
    write_record(record, path)
    return record


def count_devices(is_gpu: bool) -> int:
    """GPUs of this machine, or the cores that this process may use."""
    return torch.cuda.device_count() if is_gpu else usable_cores()


def label(layout: dict[str, Any]) -> str:
    """A short name of a layout: tp1_dp2_zero1."""
    options = [name for name in ("zero1", "batch_halves") if layout[name]]
    return "_".join([f"tp{layout['tp_size']}", f"dp{layout['dp_size']}", *options])


def layout_overrides(layout: dict[str, Any]) -> list[str]:
    """A measured layout as overrides of `src/train.py`."""
    words = [f"parallel.tp_size={layout['tp_size']}", f"parallel.dp_size={layout['dp_size']}"]
    words += [f"parallel.{name}=true" for name in ("zero1", "batch_halves") if layout[name]]
    return words + ([] if layout["threads"] is None else [f"trainer.num_threads={layout['threads']}"])


def format_measured(record: dict[str, Any], path: str, command: str) -> str:
    """The layouts beside the model, fastest first.

    Args:
        command: that trains with the fastest.
    """
    first, found = record["layouts"][0], record["environment"]
    devices = f"cores of {found['cpu']}" if found["device"] == "cpu" else f"x {found['device']}"
    used = first["tp_size"] * first["dp_size"] * (first["threads"] or 1)
    lines = [
        f"{record['name']} on {used} {devices}: median of {TIMED_STEPS} "
        f"steps after {WARM_UP_STEPS}, largest memory of a rank",
        f"{'':>4}{'tp':>5}{'dp':>5}{'zero1':>7}{'halves':>8}{'threads':>9}{'s/step':>10}{'modelled':>10}"
        f"{'its rank':>10}{'GiB':>8}{'modelled':>10}{'tokens/s':>12}",
    ]
    for number, layout in enumerate(record["layouts"], start=1):
        modelled = layout["modelled"]
        options = ("yes" if layout[name] else "" for name in ("zero1", "batch_halves"))
        lines.append(
            f"{number:>4}{layout['tp_size']:>5}{layout['dp_size']:>5}{next(options):>7}{next(options):>8}"
            f"{layout['threads'] or '':>9}{layout['step_time_s']:>10.3f}{modelled['step_time_s']:>10.3f}"
            f"{modelled['rank']:>10}{layout['memory_bytes'] / GIB:>8.2f}{modelled['memory_bytes'] / GIB:>10.2f}"
            f"{layout['tokens_per_s']:>12,.0f}"
        )
    lines += [f"   failed: {' '.join(layout_overrides(each))}: {each['reason']}" for each in record["failed"]]
    return "\n".join([*lines, f"record: {path}", f"train:  {command}"])


def _check(question: PlanConfig, is_gpu: bool) -> None:
    """Refuse the cluster of another machine, and a training that ends before it can be timed."""
    cluster, steps = question.cluster, WARM_UP_STEPS + TIMED_STEPS
    device = torch.cuda.get_device_name() if is_gpu else "CPU"
    if cluster.is_gpu != is_gpu or (is_gpu and cluster.device.split()[0] not in device):
        raise ValueError(
            f"`cluster` must describe this machine, of {count_devices(is_gpu)} {'x ' + device if is_gpu else 'cores'}, "
            f"with `measure`, but is {cluster.name} ({cluster.device})"
        )
    rule = f"at least {steps} with `measure`"
    require(question, "trainer.max_steps", rule, question.trainer.max_steps >= steps)


def _describe(question: PlanConfig, plan: Plan, rank: int, is_gpu: bool) -> dict[str, Any]:
    """A layout and what the model says of it; on a CPU its memory with what the process itself takes."""
    used, cluster = question.num_devices or count_devices(is_gpu), question.cluster
    reserved = 0 if is_gpu else int(cluster.reserved_gib * GIB)
    return {name: getattr(plan.layout, name) for name in LAYOUT} | {
        "threads": None if is_gpu else used // plan.layout.world_size,
        "modelled": {
            "rank": rank,
            "step_time_s": plan.time.total,
            "memory_bytes": plan.needed_bytes + reserved,
        },
    }


def time_training(command: list[str], num_steps: int, is_gpu: bool) -> dict[str, Any]:
    """Run a training of `num_steps` steps, of which the first `WARM_UP_STEPS` are not counted.

    Returns:
        the seconds of each step and their median, the largest memory of a rank in bytes (on a GPU the peak of the
        allocator, on a CPU the peak of the process), and whether layers were compiled; or the reason why it failed.
    """
    with tempfile.TemporaryDirectory(prefix="lmscale_measure_", ignore_cleanup_errors=True) as folder:
        run, output = Path(folder) / "run", Path(folder) / "stderr"
        words = [*command, f"trainer.stop_after_steps={num_steps}", *_TIMED_ONLY, f"hydra.run.dir={run}"]
        environment = {key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"}  # set by ourselves
        with output.open("w") as stderr:
            code, usage = _run(words, stderr, environment)
        if code:
            return {"reason": _reason(code, output.read_text(encoding="utf-8", errors="replace"))}
        with (run / METRICS).open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["time/step_s"]][WARM_UP_STEPS:]
        compiled = json.loads((run / "config.json").read_text(encoding="utf-8"))["compile"]
    times = [float(row["time/step_s"]) for row in rows]
    resident = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "step_time_s": statistics.median(times),
        "step_times_s": times,
        "memory_bytes": int(max(float(row["memory_gib"]) for row in rows) * GIB) if is_gpu else resident,
        "compiled": compiled,
    }


def _run(words: list[str], stderr: TextIO, environment: dict[str, str]) -> tuple[int, resource.struct_rusage]:
    """Run a command to its end; Ctrl-C or SIGTERM to this process ends it first.

    Returns:
        its exit code; and the resources of it and of all processes that it has started, of which the peak memory is
        that of the largest one, on Linux at least that of this process.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _end))
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=stderr, env=environment)
        try:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, usage
        except BaseException:
            process.terminate()  # it stops after the step, and would then save
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            raise
        finally:
            process.kill()  # its ranks end when their launcher is gone
            process.wait()


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, f"stopped by {signal.Signals(number).name}\n".encode())
    raise SystemExit(128 + number)


def _reason(code: int, stderr: str) -> str:
    """Why a run has failed, in one line: its error, its last line, or the signal that ended it."""
    lines = stderr.strip().splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors or code > 0:
        return (errors or lines or [f"exit code {code}"])[-1]
    return f"ended by {signal.Signals(-code).name}"
