"""Stream one safetensors file: no tensor is in memory twice and nothing is mapped.

The format is that of https://github.com/huggingface/safetensors: 8 bytes with the header's length, a JSON header
`{name: {"dtype", "shape", "data_offsets"}}`, then the data. Files are interchangeable with those of the safetensors
library. The library is not used because its writer needs all tensors at once and its reader maps the file, which counts
as memory of the process; shards of many gigabytes permit neither.
"""

import json
import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from .errors import CheckpointError

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMENSIONS = 64  # of torch
_CHUNK = 1 << 24  # bytes read at once to compute a checksum


class TensorFileWriter(AbstractContextManager):
    """Write tensors of known shapes one after the other, at the offsets given in the header.

    Also a context manager; on an error it closes the file without the completeness check.

    Args:
        tensors: name -> (shape, dtype), in the order of writing.
        metadata: short texts for the header's `__metadata__`.
    """

    def __init__(
        self,
        path: str | Path,
        tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        for name, (shape, dtype) in tensors.items():
            size = num_bytes(shape, dtype)
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # align the data to 8 bytes
        head = len(text).to_bytes(8, "little") + text
        self.path = Path(path)
        self.expected = dict(tensors)
        self.remaining = list(tensors)
        self.header_checksum = xxhash.xxh3_128_hexdigest(head)
        self.num_bytes = len(head) + offset
        self.file = open(path, "wb", buffering=0)
        _write_all(self.file, head)

    def write(self, name: str, tensor: Tensor) -> str:
        """Write the next tensor and return the XXH3-128 checksum of its bytes."""
        shape, dtype = self.expected[name]
        if not self.remaining or self.remaining[0] != name:
            raise RuntimeError(f"{self.path.name}: {name} is written out of order")
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
            raise RuntimeError(
                f"{self.path.name}: {name} must be {tuple(shape)} {dtype}, but is {tuple(tensor.shape)} {tensor.dtype}"
            )
        data = tensor_bytes(tensor.detach().cpu().contiguous())
        _write_all(self.file, data)
        self.remaining.pop(0)
        return xxhash.xxh3_128_hexdigest(data)

    def close(self) -> None:
        """Check that all tensors have been written, and sync the file to disk."""
        if self.remaining:
            raise RuntimeError(f"{self.path.name}: {self.remaining[0]} was never written")
        os.fsync(self.file.fileno())
        self.file.close()

    def __exit__(self, kind: type | None, *_: Any) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.file.close()


class TensorFileReader(ExitStack):
    """Read tensors or rows of one safetensors file into the caller's memory; a context manager, closed at the end.

    Raises:
        CheckpointError: the file is not safetensors, its length does not match its header, or its offsets are invalid.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        try:
            self.file = self.enter_context(open(path, "rb"))
        except OSError as error:
            raise CheckpointError(f"{self.path.name} cannot be read: {error.strerror}") from None
        try:
            self.num_bytes = os.fstat(self.file.fileno()).st_size
            self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> None:
        length = int.from_bytes(self.file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, self.num_bytes - 8):
            raise CheckpointError(f"{self.path.name} is not a safetensors file, or cut off: a header of {length} bytes")
        text = self.file.read(length)
        self.data_start = 8 + length
        self.header_checksum = xxhash.xxh3_128_hexdigest(length.to_bytes(8, "little") + text)
        try:
            header = json.loads(text)
            self.metadata = header.pop("__metadata__", {})
            unknown = [(name, entry["dtype"]) for name, entry in header.items() if entry["dtype"] not in DTYPES]
            self.entries = {} if unknown else {name: _parse_entry(entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CheckpointError(f"{self.path.name} is not a safetensors file: its header cannot be parsed") from None
        if unknown:
            name, dtype = unknown[0]
            raise CheckpointError(
                f"{self.path.name}: the type of a tensor must be one of {', '.join(DTYPES)}, but {name} is {dtype!r}"
            )
        end = self.num_bytes - self.data_start
        expected = 0
        for name, (shape, dtype, first, last) in sorted(self.entries.items(), key=lambda item: item[1][2:]):
            if first != expected or last - first != num_bytes(shape, dtype) or last > end:
                raise CheckpointError(f"{self.path.name}: the header's offsets of {name} do not fit the file")
            expected = last
        if expected != end:
            raise CheckpointError(
                f"{self.path.name} must have {self.data_start + expected} bytes, but has {self.num_bytes}"
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.entries[name][0]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self.entries[name][1]

    def read_into(self, name: str, out: Tensor, first_row: int = 0) -> None:
        """Read from row `first_row` (dimension 0) into `out`, a contiguous CPU tensor of the same dtype."""
        shape, dtype, start, _ = self.entries[name]
        assert out.dtype == dtype and out.is_contiguous() and tuple(out.shape[1:]) == shape[1:]
        row = num_bytes(shape[1:], dtype)
        data = tensor_bytes(out)
        self.file.seek(self.data_start + start + first_row * row)
        if self.file.readinto(data) < len(data):
            raise CheckpointError(f"{self.path.name} ends within {name}")

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Read rows [first, last) of a tensor, by default all, into new memory."""
        shape, dtype, _, _ = self.entries[name]
        out = torch.empty(shape if last is None else (last - first, *shape[1:]), dtype=dtype, device="cpu")
        self.read_into(name, out, first)
        return out

    def checksum(self, name: str) -> str:
        """Compute the XXH3-128 of a tensor's bytes, read in chunks."""
        _, _, first, last = self.entries[name]
        self.file.seek(self.data_start + first)
        digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(_CHUNK, last - first)))
        left = last - first
        while left:
            count = self.file.readinto(buffer[: min(left, len(buffer))])
            if not count:
                raise CheckpointError(f"{self.path.name} ends within {name}")
            digest.update(buffer[:count])
            left -= count
        return digest.hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """View the memory of a contiguous CPU tensor as writable bytes, without a copy."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(bytearray())


def _parse_entry(entry: dict[str, Any]) -> tuple[tuple[int, ...], torch.dtype, int, int]:
    shape, (first, last) = tuple(entry["shape"]), entry["data_offsets"]
    if not is_shape(shape) or not type(first) is type(last) is int:
        raise ValueError
    return shape, DTYPES[entry["dtype"]], first, last


def is_shape(lengths: tuple[Any, ...]) -> bool:
    """Return whether torch can make a tensor of these lengths, which come from a file."""
    if not all(type(length) is int and length >= 0 for length in lengths):
        return False
    return len(lengths) <= _MAX_DIMENSIONS and math.prod(max(length, 1) for length in lengths) < 2**59


def num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Size of a tensor."""
    return math.prod(shape) * dtype.itemsize


def _write_all(file: Any, data: bytes | memoryview) -> None:
    data = memoryview(data)
    done = 0
    while done < len(data):
        done += file.write(data[done:])
