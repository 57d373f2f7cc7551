"""The metadata of a checkpoint, `metadata.json`, protected by a checksum.

    step_120.ckpt/
      rank_0_of_4.safetensors   "model/<name>", "exp_avg/<name>", "exp_avg_sq/<name>": the pieces written by that rank
      ...
      metadata.json             step, model, location of each piece of each logical tensor, checksums, counters

A checkpoint contains only safetensors and JSON, no code. A directory gets its final name only when it is complete.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from .errors import CheckpointError, CheckpointVersionError
from .tensor_file import DTYPE_NAMES, DTYPES, is_shape, num_bytes

FORMAT_VERSION = 2
METADATA = "metadata.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9_-]+\.safetensors")


@dataclass(frozen=True)
class Piece:
    """Indices [start, stop) of a logical tensor along its shard dimension, as one tensor of a file."""

    file: str
    start: int
    stop: int
    checksum: str


@dataclass(frozen=True)
class TensorEntry:
    """A logical tensor: its full shape, its shard dimension (None: not sharded) and its pieces, in order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shard_dim: int | None
    pieces: tuple[Piece, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of the full logical tensor."""
        return num_bytes(self.shape, self.dtype)

    def part_shape(self, length: int) -> tuple[int, ...]:
        """Shape of a part of this length along the shard dimension; the full one of a tensor that is not sharded."""
        return tuple(length if dim == self.shard_dim else size for dim, size in enumerate(self.shape))


@dataclass(frozen=True)
class FileEntry:
    """A file's length in bytes and the checksum of its header; the pieces' checksums cover its data."""

    num_bytes: int
    header_checksum: str


@dataclass(frozen=True)
class CheckpointMetadata:
    """Everything except the tensors.

    Args:
        step: number of optimizer steps taken.
        layout: `Layout.sizes` of the writer; for information only, readers do not need it.
        model: `TransformerConfig.to_dict()`.
        tensors: logical tensors by key, `model/<parameter>`, `exp_avg/<parameter>`, `exp_avg_sq/<parameter>`.
        files: file entries by name.
        optimizer: counters and loss scale; empty if only weights were saved.
        run: `RunConfig.to_dict()` of the run that wrote it, or the source of a conversion.
        state: state of the training loop: data order, validation, Lightning's progress.
    """

    step: int
    layout: dict[str, int]
    model: dict[str, Any]
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    optimizer: dict[str, Any]
    run: dict[str, Any]
    state: dict[str, Any]

    def to_json(self) -> str:
        """Serialize to the text of `metadata.json`, with format version and checksum."""
        values = {"format_version": FORMAT_VERSION} | asdict(self)
        for key, entry in self.tensors.items():
            values["tensors"][key]["dtype"] = DTYPE_NAMES[entry.dtype]
        return json.dumps({"checksum": _checksum(values)} | values, indent=1)


def read_metadata(path: Path) -> CheckpointMetadata:
    """Parse the metadata of a checkpoint, and check its checksum and the locations of all pieces.

    Raises:
        CheckpointError: it is damaged, or has a different format version.
    """
    try:
        values = json.loads((path / METADATA).read_text(encoding="utf-8"))
        version, checksum = values.pop("format_version"), values.pop("checksum", None)
        expected = _checksum({"format_version": version} | values)
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path.name}: {METADATA} cannot be parsed ({_short(error)})") from None
    if version != FORMAT_VERSION:
        raise CheckpointVersionError(
            f"checkpoint {path.name}: format_version must be {FORMAT_VERSION}, but is {version!r}"
        )
    if checksum != expected:
        raise CheckpointError(f"checkpoint {path.name}: {METADATA} does not match its checksum {checksum!r}")
    try:
        return _parse(values)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"checkpoint {path.name}: {METADATA} has a wrong entry ({_short(error)})") from None


def _parse(values: dict[str, Any]) -> CheckpointMetadata:
    files = {name: FileEntry(**entry) for name, entry in values.pop("files").items()}
    for name, file in files.items():
        if not _FILE_NAME.fullmatch(name) or type(file.num_bytes) is not int:
            raise ValueError(f"file {name!r}")
    tensors = {}
    for key, entry in values.pop("tensors").items():
        pieces = tuple(Piece(**piece) for piece in entry["pieces"])
        tensors[key] = TensorEntry(tuple(entry["shape"]), DTYPES[entry["dtype"]], entry["shard_dim"], pieces)
        _check_pieces(key, tensors[key], files)
    metadata = CheckpointMetadata(tensors=tensors, files=files, **values)
    if sum(entry.num_bytes for entry in tensors.values()) > sum(file.num_bytes for file in files.values()):
        raise ValueError("the tensors are larger than the files")  # before a reader allocates memory for them
    if type(metadata.step) is not int or metadata.step < 0:
        raise ValueError(f"step {metadata.step!r}")
    for name in ("layout", "model", "optimizer", "run", "state"):
        if type(getattr(metadata, name)) is not dict:
            raise ValueError(name)
    return metadata


def _check_pieces(key: str, entry: TensorEntry, files: dict[str, FileEntry]) -> None:
    """Check that the pieces cover all indices in order and are in known files."""
    if not is_shape(entry.shape):
        raise ValueError(f"shape of {key}")
    dim = entry.shard_dim
    if dim is not None and (type(dim) is not int or not 0 <= dim < len(entry.shape)):
        raise ValueError(f"shard_dim of {key}")
    length = 1 if entry.shard_dim is None else entry.shape[entry.shard_dim]
    reached = 0
    for piece in entry.pieces:
        is_known = type(piece.start) is type(piece.stop) is int and piece.file in files
        if not is_known or not reached == piece.start < piece.stop:
            raise ValueError(f"piece of {key}")
        reached = piece.stop
    if reached != length:
        raise ValueError(f"pieces of {key}")


def _checksum(values: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:120]
