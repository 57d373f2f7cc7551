"""A stage that dies before any message of a step, its validation or its end: the others end, and nothing is lost."""

import os
import sys
from pathlib import Path

import pytest
import warm
from file_operations import CRASHED
from ranks import free_ports, torchrun_rank
from runs import assert_same_run, run_jobs, tiny_run

from lmscale.parallel import pipeline
from lmscale.runtime.exit_codes import DONE, FAILED
from lmscale.training.pretrain import pretrain
from lmscale.training.resolve import resolve
from lmscale.training.run import Run

NUM_STAGES, TIMEOUT_S = 3, 60.0
OPTIONS = {"model__num_layers": 3, "parallel__pp_size": NUM_STAGES, "micro_batch_size": 2, "resume__path": "auto"}
OPTIONS |= {"trainer__max_steps": 2, "checkpoint__save_every_steps": 1, "model__hidden_dropout": 0.1}


def die_before(number: int) -> None:
    """Let this process exit before its exchange `number` with another stage, counted from 1."""
    exchange, count = pipeline.exchange, 0

    def count_and_exchange(*args) -> None:
        nonlocal count
        count += 1
        if count == number:
            os._exit(CRASHED)
        exchange(*args)

    pipeline.exchange = count_and_exchange


def on_rank(rank: int, run: Run, port: int, dying: int, number: int) -> None:
    os.environ |= torchrun_rank(rank, NUM_STAGES) | {"MASTER_PORT": str(port)}
    if rank == dying:
        die_before(number)
    sys.exit(pretrain(run))


def train(folder: Path, dying: int, number: int) -> list[int | None]:
    """Exit codes of all ranks, which nothing ends from outside within the time limit; None: still running."""
    arguments = resolve(tiny_run("gpt", folder, **OPTIONS)), free_ports()[0], dying, number
    ranks = [warm.context.Process(target=on_rank, args=(rank, *arguments)) for rank in range(NUM_STAGES)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT_S)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return codes


def assert_ends_and_resumes(root: Path, dying: int, numbers: range) -> int:
    """Kill a stage before each of its exchanges `numbers`, while it has so many; returns how often it was killed."""
    runs = []
    for number in numbers:
        codes = train(root / f"{number}", dying, number)
        if codes == [DONE] * NUM_STAGES:
            break
        assert codes == [CRASHED if rank == dying else FAILED for rank in range(NUM_STAGES)], number
        runs.append(tiny_run("gpt", root / f"{number}", **OPTIONS))
    run_jobs([tiny_run("gpt", root / "whole", **OPTIONS), *runs], NUM_STAGES)
    for run in runs:
        assert_same_run(root / "whole", Path(run.run_dir))
    return len(runs)


def test_a_stage_that_dies_in_the_second_step_ends_the_others(tmp_path, capfd) -> None:
    assert assert_ends_and_resumes(tmp_path, dying=1, numbers=range(22, 23)) == 1
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 2 and all("is gone" in line and "stage" in line for line in lines), lines


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("dying", "num_messages"), [(0, 24), (1, 38), (2, 22)])
def test_a_stage_that_dies_before_any_of_its_messages_ends_the_others(tmp_path, dying, num_messages) -> None:
    assert assert_ends_and_resumes(tmp_path, dying, range(1, 100)) == num_messages
