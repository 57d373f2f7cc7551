"""Signals of a user or a scheduler: a job saves and ends with the code that requeues it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from entry_points import environment, slurm_task, start, train
from ranks import free_ports
from running_jobs import LONG_RUN, end, linux_only, ranks_of, rows_on_disk, wait_until
from runs import assert_same_run

from lmscale.checkpoint import Checkpoint, list_checkpoints
from lmscale.runtime.exit_codes import FAILED, INTERRUPTED


def test_a_rank_that_starts_after_ctrl_c_ends_without_a_step() -> None:
    code = "from lmscale.runtime.interruption import Interruption; Interruption().install()"
    for name, status in (("SIGINT", 130), ("SIGTERM", 0)):  # after SIGTERM it saves its first step
        assert (
            subprocess.run([sys.executable, "-c", code], env=environment(LMSCALE_INTERRUPTED=name)).returncode == status
        )


@linux_only
@pytest.mark.parametrize(
    ("number", "tp_size"),
    [
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 1, marks=pytest.mark.slow),
    ],
)
def test_a_scheduler_signal_saves_at_the_next_step_and_the_resumed_run_is_bitwise_equal(
    tmp_path, number, tp_size
) -> None:
    settings = (*LONG_RUN, f"parallel.tp_size={tp_size}", f"hydra.run.dir={tmp_path / 'run'}", "resume=auto")
    process = start(*settings)
    try:
        wait_until(lambda: rows_on_disk(tmp_path / "run") > 2, process)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        end(process)
    assert process.returncode == INTERRUPTED, stderr
    (path,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    step = Checkpoint.open(path).metadata.step
    assert step == rows_on_disk(tmp_path / "run") and f"after step {step}, saved in" in stdout
    assert train(*settings, f"trainer.stop_after_steps={step + 2}").returncode == 0
    other = (*LONG_RUN, f"parallel.tp_size={tp_size}", f"hydra.run.dir={tmp_path / 'whole'}")
    assert train(*other, f"trainer.stop_after_steps={step + 2}").returncode == 0
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@linux_only
@pytest.mark.parametrize(
    ("number", "tp_size"),
    [
        (signal.SIGUSR1, 1),
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_torch_is_imported_ends_with_the_code_that_requeues_the_job(tmp_path, number, tp_size) -> None:
    process = start(*LONG_RUN, f"parallel.tp_size={tp_size}", f"hydra.run.dir={tmp_path}")

    def loads_torch() -> bool:
        return any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in pids())

    def pids() -> list[int]:  # with several ranks, those: the process that starts them has its handlers by then
        return [process.pid] if tp_size == 1 else ranks_of(process)

    try:
        wait_until(loads_torch, process)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    finally:
        end(process)
    assert process.returncode == INTERRUPTED, stderr
    assert stderr == f"stopped by {number.name} outside training: nothing to save\n"
    assert not list_checkpoints(tmp_path / "checkpoints")


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("at", ["training_step", "validation_step"])
def test_a_signal_in_a_validation_saves_before_its_end(tmp_path, at: str, killed: bool) -> None:
    """The signal comes to one of two data ranks with the last training micro-batch, or in a long validation."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Patch:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'lmscale.training.pretrain' and self in sys.meta_path:\n"
        "            sys.meta_path.remove(self)\n"
        "            from lmscale.training.module import PretrainModule as module\n"
        "            train, validate = module.training_step, module.validation_step\n"
        "            def send(self, where):\n"
        f"                if where == {at!r} and self.parallel.dp_rank == 1:\n"
        "                    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "            def training_step(self, batch, batch_idx):\n"
        "                send(self, 'training_step' if self.completed_steps == 1 else '')\n"
        "                return train(self, batch, batch_idx)\n"
        "            def validation_step(self, batch, batch_idx):\n"
        "                send(self, 'validation_step' if (self.completed_steps, batch_idx) == (2, 3) else '')\n"
        f"                if (self.completed_steps, batch_idx, {killed}) == (2, 11, True):\n"
        "                    os._exit(9)\n"
        "                return validate(self, batch, batch_idx)\n"
        "            module.training_step, module.validation_step = training_step, validation_step\n"
        "sys.meta_path.insert(0, Patch())\n"
    )
    run = (
        "parallel.dp_size=2",
        "micro_batch_size=1",
        "trainer.validate_every_steps=2",
        f"hydra.run.dir={tmp_path}/run",
    )
    done = train(*LONG_RUN, *run, "trainer.num_validation_samples=25", PYTHONPATH=str(tmp_path))
    (path,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    metadata = Checkpoint.open(path).metadata
    assert metadata.step == 2 and "validation" not in metadata.state, done.stderr
    assert (done.returncode == INTERRUPTED) == (not killed), done.stderr


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_every_process_leaves_the_loaders_running_until_the_ranks_have_saved(tmp_path, number) -> None:
    process = start(*LONG_RUN, "data.num_workers=2", f"hydra.run.dir={tmp_path}")
    try:
        wait_until(lambda: rows_on_disk(tmp_path) > 2, process)
        os.killpg(process.pid, number)
        _, stderr = process.communicate(timeout=60)
    finally:
        end(process)
    assert process.returncode == INTERRUPTED, stderr
    assert len(list_checkpoints(tmp_path / "checkpoints")) == 1


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, INTERRUPTED), (signal.SIGKILL, FAILED)])
def test_a_signal_to_one_rank_of_two_hosts_reaches_all_ranks_of_both(tmp_path, number, code) -> None:
    port = str(free_ports()[0])
    hosts = {"SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
    settings = (*LONG_RUN, "parallel.dp_size=4", "micro_batch_size=1", f"hydra.run.dir={tmp_path}")
    ranks = [start(*settings, **slurm_task(n, port) | hosts | {"SLURM_LOCALID": str(n % 2)}) for n in range(4)]
    try:
        wait_until(lambda: rows_on_disk(tmp_path) > 2, ranks[0])
        ranks[3].send_signal(number)
        ended = [process.communicate(timeout=90) for process in ranks]
    finally:
        for process in ranks:
            end(process)
    others = [process.returncode for process in ranks[:3]]
    assert others == [code] * 3, ended
    assert len(list_checkpoints(tmp_path / "checkpoints")) == (code == INTERRUPTED)
