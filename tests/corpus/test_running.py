"""The local executor: a killed worker and a failing task."""

import os
import signal
import time
from pathlib import Path

import pytest
from datatrove.pipeline.base import PipelineStep

from lmscale.corpus.running import QuietLocalExecutor


class FailAt(PipelineStep):
    """Task 1 is killed as by the out-of-memory killer, or raises; the others take a time."""

    type, name = "TEST", "fail"

    def __init__(self, how: str, seconds: float) -> None:
        super().__init__()
        self.how, self.seconds = how, seconds

    def run(self, data: object = None, rank: int = 0, world_size: int = 1) -> None:
        if rank != 1:
            time.sleep(self.seconds)
        elif self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "raises":
            raise ValueError("task 1 is bad")


def executor(folder: Path, how: str, seconds: float = 0.0) -> QuietLocalExecutor:
    return QuietLocalExecutor([FailAt(how, seconds)], 5, 2, logging_dir=str(folder), start_method="spawn")


@pytest.mark.timeout(60)
def test_a_killed_worker_raises_and_the_next_run_continues(tmp_path) -> None:
    with pytest.raises(ValueError, match="one was killed .out of memory.*`launcher.workers`") as caught:
        executor(tmp_path, "killed").run()
    assert "\n" not in str(caught.value)
    executor(tmp_path, "nothing").run()
    assert len(list((tmp_path / "completions").iterdir())) == 5


@pytest.mark.timeout(60)
def test_a_task_that_raises_stops_the_other_workers(tmp_path) -> None:
    with pytest.raises(ValueError, match="task 1 is bad"):
        executor(tmp_path, "raises", 600.0).run()
