"""Write a checkpoint: each rank writes its share, no tensor is gathered, and the directory is renamed when complete.

The ranks do not communicate here. Each writes its file, then a small part file; rank 0 waits for all part files, merges
them into the metadata, syncs and renames. A save can therefore run in a background thread while the main thread trains
and uses the process groups.
"""

import dataclasses
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from torch import Tensor

from ..parallel import ParallelContext
from ..shared_files import sync_to_disk, write_atomically
from .errors import CheckpointError
from .find import REPLACED
from .host_copies import HostCopies
from .metadata import METADATA, CheckpointMetadata, FileEntry, Piece, TensorEntry
from .tensor_file import TensorFileWriter

_MAX_POLL_INTERVAL_S = 0.2  # while waiting for another rank's part


@dataclass(frozen=True)
class Share:
    """What one rank writes: its file, and its pieces' indices [start, stop) along the shard dimension by key."""

    file: str
    places: dict[str, tuple[int, int]]


def divide_tensors(
    entries: Mapping[str, TensorEntry], context: ParallelContext, padding: Mapping[str, int] | None = None
) -> Share:
    """Return this rank's share of a checkpoint.

    One of the data ranks that hold a shard writes it, and one of all ranks writes a replicated tensor, balanced so
    that all ranks write about the same number of bytes.

    Args:
        entries: every tensor of this rank's stage by key, equal on all its ranks; pieces are ignored.
        padding: by parameter name, what the shards hold after the last index (`padding_of`); it is not written.
    """
    tp_rank, tp_size, dp_size = context.tp_rank, context.tp_size, context.dp_size
    load = [[0] * tp_size for _ in range(dp_size)]
    places: dict[str, tuple[int, int]] = {}
    for key, entry in sorted(entries.items(), key=lambda item: (-item[1].num_bytes, item[0])):
        if entry.shard_dim is None:
            d, t = min(product(range(dp_size), range(tp_size)), key=lambda at: load[at[0]][at[1]])
            load[d][t] += entry.num_bytes
            if (d, t) == (context.dp_rank, tp_rank):
                places[key] = (0, 1)
        else:
            d = min(range(dp_size), key=lambda d: max(load[d]))
            load[d] = [bytes_so_far + entry.num_bytes // tp_size for bytes_so_far in load[d]]
            if d == context.dp_rank:
                size = entry.shape[entry.shard_dim]
                length = (size + (padding or {}).get(key.partition("/")[2], 0)) // tp_size
                if tp_rank * length < size:
                    places[key] = (tp_rank * length, min((tp_rank + 1) * length, size))
    rank = (context.dp_rank * context.pp_size + context.pp_rank) * tp_size + tp_rank
    file = f"rank_{rank}_of_{dp_size * context.pp_size * tp_size}.safetensors"
    return Share(file, dict(sorted(places.items())))


class CheckpointWriter:
    """Save the checkpoints of one run, synchronously or in the background.

    Args:
        token: text that is equal on all ranks and unique per start of the job, so that files of an earlier, interrupted
            start are never mistaken for this one's.
        rank, world_size: of this process among those that save.
        timeout_s: how long rank 0 waits for the other ranks' parts, in all.
    """

    def __init__(self, token: str, rank: int, world_size: int, timeout_s: float) -> None:
        self.token = token
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._thread: threading.Thread | None = None
        self._error: str | None = None
        self._attempts = 0  # equal on all ranks; distinguishes a repeated save from a failed one
        self._copies = HostCopies()

    def begin(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        metadata: CheckpointMetadata,
        share: Share,
        in_background: bool = False,
        on_complete: Callable[[Path], None] | None = None,
        are_copies: bool = False,
    ) -> None:
        """Start saving; `finish` must be called before the next save.

        Args:
            path: the checkpoint's directory, on a file system shared by all ranks.
            tensors: this rank's shard of every tensor of its share by key. In background mode they are copied to host
                memory (`HostCopies`), so that they may be modified as soon as this returns; if that fails, this rank
                saves before it returns, with a warning.
            metadata: tensor entries without pieces, and no files; only rank 0's is used.
            on_complete: called on rank 0, in the saving thread, after the directory has been renamed.
            are_copies: nobody else will modify the tensors, so they are not copied.
        """
        assert self._thread is None
        self._error = None
        self._attempts += 1
        mine = {}
        for key, (start, stop) in share.places.items():
            dim, mine[key] = metadata.tensors[key].shard_dim, tensors[key].detach()
            if dim is not None:
                mine[key] = mine[key].narrow(dim, 0, stop - start)  # without the padding
        if in_background and not are_copies:
            try:
                mine = self._copies.copy(mine)
            except RuntimeError as error:  # no memory, perhaps on this rank alone
                in_background = False
                warning = f"WARNING: rank {self.rank} saves {path.name} without a copy, training waits: {error}\n"
                print(warning, end="", file=sys.stderr, flush=True)
        arguments = (path, mine, metadata, share, on_complete)
        if not in_background:
            self._save(*arguments)
            return
        self._thread = threading.Thread(target=self._save, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> str | None:
        """Wait for the current save; returns its error or None. Only rank 0 knows about errors of other ranks."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._error

    def _save(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        metadata: CheckpointMetadata,
        share: Share,
        on_complete: Callable[[Path], None] | None,
    ) -> None:
        temporary = path.with_name(f".{path.name}.{self.token}-{self._attempts}.unfinished")
        try:
            self._write_part(temporary, tensors, share)
            if self.rank == 0:
                self._complete(temporary, path, metadata)
        except Exception as error:  # of any type: an error lost in the thread would look like a successful save
            self._error = str(error) if isinstance(error, CheckpointError) else f"rank {self.rank}: {error}"
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            return
        if self.rank == 0 and on_complete is not None:
            try:
                on_complete(path)
            except OSError as error:
                print(
                    f"WARNING: {path.name} is saved, but old checkpoints could not be removed: {error}",
                    file=sys.stderr,
                    flush=True,
                )

    def _write_part(self, temporary: Path, tensors: Mapping[str, Tensor], share: Share) -> None:
        """Write this rank's file, then a part file that says that it is complete or why it is not."""
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            part = {"file": share.file, "entry": None, "pieces": {}}
            if tensors:
                shapes = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
                with TensorFileWriter(temporary / share.file, shapes) as file:
                    for key, tensor in tensors.items():
                        part["pieces"][key] = [*share.places[key], file.write(key, tensor)]
                part["entry"] = [file.num_bytes, file.header_checksum]
            write_atomically(temporary / f"rank_{self.rank}.part", json.dumps(part).encode())
        except Exception as error:
            (temporary / share.file).unlink(missing_ok=True)  # on a full disk this frees space for the part file
            write_atomically(temporary / f"rank_{self.rank}.failed", f"rank {self.rank}: {error}".encode())
            raise

    def _complete(self, temporary: Path, path: Path, metadata: CheckpointMetadata) -> None:
        """On rank 0: wait for all parts, write the metadata, rename the directory."""
        files: dict[str, FileEntry] = {}
        pieces: dict[str, list[Piece]] = {key: [] for key in metadata.tensors}
        deadline = time.monotonic() + self.timeout_s
        for rank in range(self.world_size):
            part = self._wait_for_part(temporary, rank, deadline)
            if part["entry"] is not None:
                files[part["file"]] = FileEntry(*part["entry"])
            for key, (start, stop, checksum) in part["pieces"].items():
                pieces[key].append(Piece(part["file"], start, stop, checksum))
        for rank in range(self.world_size):
            (temporary / f"rank_{rank}.part").unlink()
        finish_directory(temporary, path, with_pieces(metadata, files, pieces))

    def _wait_for_part(self, temporary: Path, rank: int, deadline: float) -> dict:
        part, failed = temporary / f"rank_{rank}.part", temporary / f"rank_{rank}.failed"
        pause = 0.002
        # Looking for a file that is not there yet makes an NFS client remember for up to a minute that it is not.
        while part.name not in (names := os.listdir(temporary)):
            if failed.name in names:
                raise CheckpointError(failed.read_text(encoding="utf-8"))
            if time.monotonic() > deadline:
                raise CheckpointError(f"rank {rank} has not written its part within {self.timeout_s:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _MAX_POLL_INTERVAL_S)
        return json.loads(part.read_text(encoding="utf-8"))


def with_pieces(
    metadata: CheckpointMetadata, files: dict[str, FileEntry], pieces: Mapping[str, list[Piece]]
) -> CheckpointMetadata:
    """Return `metadata` with the locations of its tensors."""
    tensors = {
        key: dataclasses.replace(entry, pieces=tuple(sorted(pieces[key], key=lambda piece: piece.start)))
        for key, entry in metadata.tensors.items()
    }
    return dataclasses.replace(metadata, files=files, tensors=tensors)


def finish_directory(temporary: Path, path: Path, metadata: CheckpointMetadata) -> None:
    """Write the metadata of a directory whose files are complete and synced, and rename it to its final name.

    A checkpoint that has the name stays until the new one has it; in between, `list_checkpoints` finds it as replaced.
    """
    write_atomically(temporary / METADATA, metadata.to_json().encode())
    sync_to_disk(temporary)
    replaced = path.with_name(f"{path.name}{REPLACED}")
    if path.exists():  # the same step is saved again: keep the new checkpoint
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(path, replaced)
    os.rename(temporary, path)
    sync_to_disk(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_checkpoint(path: str | Path) -> None:
    """Delete a checkpoint, renaming it first so that a half-deleted one never looks complete."""
    path = Path(path)
    doomed = path.with_name(f".{path.name}.deleting")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    sync_to_disk(path.parent)  # otherwise a crash of the machine may keep the name and lose the files
    shutil.rmtree(doomed)


def set_aside(path: str | Path) -> Path:
    """Rename a damaged checkpoint or file so that it is not loaded but stays available for inspection."""
    path = Path(path)
    number, kept = 1, path.with_name(f"{path.name}.damaged")
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.name}.damaged{number}")
    os.rename(path, kept)
    return kept


def remove_unfinished(folder: str | Path) -> None:
    """Delete unfinished files of earlier starts; only call it while no other writer uses `folder`."""
    folder = Path(folder)
    replaced = [path for path in folder.glob(f"step_*{REPLACED}") if path.with_suffix("").exists()]
    for path in [*folder.glob(".step_*.unfinished"), *folder.glob(".step_*.deleting"), *replaced]:
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".*.shared"):  # of `Ranks.check_shared`
        path.unlink(missing_ok=True)
