"""Progress of a stage: each task reports its counts through a small file, and the parent process sums them."""

import time
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .work_folder import WorkFolder

EVERY_S = 0.5


class Meter:
    """Count documents and characters of one task in the file `progress/<stage>/<task>`; a context manager."""

    def __init__(self, work: WorkFolder, stage: str, rank: int) -> None:
        self.path = work.path("progress", stage, rank)
        self.documents = self.characters = 0
        self._written_at = 0.0

    def __enter__(self) -> "Meter":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
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


def read_progress(work: WorkFolder, stage: str) -> tuple[int, int]:
    """Return the documents and characters processed so far by all tasks of a stage."""
    documents = characters = 0
    for path in work.path("progress", stage).glob("*"):
        try:
            done = path.read_text().split()
        except OSError:
            continue
        if len(done) == 2:  # otherwise the file is being written
            documents, characters = documents + int(done[0]), characters + int(done[1])
    return documents, characters


class StageBar(Progress):
    """Progress bar of one stage: completed tasks, documents/s, MB/s and remaining time; a context manager.

    Args:
        name: name of the stage.
        num_tasks: number of tasks; its executor's log folder records the completed ones.
    """

    def __init__(self, work: WorkFolder, name: str, num_tasks: int) -> None:
        self._work, self._name = work, name
        self._start, self._already = time.monotonic(), read_progress(work, name)
        super().__init__(
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:>4.0f}/{task.total:.0f} tasks"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            refresh_per_second=1 / EVERY_S,
        )
        self.add_task(name, total=num_tasks, rate="")

    def get_renderables(self) -> Iterable[RenderableType]:
        """Read the counts again; rich calls this for every refresh, in a thread of its own."""
        counts, elapsed = read_progress(self._work, self._name), max(time.monotonic() - self._start, 1e-9)
        documents, characters = (now - before for now, before in zip(counts, self._already, strict=True))
        rate = f"{documents / elapsed:,.0f} documents/s {characters / elapsed / 1e6:.1f} MB/s" if documents > 0 else ""
        done = sum(1 for _ in self._work.path("logs", self._name, "completions").glob("*"))
        for task in self.tasks:  # none yet when rich asks for the first time
            self.update(task.id, completed=done, rate=rate)
        return super().get_renderables()
