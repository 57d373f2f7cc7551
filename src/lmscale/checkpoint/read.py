"""Read a checkpoint at any layout, and verify its bytes against the checksums."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from .errors import CheckpointError
from .metadata import METADATA, CheckpointMetadata, Piece, TensorEntry, read_metadata, wrong_length
from .tensor_file import TensorFileReader


class CheckpointReader(ExitStack):
    """Read slices of logical tensors from the pieces that hold them; a context manager, closed at the end.

    Whole rows (shard dimension 0, or not sharded) are read directly into a CPU tensor of the same dtype; other shard
    dimensions, dtypes and devices need a temporary buffer of one piece. Files are opened on first use and never mapped.

    Args:
        padding: by parameter name, how many indices the ranks hold after a tensor's last one (`padding_of`); they are
            set to zero.

    Raises:
        CheckpointError: see `read_metadata`; or a file contradicts the metadata.
    """

    def __init__(self, path: str | Path, padding: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.path, self.padding = Path(path), padding or {}
        self.metadata: CheckpointMetadata = read_metadata(path)
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
        expected = list(entry.shape)
        length = 1 if dim is None else out.shape[dim] if dim < out.ndim else 0
        if dim is not None:
            expected[dim] = length
        if list(out.shape) != expected or (dim is not None and (tp_rank + 1) * length > entry.shape[dim] + padding):
            raise CheckpointError(
                f"checkpoint {self.path.name}: {key} has shape {entry.shape}, which has no shard of {tuple(out.shape)}"
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
            raise CheckpointError(f"checkpoint {self.path.name}: {piece.file} and {METADATA} disagree about {key}")
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
        if key not in self.metadata.tensors:
            raise CheckpointError(f"checkpoint {self.path.name} has no tensor {key}")
        return self.metadata.tensors[key]

    def _file(self, name: str) -> TensorFileReader:
        if name not in self._files:
            self._files[name] = self.enter_context(TensorFileReader(self.path / name))
        return self._files[name]


def find_damage(path: str | Path, metadata: CheckpointMetadata, share: int = 0, num_shares: int = 1) -> str | None:
    """Read the files of a checkpoint completely and verify all checksums.

    Args:
        share, num_shares: check every `num_shares`-th file from number `share` on, so that ranks can divide the files.

    Returns:
        None if no damage is found, otherwise a message that names the damaged file and tensor.
    """
    pieces: dict[str, dict[str, Piece]] = {}
    for key, entry in metadata.tensors.items():
        for piece in entry.pieces:
            pieces.setdefault(piece.file, {})[key] = piece
    for name in sorted(metadata.files)[share::num_shares]:
        problem = wrong_length(Path(path) / name, metadata.files[name])
        if problem is not None:
            return problem
        try:
            with TensorFileReader(Path(path) / name) as file:
                if file.header_checksum != metadata.files[name].header_checksum:
                    return f"{name}: the header does not match its checksum"
                for key, piece in pieces.get(name, {}).items():
                    if not _holds(file, key, metadata.tensors[key], piece):
                        return f"{name} and {METADATA} disagree about {key}"
                    if file.checksum(key) != piece.checksum:
                        return f"{name}: tensor {key} does not match its checksum"
        except (CheckpointError, OSError) as error:
            return str(error)
    return None


def _holds(file: TensorFileReader, key: str, entry: TensorEntry, piece: Piece) -> bool:
    """Return whether the file has a tensor of that name with the piece's shape and dtype."""
    expected = list(entry.shape)
    if entry.shard_dim is not None:
        expected[entry.shard_dim] = piece.stop - piece.start
    return key in file.entries and list(file.shape(key)) == expected and file.dtype(key) == entry.dtype
