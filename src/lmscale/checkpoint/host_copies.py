"""Copies of a rank's tensors in host memory, from which they are written while training goes on."""

import contextlib
import sys
import weakref
from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes


class HostCopies:
    """One flat buffer for all tensors of a rank, reused for every checkpoint.

    For tensors on a GPU its pages are locked, so that all copies are in flight at once. They are registered
    (cudaHostRegister) instead of allocated by torch, whose pinned allocator rounds up to powers of two: a rank of
    gpt_8.3b at tp_size 8 would hold 20 GB for its 12.5 GB. Where the system refuses to lock them (a container with a
    small `ulimit -l`), the copies are made one after the other, with one warning.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._unlock = lambda: None
        self._warns = True

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies by the same keys, valid until the next call; the tensors may then be modified."""
        starts = list(accumulate((_aligned(tensor.nbytes) for tensor in tensors.values()), initial=0))
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        if self._buffer.nbytes < starts[-1]:
            self._allocate(starts[-1], on_gpu)
        copies = {}
        for start, (key, tensor) in zip(starts, tensors.items(), strict=False):
            part = self._buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[key] = part.copy_(tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        return copies

    def _allocate(self, num_bytes: int, locked: bool) -> None:
        self._unlock()
        self._buffer = self._buffer.new_empty(0)  # frees it before the larger one is allocated
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        if not locked:
            return
        cuda, address = torch.cuda.cudart(), self._buffer.data_ptr()
        try:
            torch.cuda.check_error(cuda.cudaHostRegister(address, num_bytes, 0))
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):  # the next kernel reports the error once more, and clears it
                torch.zeros(1, device="cuda")
            if self._warns:
                warning = f"WARNING: checkpoints are copied without locked memory: {error}\n"
                print(warning, end="", file=sys.stderr, flush=True)  # in one write: other ranks print it too
            self._warns = False
        else:
            self._unlock = weakref.finalize(self, cuda.cudaHostUnregister, address)  # before the buffer is freed


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
