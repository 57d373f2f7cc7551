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

from ..config import TransformerConfig
from .errors import CheckpointError, CheckpointVersionError
from .tensor_file import DTYPE_NAMES, DTYPES, is_shape, num_bytes

FORMAT_VERSION = 2
METADATA = "metadata.json"
PUBLISHED_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # of a Hugging Face model in one file
REPLACED = ".replaced"  # ends the name of a complete checkpoint while a new one of the same step takes its place
_NAME = re.compile(rf"step_(\d+)\.ckpt({re.escape(REPLACED)})?")
_FILE_NAME = re.compile(r"[A-Za-z0-9_-]+\.safetensors")
# Keys that may differ between a checkpoint and the model that loads it: they do not change the function of the weights.
_FREE = {"hidden_dropout", "attention_dropout", "embedding_dropout", "recompute", "attention"}
_FREE |= {"initializer", "initializer_std", "scale_residual_init"}  # only used for initialization


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


def checkpoint_name(step: int) -> str:
    """Return the directory name of the checkpoint after `step` optimizer steps."""
    return f"step_{step}.ckpt"


def checkpoint_step(path: Path) -> int:
    """Return the step in the directory name of a checkpoint found by `list_checkpoints`."""
    return int(_NAME.fullmatch(path.name).group(1))


def list_checkpoints(folder: str | Path) -> list[Path]:
    """List the checkpoints in `folder`, by ascending step.

    Unfinished checkpoints have other names. One that was being replaced is listed if its successor is missing. A
    directory without metadata is listed, because only complete checkpoints get such a name; `read_metadata` reports
    what is wrong with it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = {}
    for path in sorted(folder.iterdir(), reverse=True):  # replaced ones first
        if _NAME.fullmatch(path.name) and path.is_dir():
            found[checkpoint_step(path)] = path
    return [path for _, path in sorted(found.items())]


def latest_checkpoint(path: str | Path) -> Path:
    """Find the checkpoint at `path`: the path itself, or the latest one in a run folder or a folder of checkpoints.

    A path that is neither is returned unchanged; reading it reports the error.
    """
    path = Path(path)
    if (path / METADATA).is_file():
        return path
    found = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    return found[-1] if found else path


def read_metadata(path: str | Path) -> CheckpointMetadata:
    """Read the metadata of a checkpoint and check its checksum and the locations of all pieces.

    Raises:
        CheckpointError: `path` is not a checkpoint of this package, has a different format version, or its metadata is
            damaged.
    """
    path = Path(path)
    check_is_checkpoint(path)
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
        metadata = _parse(values)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"checkpoint {path.name}: {METADATA} has a wrong entry ({_short(error)})") from None
    if _NAME.fullmatch(path.name) and checkpoint_step(path) != metadata.step:
        raise CheckpointError(f"checkpoint {path.name}: its metadata is that of step {metadata.step}")
    return metadata


def check_files(path: Path, metadata: CheckpointMetadata) -> None:
    """Check that all files of a checkpoint exist and have their length.

    One rank does this before a start, because it asks the file system about every rank's file. `find_damage`, in which
    each rank reads its share of the files, finds the same and more.

    Args:
        path, metadata: of the same checkpoint.

    Raises:
        CheckpointError: a file is missing or has a different length.
    """
    for name, entry in metadata.files.items():
        problem = wrong_length(path / name, entry)
        if problem is not None:
            raise CheckpointError(f"checkpoint {path.name}: {problem}")


def wrong_length(path: Path, entry: FileEntry) -> str | None:
    """What is wrong with the length of a file; None if it has the length of its entry."""
    actual = f"has {path.stat().st_size}" if path.is_file() else "is missing"
    expected = f"has {entry.num_bytes}"
    return None if actual == expected else f"{path.name} must have {entry.num_bytes} bytes, but {actual}"


def find_given(key: str, path: str | Path, kinds: str = "a checkpoint, a run folder or a Hugging Face folder") -> Path:
    """Return the checkpoint or the Hugging Face model to which the path of a key leads, without reading either.

    Raises:
        CheckpointError: it does not; the message names the key.
    """
    try:
        found = latest_checkpoint(path)
        if not is_hugging_face(found):
            check_is_checkpoint(found)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"`{key}` must be {kinds}, but {error}") from None
    return found


def check_is_checkpoint(path: Path) -> None:
    """Check that `path` is a checkpoint of this package, and otherwise report what it seems to be.

    Raises:
        CheckpointError: it is a file, a directory without `metadata.json`, or not an lmscale checkpoint.
    """
    if path.is_file():
        raise CheckpointError(f"{path.name} is a file, not a directory; pickled files are never read")
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} does not exist")
    if (path / METADATA).is_file():
        return
    if (path / ".metadata").exists() or any(path.glob("*.distcp")):
        what = "a torch.distributed.checkpoint directory, whose pickles could run code; they are not read"
    elif is_hugging_face(path):
        what = f"a Hugging Face model; import it: python src/convert.py source={path} target=NEW_FOLDER"
    else:
        other = ", and its config.json is not one of Hugging Face" if (path / "config.json").is_file() else ""
        what = f"not a checkpoint: it has no {METADATA}{other}"
    raise CheckpointError(f"{path} is {what}")


def is_hugging_face(path: Path) -> bool:
    """Whether a folder has a config.json of transformers: with a model type, or (files of 2019) beside weights."""
    try:
        values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    names = (f"{name}{index}" for name in PUBLISHED_WEIGHTS for index in ("", ".index.json"))
    return isinstance(values, dict) and ("model_type" in values or any((path / name).is_file() for name in names))


def check_model(metadata: CheckpointMetadata, model: TransformerConfig, path: str | Path) -> None:
    """Check that a checkpoint is of the given model, and otherwise list all differences.

    Raises:
        CheckpointError: sizes, vocabulary, norm order or other keys that define the function differ. Dropout, recompute
            and the attention kernel may differ.
    """
    try:
        saved = _effective(TransformerConfig.from_dict(metadata.model))
    except (TypeError, ValueError):  # written by a version with other keys: compare as is
        saved = metadata.model
    here = _effective(model)
    differences = [
        f"{key} is {here.get(key)!r} here and {saved.get(key)!r} there"
        for key in sorted((saved.keys() | here.keys()) - _FREE)
        if saved.get(key) != here.get(key)
    ]
    if differences:
        name = metadata.run.get("model", {}).get("name")
        of_name = f"; it is of model={name}" if name else ""
        raise CheckpointError(f"checkpoint {Path(path).name} is of another model: {'; '.join(differences)}{of_name}")


def _effective(config: TransformerConfig) -> dict[str, Any]:
    """A model with its defaults: null compares equal to the value it stands for."""
    chosen = {"layer_norm_eps": config.norm_eps, "gelu": config.gelu_form, "ffn_hidden_size": config.ffn_size}
    if config.parametrization != "standard":
        own = {"hidden_size": config.hidden_size, "head_size": config.head_size}
        own |= {"num_layers": config.num_layers} if config.scaling.scales_depth else {}
        chosen |= {f"base_{name}": getattr(config, f"base_{name}") or size for name, size in own.items()}
    return config.to_dict() | chosen


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
