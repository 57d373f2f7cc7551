"""The work folder of a preparation: the files through which its stages pass their results on."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from ..config.corpus import PrepareConfig
from ..shared_files import replacing
from .inputs import InputFile

MAX_TASKS = 1000  # of the first stage


@dataclass(frozen=True)
class WorkFolder:
    """Everything the stages need; picklable.

    It has these files; shards are ranges of document keys, tasks are parts of the input.

    plan.json                           what determines the result
    evaluation.json                     texts to exclude from training, if there are any
    tokenizer.json
    inputs/<task>.json                  counts and sha256 of the task's files
    cleaned/<task>_<part>.arrow         documents of a task; batch i has those of shard i
    ids/<task>.npy                      hashes of the documents' own ids
    sorted/<shard>.parquet              the shard's documents by key, without exact copies
    sorted/<shard>.copies.parquet       locations of the exact copies
    bands/<shard>.npy                   uint64 [documents, bands], Fortran order: a band is contiguous
    lengths/<shard>.npy                 int64 [documents], characters
    pairs/<shard>/<band>.npy            int64 [pairs, 2], candidates whose first document is in the shard
    members/<shard>/<band>.npy          int64, documents of the shard that occur in any pair of the band
    sets/<shard>.{members,values,offsets}.npy   shingles of the members of all bands
    similar/<shard>.{pairs,jaccard}.npy pairs above the similarity threshold
    duplicates.npy                      int64, documents to remove, sorted; duplicates.parquet: the reasons
    tokens/<shard>/<source>_<split>.{bin,idx}
    logs/<stage>/                       datatrove's logs, statistics and completion markers
    progress/<stage>/<task>             documents and bytes so far

    Documents are numbered over all shards in key order.

    Args:
        config: the requested configuration.
        root: its path, inside the output folder.
        inputs: files (or parts of datasets) ordered by source and name.
        num_shards: number of ranges of document keys, which the stages after the first one process.
    """

    config: PrepareConfig
    root: Path
    inputs: tuple[InputFile, ...]
    num_shards: int

    @property
    def output(self) -> Path:
        """Folder of the dataset."""
        return self.root.parent

    @property
    def num_tasks(self) -> int:
        """Tasks of the first stage, each of which reads some inputs."""
        return min(len(self.inputs), MAX_TASKS)

    @property
    def parts(self) -> list[tuple[str, str]]:
        """(source, split) of the datasets to produce, in order."""
        return [(source, split) for source in sorted(self.config.sources) for split in ("train", "validation")]

    def path(self, *parts: object) -> Path:
        """Return the path of one of the files above; numbers are written with five digits."""
        names = [f"{part:05d}" if isinstance(part, int) else str(part) for part in parts]
        return self.root.joinpath(*names)

    def shard_file(self, kind: str, shard: int, ending: str = "npy") -> Path:
        """Return the path `<kind>/<shard>.<ending>`."""
        return self.root / kind / f"{shard:05d}.{ending}"

    def task_files(self, *parts: object, stage: str, num_tasks: int, ending: str = "npy") -> list[Path]:
        """Return the files of a folder with one file per task of an earlier stage, in the order of the tasks.

        Raises:
            ValueError: some are missing. On Slurm an array ends without error, although tasks are missing, if the same
                preparation is submitted again while it waits: datatrove then shortens the list that its tasks read.
        """
        files = sorted(self.path(*parts).glob(f"[0-9]*.{ending}"))
        if len(files) != num_tasks:
            raise ValueError(
                f"all {num_tasks} tasks of `{stage}` must be complete, but {self.path(*parts)} has the files of "
                f"{len(files)}; the same command runs the others, once no job of this preparation is left"
            )
        return files

    def first_documents(self) -> np.ndarray:
        """Return the number of each shard's first document, and the total as last entry; int64 [shards + 1]."""
        counts = [len(np.load(self.shard_file("lengths", shard), mmap_mode="r")) for shard in range(self.num_shards)]
        return np.cumsum([0, *counts], dtype=np.int64)

    def duplicates(self) -> np.ndarray:
        """Return the numbers of the documents to remove, sorted; empty if near-duplicates are kept."""
        path = self.path("duplicates.npy")
        return np.load(path) if path.is_file() else np.empty(0, dtype=np.int64)


class WorkStep(PipelineStep):
    """A datatrove step in a work folder; `run` does task `rank` of its stage."""

    type = "LMSCALE"

    def __init__(self, work: WorkFolder) -> None:
        super().__init__()
        self.work = work


class WorkTask(WorkStep):
    """The only step of a stage whose tasks read and write its files.

    Args:
        name: of the step in logs and manifest.
        do: does task `rank`, and returns its counts by label.
    """

    def __init__(self, work: WorkFolder, name: str, do: Callable[[WorkFolder, int], dict[str, int]]) -> None:
        self.name, self.do = name, do
        super().__init__(work)

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Do the task; see the function for errors."""
        for label, value in self.do(self.work, rank).items():
            self.stat_update(label, value=value)


def save_array(path: Path, array: np.ndarray) -> None:
    """`np.save` with an atomic rename."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.save(file, array)


def save_table(path: Path, table: pa.Table) -> None:
    """Write a compressed parquet file with an atomic rename."""
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def save_json(path: Path, content: object) -> None:
    """Write a JSON file with an atomic rename."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
