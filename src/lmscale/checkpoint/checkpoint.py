"""One checkpoint on disk: open it, check it, and read its tensors at any layout."""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..config import TransformerConfig
from ..config.checks import list_some
from .errors import CheckpointError
from .find import check_is_checkpoint, checkpoint_step
from .metadata import METADATA, CheckpointMetadata, FileEntry, Piece, TensorEntry, read_metadata
from .model_tensors import model_shapes
from .tensor_file import TensorFileReader

# Keys that may differ between a checkpoint and the model that loads it: they do not change the function of the weights.
_FREE = {"hidden_dropout", "attention_dropout", "embedding_dropout", "recompute", "attention"}
_FREE |= {"initializer", "initializer_std", "scale_residual_init"}  # only used for initialization


@dataclass(frozen=True, eq=False)  # one that is opened again may have other bytes
class Checkpoint:
    """A complete checkpoint, with its metadata as it was when it was opened.

    The metadata of a large model has thousands of tensors: to another process its path is sent, which opens it again.
    """

    path: Path
    metadata: CheckpointMetadata = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Read the metadata of the checkpoint at `path`, and check its checksum and the locations of all pieces.

        Raises:
            CheckpointError: it is not a checkpoint of this package, has a different format version, or its metadata is
                damaged.
        """
        path = Path(path)
        check_is_checkpoint(path)
        metadata = read_metadata(path)
        if checkpoint_step(path) not in (None, metadata.step):
            raise CheckpointError(f"checkpoint {path.name}: its metadata is that of step {metadata.step}")
        return cls(path, metadata)

    def __fspath__(self) -> str:
        """Its path, so that it can be the `ckpt_path` of a Trainer."""
        return str(self.path)

    def reader(self, padding: Mapping[str, int] | None = None) -> "CheckpointReader":
        """Open the files to read tensors; see `CheckpointReader`."""
        return CheckpointReader(self, padding)

    def check_files(self) -> None:
        """Check that all files exist and have their length.

        One rank does this before a start, because it asks the file system about every rank's file. `check_intact`, in
        which each rank reads its share of the files, finds the same and more.

        Raises:
            CheckpointError: a file is missing or has a different length.
        """
        for name, entry in self.metadata.files.items():
            problem = _wrong_length(self.path / name, entry)
            if problem is not None:
                raise CheckpointError(f"checkpoint {self.path.name}: {problem}")

    def check_intact(self, share: int = 0, num_shares: int = 1) -> None:
        """Check every byte of this share of the files, as `damage` does.

        Raises:
            CheckpointError: with the damage.
        """
        damage = self.damage(share, num_shares)
        if damage is not None:
            raise CheckpointError(f"checkpoint {self.path.name} is damaged: {damage}")

    def damage(self, share: int = 0, num_shares: int = 1) -> str | None:
        """Read the files completely and verify all checksums.

        Args:
            share, num_shares: check every `num_shares`-th file from number `share` on, so that ranks can divide the
                files.

        Returns:
            None if no damage is found, otherwise a message that names the damaged file and tensor.
        """
        pieces: dict[str, dict[str, Piece]] = {}
        for key, entry in self.metadata.tensors.items():
            for piece in entry.pieces:
                pieces.setdefault(piece.file, {})[key] = piece
        for name in sorted(self.metadata.files)[share::num_shares]:
            expected = self.metadata.files[name]
            problem = _wrong_length(self.path / name, expected)
            if problem is not None:
                return problem
            try:
                with TensorFileReader(self.path / name) as file:
                    if file.header_checksum != expected.header_checksum:
                        return f"{name}: the header does not match its checksum"
                    for key, piece in pieces.get(name, {}).items():
                        if not _holds(file, key, self.metadata.tensors[key], piece):
                            return f"{name} and {METADATA} disagree about {key}"
                        if file.checksum(key) != piece.checksum:
                            return f"{name}: tensor {key} does not match its checksum"
            except (CheckpointError, OSError) as error:
                return str(error)
        return None

    def model_config(self, needs_heads: bool = True) -> TransformerConfig:
        """The model's configuration, once the checkpoint's tensors are known to be those of that model.

        Of a finetuned checkpoint, and without `needs_heads`, the encoder must be complete, and the model's heads may be
        missing. A finetuned one has its task's head instead, a linear layer of the model's width.

        Raises:
            CheckpointError: the configuration is invalid; a tensor is missing, unknown, or has a different shape or
                shard dimension than the model's.
        """
        tensors = self.metadata.tensors
        try:
            config = TransformerConfig.from_dict(self.metadata.model)
            # Before the names are listed: a wrong `num_layers` may be a billion.
            if config.num_layers > len(tensors):
                raise ValueError(f"`num_layers` must be at most its {len(tensors)} tensors, but is {config.num_layers}")
            shapes = model_shapes(config)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"checkpoint {self.path.name}: {METADATA} has an invalid model ({error})") from None
        weights = {key.removeprefix("model/") for key in tensors if key.startswith("model/")}
        if "finetune" in self.metadata.state or not needs_heads:
            kept = {"transformer"} | {name.split(".")[0] for name in weights}
            shapes = {name: shape for name, shape in shapes.items() if name.split(".")[0] in kept}
        if "finetune" in self.metadata.state:
            bias = tensors.get("model/head.bias")
            outputs = bias.shape[:1] if bias else ()  # how many there are, the task says
            shapes |= {"head.weight": ((*outputs, config.hidden_size), None), "head.bias": (outputs, None)}
        has_moments = self.metadata.optimizer.get("num_updates")  # a checkpoint before the first update has none
        kinds = ("model", "exp_avg", "exp_avg_sq") if has_moments else ("model",)
        expected = {f"{kind}/{name}" for kind in kinds for name in shapes}
        for problem, keys in (
            ("lacks", expected - tensors.keys()),
            ("is of a model without", tensors.keys() - expected),
        ):
            if keys:
                raise CheckpointError(f"checkpoint {self.path.name} {problem} {list_some(sorted(keys))}")
        for key, entry in tensors.items():
            shape, shard_dim = shapes[key.split("/", 1)[1]]
            if (entry.shape, entry.shard_dim) != (shape, shard_dim):
                raise CheckpointError(
                    f"checkpoint {self.path.name}: {key} must be {shape}, sharded along {shard_dim}, "
                    f"but is {entry.shape}, sharded along {entry.shard_dim}"
                )
        return config

    def check_model(self, model: TransformerConfig) -> None:
        """Check that it is a checkpoint of the given model, and otherwise list all differences.

        Raises:
            CheckpointError: sizes, vocabulary, norm order or other keys that define the function differ. Dropout,
                recompute and the attention kernel may differ.
        """
        try:
            saved = TransformerConfig.from_dict(self.metadata.model)
        except (TypeError, ValueError):  # written by a version with other keys: compare as is
            saved = self.metadata.model
        differences = model_differences(model, saved)
        if differences:
            name = self.metadata.run.get("model", {}).get("name")
            of_name = f"; it is of model={name}" if name else ""
            raise CheckpointError(f"checkpoint {self.path.name} is of another model: {'; '.join(differences)}{of_name}")

    def check_shapes(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Check that it has the parameters with these full shapes, and no others.

        A reader would take the first rows of a longer one for the shard of one of several ranks.

        Raises:
            CheckpointError: it has not.
        """
        saved = self.metadata.tensors.items()
        there = {key.removeprefix("model/"): tuple(entry.shape) for key, entry in saved if key.startswith("model/")}
        for name in sorted(shapes.keys() | there.keys()):
            if shapes.get(name) != there.get(name):
                raise CheckpointError(
                    f"checkpoint {self.path.name} is of another model: the shape of {name} is {shapes.get(name)} here "
                    f"and {there.get(name)} there"
                )


class CheckpointReader(ExitStack):
    """Read slices of logical tensors from the pieces that hold them; a context manager, closed at the end.

    Whole rows (shard dimension 0, or not sharded) are read directly into a CPU tensor of the same dtype; other shard
    dimensions, dtypes and devices need a temporary buffer of one piece. Files are opened on first use and never mapped.

    Args:
        padding: by parameter name, how many indices the ranks hold after a tensor's last one (`padding_of`); they are
            set to zero.

    Raises:
        CheckpointError: a file contradicts the metadata.
    """

    def __init__(self, checkpoint: Checkpoint, padding: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.checkpoint, self.padding = checkpoint, padding or {}
        self._files: dict[str, TensorFileReader] = {}

    def read(self, key: str, first: int = 0, last: int | None = None) -> Tensor:
        """Read a full logical tensor, or rows [first, last) of one that is not cut, or cut by rows."""
        entry = self._entry(key)
        assert last is None or entry.shard_dim in (None, 0)
        shape = entry.shape if last is None else (last - first, *entry.shape[1:])
        out = torch.empty(shape, dtype=entry.dtype, device="cpu")
        self._fill(key, entry, out, first)
        return out

    def read_into(self, key: str, out: Tensor, tp_rank: int = 0) -> None:
        """Read rank `tp_rank`'s shard of a logical tensor into `out`, whose shape implies the number of ranks.

        Raises:
            CheckpointError: the checkpoint has no such tensor, or its shape does not match.
        """
        entry = self._entry(key)
        dim, padding = entry.shard_dim, self.padding.get(key.partition("/")[2], 0)
        length = 1 if dim is None else out.shape[dim] if dim < out.ndim else 0
        is_beyond = dim is not None and (tp_rank + 1) * length > entry.shape[dim] + padding
        if is_beyond or tuple(out.shape) != entry.part_shape(length):
            raise CheckpointError(
                f"checkpoint {self.checkpoint.path.name}: {key} has shape {entry.shape}, which has no shard of "
                f"{tuple(out.shape)}"
            )
        first = 0 if dim is None else tp_rank * length
        if padding:
            out.zero_()  # what is read replaces the rest
        self._fill(key, entry, out, first)

    def _fill(self, key: str, entry: TensorEntry, out: Tensor, first: int) -> None:
        """Fill `out` from index `first` along the shard dimension on; of a tensor that is not cut, from that row on."""
        dim = entry.shard_dim
        if dim is None:
            self._read_part(key, entry, entry.pieces[0], out, first)
            return
        for piece in entry.pieces:
            low, high = max(piece.start, first), min(piece.stop, first + out.shape[dim])
            if low < high:
                target = out.narrow(dim, low - first, high - low)
                self._read_part(key, entry, piece, target, low - piece.start)

    def _read_part(self, key: str, entry: TensorEntry, piece: Piece, target: Tensor, offset: int) -> None:
        """Read a piece from index `offset` along the shard dimension into `target`."""
        file = self._file(piece.file)
        if not _holds(file, key, entry, piece):
            name = self.checkpoint.path.name
            raise CheckpointError(f"checkpoint {name}: {piece.file} and {METADATA} disagree about {key}")
        by_rows = entry.shard_dim in (None, 0)
        if by_rows and target.device.type == "cpu" and target.dtype == entry.dtype and target.is_contiguous():
            file.read_into(key, target, offset)
            return
        if by_rows:
            part = torch.empty(target.shape, dtype=entry.dtype, device="cpu")
            file.read_into(key, part, offset)
        else:
            part = file.read(key).narrow(entry.shard_dim, offset, target.shape[entry.shard_dim])
        target.copy_(part)

    def _entry(self, key: str) -> TensorEntry:
        if key not in self.checkpoint.metadata.tensors:
            raise CheckpointError(f"checkpoint {self.checkpoint.path.name} has no tensor {key}")
        return self.checkpoint.metadata.tensors[key]

    def _file(self, name: str) -> TensorFileReader:
        if name not in self._files:
            self._files[name] = self.enter_context(TensorFileReader(self.checkpoint.path / name))
        return self._files[name]


def _wrong_length(path: Path, entry: FileEntry) -> str | None:
    """What is wrong with the length of a file; None if it has the length of its entry."""
    actual = f"has {path.stat().st_size}" if path.is_file() else "is missing"
    expected = f"has {entry.num_bytes}"
    return None if actual == expected else f"{path.name} must have {entry.num_bytes} bytes, but {actual}"


def _holds(file: TensorFileReader, key: str, entry: TensorEntry, piece: Piece) -> bool:
    """Return whether the file has a tensor of that name with the piece's shape and dtype."""
    expected = entry.part_shape(piece.stop - piece.start), entry.dtype
    return key in file.entries and (file.shape(key), file.dtype(key)) == expected


def model_differences(
    model: TransformerConfig, saved: TransformerConfig | dict[str, Any], free: Collection[str] = ()
) -> list[str]:
    """In words, the keys in which two models differ and that change the function of their weights.

    Args:
        free: further keys that may differ.
    """
    here, there = _effective(model), saved if isinstance(saved, dict) else _effective(saved)
    return [
        f"{key} is {here.get(key)!r} here and {there.get(key)!r} there"
        for key in sorted((there.keys() | here.keys()) - _FREE - set(free))
        if there.get(key) != here.get(key)
    ]


def _effective(config: TransformerConfig) -> dict[str, Any]:
    """A model with its defaults: null compares equal to the value it stands for."""
    chosen = {"layer_norm_eps": config.norm_eps, "gelu": config.gelu_form, "ffn_hidden_size": config.ffn_size}
    if config.parametrization != "standard":
        own = {"hidden_size": config.hidden_size, "head_size": config.head_size}
        own |= {"num_layers": config.num_layers} if config.scaling.scales_depth else {}
        chosen |= {f"base_{name}": getattr(config, f"base_{name}") or size for name, size in own.items()}
    return config.to_dict() | chosen
