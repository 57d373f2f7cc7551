"""Write a checkpoint from one process, tensor by tensor; used by the converters."""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from ..parallel import ParallelContext
from ..shared_files import write_atomically
from .atomic_folder import atomic_folder
from .find import checkpoint_name
from .metadata import METADATA, CheckpointMetadata, FileEntry, Piece
from .tensor_file import TensorFileWriter
from .write import Share, divide_tensors, with_pieces


def write_offline(
    folder: str | Path, metadata: CheckpointMetadata, tp_size: int, tensors: Iterable[tuple[str, Tensor]]
) -> Path:
    """Write the checkpoint `step_<n>.ckpt` to `folder` from full logical tensors, one at a time.

    Memory holds one tensor. The directory gets its name only at the end and is removed on any error.

    Args:
        metadata: tensor entries without pieces, and no files.
        tp_size: number of files, and of pieces of each sharded tensor.
        tensors: (key, full tensor) in the order of sorted keys.

    Returns:
        the checkpoint's directory.

    Raises:
        ValueError: `tp_size` does not divide a sharded tensor.
        FileExistsError: the checkpoint exists already.
    """
    for key, entry in metadata.tensors.items():
        if entry.shard_dim is not None and entry.shape[entry.shard_dim] % tp_size:
            raise ValueError(f"`tp_size` must divide {key} {entry.shape}, but is {tp_size}")
    path = Path(folder) / checkpoint_name(metadata.step)
    if path.exists():
        raise FileExistsError(f"{path} exists already")
    with atomic_folder(path) as temporary:
        shares = [divide_tensors(metadata.tensors, ParallelContext(rank, tp_size)) for rank in range(tp_size)]
        pieces: dict[str, list[Piece]] = {key: [] for key in metadata.tensors}
        with ExitStack() as stack:
            writers = [stack.enter_context(_open_writer(temporary, share, metadata)) for share in shares]
            for key, tensor in tensors:
                dim = metadata.tensors[key].shard_dim
                for share, writer in zip(shares, writers, strict=True):
                    if key in share.places:
                        start, stop = share.places[key]
                        part = tensor if dim is None else tensor.narrow(dim, start, stop - start)
                        pieces[key].append(Piece(share.file, start, stop, writer.write(key, part)))
        files = {writer.path.name: FileEntry(writer.num_bytes, writer.header_checksum) for writer in writers}
        write_atomically(temporary / METADATA, with_pieces(metadata, files, pieces).to_json().encode())
    return path


def _open_writer(folder: Path, share: Share, metadata: CheckpointMetadata) -> TensorFileWriter:
    places = ((key, metadata.tensors[key], stop - start) for key, (start, stop) in share.places.items())
    shapes = {key: (entry.part_shape(length), entry.dtype) for key, entry, length in places}
    return TensorFileWriter(folder / share.file, shapes)
