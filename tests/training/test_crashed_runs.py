"""Whole runs that exit hard after a random file operation: resumed, they equal a run without a crash."""

import random
import sys
from functools import partial
from pathlib import Path

import pytest
from file_operations import FileOperations, count_operations
from runs import assert_same_run, run_jobs, tiny_run
from torch.multiprocessing import ProcessExitedException

OPTIONS = {"trainer__max_steps": 4, "checkpoint__save_every_steps": 1, "checkpoint__keep_last": 2}
OPTIONS |= {"resume__path": "auto", "model__hidden_dropout": 0.1}


def count_and_crash(root: Path, log: Path, crash: tuple[int, int] | None, rank: int) -> None:
    """Called on each rank; `crash` is the rank that exits and after how many operations."""
    FileOperations(root, log, rank, crash[1] if crash and crash[0] == rank else None).install()


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="follows file descriptors through /proc")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("background", [False, True])
def test_a_run_that_crashed_at_a_file_operation_resumes_to_the_same_end(tmp_path, background, tp_size) -> None:
    options = OPTIONS | {"checkpoint__async": background, "parallel__tp_size": tp_size}
    whole = tmp_path / "whole"
    run_jobs(
        [tiny_run("gpt", whole, **options)], tp_size, fault=partial(count_and_crash, whole, tmp_path / "log", None)
    )
    counts, chance, runs = count_operations(tmp_path / "log", tp_size), random.Random(tp_size), []
    for number in range(5):
        rank, folder = number % tp_size, tmp_path / f"crashed_{number}"
        after = chance.randrange(counts[rank] * number // 5, counts[rank] * (number + 1) // 5) + 1
        runs.append(tiny_run("gpt", folder, **options))
        with pytest.raises(ProcessExitedException, match="exit code 86"):
            run_jobs([runs[-1]], tp_size, fault=partial(count_and_crash, folder, tmp_path / "other", (rank, after)))
        print(f"rank {rank} of {tp_size} after operation {after} of {counts[rank]}, background={background}")
    run_jobs(runs, tp_size)
    for run in runs:
        assert_same_run(whole, Path(run.run_dir))
        assert listing(Path(run.run_dir)) == listing(whole)
