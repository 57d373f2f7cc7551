"""`make check-gpus` and the parity check: their parts, that failures are reported, and both on CPU processes."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import warm
from entry_points import environment

from analysis.benchmarks.gpu.collective_bandwidth import bus_bytes
from analysis.correctness import parity
from analysis.correctness.check_gpus import communication_share, report_text
from analysis.correctness.check_parts import (
    COMPARED_STEPS,
    Check,
    largest_gaps,
    layouts_of,
)
from analysis.correctness.soak import is_running
from analysis.running import Subprocess
from lmscale.config import Layout

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "analysis" / "correctness" / "check_gpus.py"
GOOD = [{"train/loss": 2.0, "grad_norm": 1.0}] * COMPARED_STEPS


def run_check(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=environment(), capture_output=True, text=True, timeout=580
    )


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs to check")
def test_fewer_than_two_gpus_are_refused_in_one_line_that_names_the_rehearsal() -> None:
    done = run_check()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: the GPUs that torch sees must be at least 2, but are ")
    assert "--rehearse" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "script",
    [
        "correctness/check_gpus.py --rehearse --folder {}",
        "correctness/soak.py --folder {}",
        "finetuning/small.py --outputs {}",
        "norm_order/run.py --outputs {}",
        "pages/make_figures.py --only figure_5 --folder {}",
        "scaling_law/run.py --records {}/none",
    ],
)
def test_a_file_in_place_of_a_folder_is_refused_in_one_line(script: str, tmp_path) -> None:
    file = tmp_path / "file"
    file.touch()
    name, *arguments = script.format(file).split()
    done = warm.run([str(ROOT / "analysis" / name), *arguments], ROOT, environment(), timeout=200)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "error: " in done.stderr.splitlines()[-1] and str(file) in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("listed", "found"), [("GPU 0: some", 1), ("No devices were found", 0)])
def test_make_refuses_too_few_gpus_before_it_sets_up_anything(tmp_path, listed, found) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{listed}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    folders = (f"BIN={tmp_path}/bin", f"INSTALLED={tmp_path}/.installed", "PYTHON=false")
    found_first = environment(PATH=f"{tmp_path}:{os.environ['PATH']}")
    done = subprocess.run(
        ["make", "--no-print-directory", "check-gpus", *folders],
        cwd=ROOT,
        env=found_first,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: the GPUs that nvidia-smi lists must be at least 2, but are {found}\n" in done.stderr


@pytest.mark.parametrize("ranks", range(2, 9))
def test_the_layouts_use_at_most_the_ranks_and_every_kind_of_parallelism(ranks: int) -> None:
    layouts = layouts_of(ranks)
    assert len(layouts) == 4 - (ranks == 8)  # each is a launch
    sizes = [layout.tp_size * layout.pp_size * layout.dp_size for layout in layouts]
    assert all(1 < size <= ranks for size in sizes) and all(8 % layout.tp_size == 0 for layout in layouts)
    assert Layout(dp_size=ranks) in layouts
    assert any(layout.tp_size > 1 and not layout.sequence_parallel for layout in layouts)
    assert any(layout.tp_size > 1 and layout.sequence_parallel for layout in layouts)
    assert any(layout.pp_size > 1 for layout in layouts)
    assert any(layout.zero1 and layout.dp_size > 1 for layout in layouts) == (ranks >= 4)


def test_a_gap_is_that_of_the_worst_step_and_a_missing_or_infinite_number_is_infinite() -> None:
    assert largest_gaps(GOOD, GOOD) == [0.0, 0.0]
    assert largest_gaps(GOOD, [*GOOD[1:], {"train/loss": 2.0, "grad_norm": 1.5}]) == [0.0, 0.5]
    assert largest_gaps(GOOD, GOOD[1:]) == [math.inf, math.inf]
    for name, bad in (("train/loss", math.nan), ("grad_norm", math.inf)):
        assert math.inf in largest_gaps(GOOD, [*GOOD[1:], GOOD[0] | {name: bad}])


def test_a_failed_part_is_a_line_of_the_report_and_the_next_part_runs(tmp_path) -> None:
    check = Check(tmp_path, "cpu", 2)
    for passes in (False, True):
        check.run("layouts", lambda check, passes=passes: check.judge(passes, "losses differ by 0.5 (at most 1e-10)"))
    check.run("a command", lambda check: Subprocess(tmp_path / "log", ["-c", "raise ValueError('no')"]).wait(30))
    assert (check.parts, check.failed) == (3, 2)
    assert check.lines[:2] == [
        "FAIL  layouts: losses differ by 0.5 (at most 1e-10)",
        "PASS  losses differ by 0.5 (at most 1e-10)",
    ]
    assert check.lines[2].startswith("FAIL  a command: exit code 1: ValueError: no; see ")
    assert report_text(check, ["the machine"], 3.2).splitlines()[-1].startswith("FAILED: 2 of 3 parts in 3 s")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_part_that_takes_too_long_is_stopped_with_the_processes_it_started(tmp_path) -> None:
    code = (
        "import subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path)!r}, 'child').write_text(str(child.pid))\n"
        "time.sleep(600)"
    )
    part = Subprocess(tmp_path / "log", ["-c", code])
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="stopped after 0 s"):
        part.wait(0.1)
    child, deadline = int((tmp_path / "child").read_text()), time.monotonic() + 10
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_bus_carries_twice_as_much_for_an_all_reduce() -> None:
    assert bus_bytes("all_reduce", 800, 4) == 1200
    assert bus_bytes("all_gather", 800, 4) == bus_bytes("reduce_scatter", 800, 4) == 600


def test_the_share_of_communication_is_that_of_nccls_kernels_or_of_gloos_operations(tmp_path) -> None:
    step = {"name": "ProfilerStep#3", "dur": 100, "cat": "user_annotation"}
    gloo, launch = (
        {"name": f"{library}:all_reduce", "dur": 20, "cat": "user_annotation"} for library in ("gloo", "nccl")
    )
    kernel = {"name": "ncclDevKernel_AllReduce", "dur": 30, "cat": "kernel"}
    on_gpu = [launch, kernel, step | {"cat": "gpu_user_annotation"}, {"name": "gemm", "dur": 50, "cat": "kernel"}]
    for events, share in (([gloo, {"name": "process_name"}], 0.2), (on_gpu, 0.3), ([], 0.0)):
        (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [step, *events]}))
        assert communication_share(tmp_path / "trace.json") == share


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_check_passes_on_two_processes_and_leaves_none(tmp_path) -> None:
    done = run_check("--rehearse", "--folder", str(tmp_path / "check"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\nPASS  ") == 8 and "FAIL" not in done.stdout
    assert (tmp_path / "check" / "report.txt").read_text() == done.stdout
    record = json.loads((tmp_path / "check" / "record.json").read_text())
    assert (record["name"], record["num_failed"]) == ("check_gpus", 0)
    metrics = record["metrics"]
    assert metrics["fp64/tp_1_x_dp_2/grad_norm_gap"]["value"] < 1e-12
    assert metrics["all_gather/1_mib/bus_bandwidth"]["value"] > 0
    assert metrics["communication_share"]["value"] > 0  # above 1 where several collectives are under way at once
    listed = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path) not in listed and not list((tmp_path / "check").glob("*/checkpoints"))
    assert os.path.exists(tmp_path / "check" / "killed.log")


def steps(*losses: float) -> list[dict[str, float]]:
    return [{"train/loss": loss, "grad_norm": 1.0} for loss in losses]


def test_the_difference_of_two_loss_curves_is_the_largest_up_to_a_step() -> None:
    found = parity.compare(steps(2.0, 4.0, 8.0, 1.0), steps(2.0, 5.0, 8.0, 1.0), "train/loss")
    assert found == {1: 0.0, 3: 0.25, 4: 0.25}
    assert parity.compare(steps(2.0), steps(math.nan), "train/loss") == {1: math.inf}


@pytest.mark.parametrize("gap", [0.0, 1e-9])
def test_a_layout_that_differs_fails_the_check(monkeypatch, capsys, gap: float) -> None:
    monkeypatch.setattr(parity, "train", lambda family, tp_size, *_: steps(2.0 + gap * (tp_size == 4)))
    monkeypatch.setattr("sys.argv", ["parity.py", "--steps", "1"])
    assert parity.main() == (1 if gap else 0)
    verdicts = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert verdicts == ["pass", "FAIL" if gap else "pass", "pass", "pass"] * 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_layout_trains_as_one_process(monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["parity.py", "--steps", "2"])
    assert parity.main() == 0
