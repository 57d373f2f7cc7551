"""One line and exit code 1, in place of a traceback, for a rank whose communication with others has failed."""

import re
import traceback
from pathlib import Path

import torch.distributed as dist

from ..parallel.shared_memory import RankGoneError
from .exit_codes import FAILED
from .messages import report

# What gloo and torch's store say of a connection whose other end has died.
_CLOSED = re.compile(r"(Connection closed by peer|Connection reset by peer|Broken pipe|got 0 bytes)(?: \[\S+\d)?")


class LostRank(SystemExit):
    """Ends a rank that cannot communicate with another one, with exit code 1."""


class CollectiveError(RuntimeError):
    """A collective failed on this rank; the message says where, what the backend says, and what to look at."""


def end_if_lost(error: Exception, rank: int, tp_size: int, where: str, folder: Path | None) -> None:
    """Print one line on a failed communication and leave it for the launcher; the traceback goes into the run folder.

    An error of anything but communication is left to the caller.

    Args:
        where: what this rank was doing.
        folder: of the run; None, until the ranks have agreed on it: the traceback goes to stderr.

    Raises:
        LostRank: ends this rank.
    """
    first = rank // tp_size * tp_size
    gone, failed = who_is_gone(error, range(first, first + tp_size)), what_failed(error)
    if gone is not None:
        error = RankGoneError(f"rank {rank}: {gone}; it was in {where}, and ends with exit code {FAILED}")
    elif failed is not None:
        written = _write_traceback(folder, rank)
        error = CollectiveError(f"rank {rank}: communication failed in {where}: {failed}; traceback: {written}")
    else:
        return
    report(error)
    raise LostRank(FAILED) from None


def who_is_gone(error: BaseException, tensor_ranks: range) -> str | None:
    """What a collective's error says of a rank that is gone; None for any other error.

    Args:
        tensor_ranks: this rank's tensor group.
    """
    if isinstance(error, RankGoneError):
        return f"rank {tensor_ranks[error.rank]} of its tensor group is gone"
    text = str(error)
    closed = _CLOSED.search(text)
    if closed is None or "connectFullMesh" in text or not ("gloo" in text or isinstance(error, dist.DistError)):
        return None
    return f"a rank that it communicates with is gone ({closed[0]})"


def what_failed(error: BaseException) -> str | None:
    """What NCCL, gloo or torch.distributed says of a failure, in one line; None for any other error."""
    text = str(error)
    if "connectFullMesh" in text:
        return (
            "the hosts cannot reach each other over gloo, or a rank ended while they connected; set GLOO_SOCKET_IFNAME "
            f"to the interface that connects them ({text.splitlines()[0]})"
        )
    if not (isinstance(error, dist.DistError) or "NCCL error" in text):
        return None
    said = " ".join(text.partition("Exception raised from")[0].split())  # without the stack of C++
    return f"{said}; NCCL_DEBUG=INFO shows more" if "NCCL" in said and "NCCL_DEBUG" not in said else said


def _write_traceback(folder: Path | None, rank: int) -> str:
    """Write the traceback of the error that is being handled, and say where it is."""
    try:
        if folder is not None:
            path = folder / f"traceback_rank_{rank}.txt"
            path.write_text(traceback.format_exc(), encoding="utf-8")
            return str(path)
    except OSError:
        pass
    traceback.print_exc()
    return "above"


def abort_nccl() -> bool:
    """Abandon all collectives if they run over NCCL, where one may wait forever for a rank that is gone.

    Returns:
        whether there were any groups of NCCL; afterwards there is no process group. Other backends fail by themselves.
    """
    if not dist.is_initialized() or dist.get_backend() != "nccl":
        return False
    dist.distributed_c10d._abort_process_group()
    return True
