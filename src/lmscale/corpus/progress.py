"""Progress of a stage: each task reports its counts through a small file, and the parent process sums them."""

import threading
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .work_folder import WorkFolder

EVERY_S = 0.5


class Meter:
    """Count documents and characters of one task in the file `progress/<stage>/<task>`; a context manager."""

    def __init__(self, folder: WorkFolder, stage: str, rank: int) -> None:
        self.path = folder.path("progress", stage, f"{rank:05d}")
        self.documents = self.characters = 0
        self._written_at = 0.0

    def __enter__(self) -> "Meter":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._write()

    def add(self, documents: int, characters: int) -> None:
        """Add to the counts; the file is updated at most twice per second."""
        self.documents += documents
        self.characters += characters
        if time.monotonic() - self._written_at >= EVERY_S:
            self._write()

    def _write(self) -> None:
        self._written_at = time.monotonic()
        self.path.write_text(f"{self.documents} {self.characters}")


def read_progress(folder: WorkFolder, stage: str) -> tuple[int, int]:
    """Return the documents and characters processed so far by all tasks of a stage."""
    documents = characters = 0
    for path in folder.path("progress", stage).glob("*"):
        try:
            done = path.read_text().split()
        except OSError:
            continue
        if len(done) == 2:  # otherwise the file is being written
            documents, characters = documents + int(done[0]), characters + int(done[1])
    return documents, characters


class StageBar:
    """Progress bar of one stage: completed tasks, documents/s, MB/s and remaining time; a context manager.

    Args:
        name: name of the stage.
        logs: log folder of its executor, which records completed tasks.
        num_tasks: number of tasks.
    """

    def __init__(self, folder: WorkFolder, name: str, logs: Path, num_tasks: int) -> None:
        self.folder, self.name, self.logs, self.num_tasks = folder, name, logs, num_tasks
        self._stop = threading.Event()
        self._progress = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:>4.0f}/{task.total:.0f} tasks"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )

    def __enter__(self) -> "StageBar":
        self._start, self._already = time.monotonic(), read_progress(self.folder, self.name)
        self._progress.start()
        self._task = self._progress.add_task(self.name, total=self.num_tasks, rate="")
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._update()
        self._progress.stop()

    def _watch(self) -> None:
        while not self._stop.wait(EVERY_S):
            self._update()

    def _update(self) -> None:
        documents, characters = read_progress(self.folder, self.name)
        elapsed = max(time.monotonic() - self._start, 1e-9)
        documents, characters = documents - self._already[0], characters - self._already[1]
        rate = f"{documents / elapsed:,.0f} documents/s {characters / elapsed / 1e6:.1f} MB/s" if documents > 0 else ""
        done = sum(1 for _ in (self.logs / "completions").glob("*"))
        self._progress.update(self._task, completed=done, rate=rate)
