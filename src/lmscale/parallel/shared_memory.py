"""Collectives of tensor ranks on one host, through memory that they share instead of gloo's TCP over loopback."""

import os
import socket
import struct
import weakref
import zlib
from collections.abc import Iterable
from datetime import timedelta
from mmap import mmap
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from .communicator import Communicator, gather_objects

SLOT_BYTES = 4 * 2**20  # size of one piece; a larger tensor is sent in several pieces
_SIGNAL = struct.Struct("qq")  # the piece just written: its number of bytes, and its purpose as a hash

_channels: "weakref.WeakValueDictionary[str, SharedMemoryChannel]" = weakref.WeakValueDictionary()


class SharedMemoryError(RuntimeError):
    """The memory of a channel cannot be made."""


class RankGoneError(RuntimeError):
    """A rank has ended while others communicate with it.

    Args:
        rank: in the channel's group.
    """

    def __init__(self, message: str, rank: int = 0) -> None:
        super().__init__(message)
        self.rank = rank


class SharedMemoryChannel(Communicator):
    """Collectives on CPU tensors between the ranks of one group on one host; made by `open_channel`.

    Every rank has two slots in memory that all ranks have mapped. A rank writes its piece into one slot, signals the
    others through sockets, waits for their signals, and reads all ranks' slots. Sums are in rank order, so all ranks
    get the same bits. The slots alternate: when a rank writes into one again, every rank that read it has signalled
    since. Memory and sockets have no name in any file system: they disappear with the last process, however it ends.
    torch.compile sees each collective as one operation.

    Args:
        name: of the group, and so of the channel.
        rank: in the group.
        peers: a connected socket to every other rank, by rank.
        memory: uint8 [2, p, SLOT_BYTES], mapped by all ranks.
        timeout: how long a rank may keep the others waiting; the sockets enforce it.

    Raises:
        RankGoneError: from any collective, if a rank is gone. The channel cannot be used afterwards.
        RuntimeError: likewise, if a rank does not come within the time limit, or sends another size or type.
    """

    backend = "shared memory"

    def __init__(
        self, name: str, rank: int, peers: dict[int, socket.socket], memory: Tensor, timeout: timedelta
    ) -> None:
        self.name = name
        self._rank, self._peers, self._memory, self._timeout = rank, peers, memory, timeout
        self._turn = 0
        weakref.finalize(self, _close, peers.values())
        _channels[name] = self

    def all_reduce(self, x: Tensor, operation: str = "sum") -> Tensor:
        return torch.ops.lmscale.all_reduce(x, operation, self.name)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.ops.lmscale.all_gather(x, self._memory.shape[1], self.name)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return torch.ops.lmscale.reduce_scatter(x, self._memory.shape[1], self.name)

    def _all_reduce(self, x: Tensor, operation: str) -> Tensor:
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
        own, out = x.reshape(-1), total.view(-1)
        for piece in _pieces(len(own), SLOT_BYTES // x.itemsize):
            _combine(self._share(own[piece], operation), operation, out[piece])
        return total

    def _all_gather(self, x: Tensor, size: int) -> Tensor:
        everybody = _gathered(x, size)
        own, out = x.reshape(-1), everybody.view(size, x.numel())
        for piece in _pieces(len(own), SLOT_BYTES // x.itemsize):
            out[:, piece] = self._share(own[piece], "all-gather")
        return everybody

    def _reduce_scatter(self, x: Tensor, size: int) -> Tensor:
        total = _scattered(x, size)
        own, out = x.reshape(size, total.numel()), total.view(-1)
        for piece in _pieces(len(out), SLOT_BYTES // (x.itemsize * size)):
            _combine(self._share(own[:, piece], "reduce-scatter")[:, self._rank], "sum", out[piece])
        return total

    def _share(self, own: Tensor, purpose: str) -> Tensor:
        """Every rank's piece as a view of the slots, [...] to [p, ...]; valid until the next call but one."""
        slots = self._memory[self._turn, :, : own.nbytes].view(own.dtype).unflatten(1, own.shape)
        self._turn = 1 - self._turn
        slots[self._rank] = own
        self._meet(own.nbytes, f"{purpose} of {own.dtype}")
        return slots

    def _meet(self, num_bytes: int, purpose: str) -> None:
        """Wait until all ranks have written a piece of `num_bytes` for the same purpose."""
        signal = _SIGNAL.pack(num_bytes, zlib.crc32(purpose.encode()))
        for rank, peer in self._peers.items():
            try:
                peer.send(signal)
            except ConnectionError:
                raise RankGoneError(f"rank {rank} of the group is gone", rank) from None
        for rank, peer in self._peers.items():
            answer = self._receive(rank, peer)
            if answer != signal:
                theirs = _SIGNAL.unpack(answer)[0]
                raise RuntimeError(
                    f"all ranks of the group must send the same, but rank {self._rank} has {num_bytes} bytes for "
                    f"{purpose} and rank {rank} has {f'{theirs} bytes' if theirs != num_bytes else 'another purpose'}"
                )

    def _receive(self, rank: int, peer: socket.socket) -> bytes:
        try:
            answer = peer.recv(_SIGNAL.size, socket.MSG_WAITALL)
        except BlockingIOError:
            seconds = self._timeout.total_seconds()
            raise RuntimeError(f"rank {rank} of the group has not come for {seconds:g} s") from None
        except ConnectionError:
            answer = b""
        if len(answer) < _SIGNAL.size:
            raise RankGoneError(f"rank {rank} of the group is gone", rank)
        return answer


@torch.library.custom_op("lmscale::all_reduce", mutates_args=(), device_types="cpu")
def _all_reduce(x: Tensor, operation: str, group: str) -> Tensor:
    return _channels[group]._all_reduce(x, operation)


@torch.library.custom_op("lmscale::all_gather", mutates_args=(), device_types="cpu")
def _all_gather(x: Tensor, size: int, group: str) -> Tensor:
    return _channels[group]._all_gather(x, size)


@torch.library.custom_op("lmscale::reduce_scatter", mutates_args=(), device_types="cpu")
def _reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    return _channels[group]._reduce_scatter(x, size)


def _gathered(x: Tensor, size: int) -> Tensor:
    return x.new_empty((size * len(x), *x.shape[1:]))


def _scattered(x: Tensor, size: int) -> Tensor:
    return x.new_empty((len(x) // size, *x.shape[1:]))


# Shapes of the results, for the compiler.
_all_reduce.register_fake(lambda x, operation, group: torch.empty_like(x, memory_format=torch.contiguous_format))
_all_gather.register_fake(lambda x, size, group: _gathered(x, size))
_reduce_scatter.register_fake(lambda x, size, group: _scattered(x, size))


def _pieces(length: int, at_once: int) -> list[slice]:
    return [slice(start, start + at_once) for start in range(0, length, at_once)]


def _combine(slots: Tensor, operation: str, out: Tensor) -> None:
    """Reduce the first dimension in order."""
    function = torch.add if operation == "sum" else torch.maximum
    function(slots[0], slots[1], out=out)
    for slot in slots[2:]:
        function(out, slot, out=out)


def open_channel(group: dist.ProcessGroup, timeout: timedelta) -> SharedMemoryChannel | None:
    """A channel between the ranks of a group; None on all of them if the backend is not gloo or they are on several
    hosts.

    Args:
        timeout: how long a rank may keep the others waiting.

    Communicates:
        three small objects per rank over the group.

    Raises:
        SharedMemoryError: the memory cannot be made; on all ranks.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    # Only Linux has memory and sockets outside any file system.
    if size == 1 or dist.get_backend(group) != "gloo" or not hasattr(os, "memfd_create"):
        return None
    peers = _connect(rank, size, group, timeout)
    if peers is None:
        return None
    num_bytes, descriptors, reason = 2 * size * SLOT_BYTES, [], None
    try:
        if rank == 0:
            descriptors.append(os.memfd_create("lmscale"))
            os.ftruncate(descriptors[0], num_bytes)  # a page takes memory when it is first written
            for peer in peers.values():
                socket.send_fds(peer, [b"-"], descriptors)
        else:
            descriptors += socket.recv_fds(peers[0], 1, 1)[1]
        memory = mmap(descriptors[0], num_bytes)
    except (OSError, IndexError) as error:  # such as a limit on the size of files; or rank 0 has sent no descriptor
        reason = str(error)
        _close(peers.values())  # of rank 0: ends the others' wait
    for descriptor in descriptors:
        os.close(descriptor)  # the mapping remains
    reasons = [each for each in gather_objects(reason, group) if each is not None]
    if reasons:
        _close(peers.values())
        raise SharedMemoryError(
            f"`parallel.shared_memory` must be false where {num_bytes:,} bytes of shared memory cannot be made "
            f"({reasons[0]}; see `ulimit -a`), but is true"
        )
    slots = torch.frombuffer(memory, dtype=torch.uint8).view(2, size, SLOT_BYTES)
    return SharedMemoryChannel(group.group_name, rank, peers, slots, timeout)


def _connect(rank: int, size: int, group: dist.ProcessGroup, timeout: timedelta) -> dict[int, socket.socket] | None:
    """A socket to every other rank, by rank; None on all ranks if some rank cannot reach another."""
    with socket.socket(socket.AF_UNIX) as listener:
        address = f"\0lmscale-{os.getpid()}-{uuid4().hex}"  # an abstract name: in no file system, only on this host
        listener.bind(address)
        listener.listen(size)
        addresses = gather_objects(address, group)
        peers: dict[int, socket.socket] = {}
        try:
            for other in range(rank):  # they are listening already, so none waits
                peers[other] = socket.socket(socket.AF_UNIX)
                peers[other].connect(addresses[other])
                peers[other].send(bytes([rank]))
            reached = True
        except OSError:
            reached = False
        if not all(gather_objects(reached, group)):
            _close(peers.values())
            return None
        for _ in range(rank + 1, size):
            peer, _ = listener.accept()
            peers[peer.recv(1)[0]] = peer
    for peer in peers.values():
        seconds, fraction = divmod(timeout.total_seconds(), 1.0)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(1e6 * fraction)))
    return peers


def _close(sockets: Iterable[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _close_in_child() -> None:
    """A data loader's process that outlives its killed rank must not keep the rank's sockets open."""
    for channel in _channels.values():
        _close(channel._peers.values())


os.register_at_fork(after_in_child=_close_in_child)
