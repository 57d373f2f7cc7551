"""The stages in order, and their executors: local processes, Slurm jobs or Ray tasks, all from datatrove."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from ..data.indexed_corpus import TOKENIZER
from ..runtime.machine import usable_cores
from ..shared_files import check_sockets
from .cleaning import DropDocuments, EditText, join_story_lines, judge_language, judge_length, repair_text
from .collecting import ScatterDocuments, check_ids, sort_shard
from .deduplicating import compare_candidates, find_candidates, resolve_duplicates, shingle_candidates
from .finalizing import finalize_dataset, merge_shards
from .progress import StageBar
from .reading import SourceReader
from .tokenizing import tokenize_shard, train_on_documents
from .work_folder import WorkFolder, WorkTask


@dataclass(frozen=True)
class Stage:
    """One datatrove pipeline: every task runs all steps, and the next stage starts when all tasks are done."""

    name: str
    num_tasks: int
    steps: list[PipelineStep]


def stages(work: WorkFolder) -> list[Stage]:
    """Return the stages of a preparation, in the paper's order (section 4.1)."""
    config, shards = work.config, work.num_shards
    found = [
        ("ids", 1, "ids", check_ids),
        ("sort", shards, "sort by key", sort_shard),
    ]
    if config.dedup.jaccard is not None:
        found += [
            ("candidates", config.dedup.bands, "candidates", find_candidates),
            ("shingles", shards, "shingles", shingle_candidates),
            ("compare", shards, "exact comparison", compare_candidates),
            ("resolve", 1, "clusters", resolve_duplicates),
        ]
    if config.tokenizer.kind == "trained":
        found.append(("tokenizer", 1, "train the tokenizer", train_on_documents))
    found += [
        ("tokenize", shards, "tokenize", tokenize_shard),
        ("join", len(work.parts), "join", merge_shards),
        ("finish", 1, "finish", finalize_dataset),
    ]
    others = [Stage(name, tasks, [WorkTask(work, step, do)]) for name, tasks, step, do in found]
    return [Stage("clean", work.num_tasks, _cleaning(work)), *others]


def _cleaning(work: WorkFolder) -> list[PipelineStep]:
    config, cleaning, dropped = work.config, work.config.cleaning, work.root / "dropped"
    steps: list[PipelineStep] = [SourceReader(work)]
    if cleaning.repair_text:
        steps.append(EditText("repair text", repair_text, "repaired"))
    joined = [name for name, source in config.sources.items() if source.join_lines]
    if joined:
        steps.append(EditText("join lines", join_story_lines, "joined", joined))
    if cleaning.language is not None:
        judge = partial(judge_language, cleaning.language, cleaning.min_language_score)
        steps.append(DropDocuments("keep the language", judge, dropped / "language"))
    if cleaning.min_tokens:
        tokenizer = work.root / TOKENIZER if config.tokenizer.kind != "trained" else None
        judge = partial(judge_length, cleaning.min_tokens, tokenizer)
        steps.append(DropDocuments("drop short", judge, dropped / "short"))
    return [*steps, ScatterDocuments(work)]


class QuietLocalExecutor(LocalPipelineExecutor):
    """datatrove's local executor, with task logs in files only, and an error where a worker is killed."""

    def run(self) -> None:
        """Run the incomplete tasks; datatrove's own pool never returns if a worker is killed.

        Raises:
            ValueError: a worker was killed.
        """
        if self.workers == 1:
            super().run()
            return
        context = multiprocessing.get_context(self.start_method)
        with ProcessPoolExecutor(self.workers, context, _end_with_parent) as pool:
            try:
                tasks = [pool.submit(self._run_for_rank, rank) for rank in self.get_incomplete_ranks()]
                for task in as_completed(tasks):
                    task.result()
            except BrokenProcessPool:
                raise ValueError(
                    f"all {self.workers} workers must stay alive, but one was killed (out of memory?); lower "
                    "`launcher.workers`, and the same command continues"
                ) from None
            except BaseException:
                for worker in multiprocessing.active_children():  # the pool would wait for their tasks
                    worker.terminate()
                raise

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> Any:
        try:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
                return super()._run_for_rank(rank, local_rank, node_rank)
        finally:
            logger.remove()  # datatrove restores a handler that writes to the file just closed


def _end_with_parent() -> None:
    """Let a worker end with the process that started it; it would wait for tasks forever."""

    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def run_stages(work: WorkFolder) -> bool:
    """Run all stages that are not complete.

    Returns:
        whether the dataset is complete; on Slurm the jobs are only submitted.

    Raises:
        ValueError: several workers cannot have sockets in the temporary folder, or one was killed.
    """
    logger.remove()  # silence loguru: progress bars and our messages replace it
    launcher = work.config.launcher
    if launcher.kind == "slurm":
        _submit(work)
        return False
    all_stages, most = stages(work), launcher.workers or usable_cores()
    if launcher.kind == "local" and min(most, max(stage.num_tasks for stage in all_stages)) > 1:
        check_sockets("launcher.workers")
    for stage in all_stages:
        logs = work.path("logs", stage.name)
        with StageBar(work, stage.name, stage.num_tasks):
            if launcher.kind == "ray":
                workers = launcher.workers or -1
                executor: Any = RayPipelineExecutor(
                    stage.steps, stage.num_tasks, workers, logging_dir=str(logs), mem_per_cpu_gb=launcher.memory_gb
                )
            else:
                workers = min(most, stage.num_tasks)
                executor = QuietLocalExecutor(stage.steps, stage.num_tasks, workers, logging_dir=str(logs))
            # The tasks already use all cores, so threads inside them would only compete.
            os.environ["TOKENIZERS_PARALLELISM"] = "true" if workers == 1 else "false"
            executor.run()
    return True


def _submit(work: WorkFolder) -> None:
    """Submit one array of jobs per stage, each of which depends on the previous one.

    Raises:
        ValueError: sbatch refuses one of them.
    """
    launcher, executors = work.config.launcher, []
    for stage in stages(work):
        executor = SlurmPipelineExecutor(
            stage.steps,
            stage.num_tasks,
            launcher.time,
            launcher.partition,
            mem_per_cpu_gb=launcher.memory_gb,
            workers=launcher.workers or -1,
            job_name=f"lmscale_{stage.name}",
            qos=None,
            env_command=f"export PATH={Path(sys.executable).parent}:$PATH",
            sbatch_args=dict(launcher.sbatch),
            depends=executors[-1] if executors else None,
            logging_dir=str(work.path("logs", stage.name)),
        )
        executors.append(executor)
        with tempfile.TemporaryFile("w+") as said:
            try:
                with _stderr_to(said.fileno()):
                    executor.run()
            except subprocess.CalledProcessError as error:
                said.seek(0)
                reason = " ".join(said.read().split()) or f"exit code {error.returncode}"
                jobs = " ".join(held.job_id for held in executors if held.job_id not in (None, -1)) or "none"
                raise ValueError(
                    f"sbatch must accept stage `{stage.name}`, but: {reason} (jobs already submitted: {jobs})"
                ) from None
            said.seek(0)
            sys.stderr.write(said.read())  # warnings


@contextlib.contextmanager
def _stderr_to(file: int) -> Iterator[None]:
    """Redirect stderr to an open file, also that of commands, which `redirect_stderr` does not affect."""
    stderr = os.dup(2)
    os.dup2(file, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
