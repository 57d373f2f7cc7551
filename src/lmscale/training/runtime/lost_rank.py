"""One line and exit code 1, in place of a traceback, for a rank that has lost another rank of its group."""

import re
import sys

import torch.distributed as dist

from ...parallel.shared_memory import RankGoneError
from .exit_codes import FAILED
from .watchdog import leave_for_launcher

# What gloo and torch's store say of a connection whose other end has died.
_CLOSED = re.compile(r"(Connection closed by peer|Connection reset by peer|Broken pipe|got 0 bytes)(?: \[\S+\d)?")


class LostRank(SystemExit):
    """Ends a rank that has lost another one, with exit code 1."""


def who_is_gone(error: BaseException, tensor_ranks: range) -> str | None:
    """What a collective's error says of a rank that is gone; None for any other error.

    Args:
        tensor_ranks: this rank's tensor group.
    """
    if isinstance(error, RankGoneError):
        return f"rank {tensor_ranks[error.rank]} of its tensor group is gone"
    text = str(error)
    closed = _CLOSED.search(text)
    if closed is None or not ("gloo" in text or isinstance(error, dist.DistError)):
        return None
    return f"a rank that it communicates with is gone ({closed[0]})"


def end_without(gone: str, rank: int, where: str) -> LostRank:
    """Print the line, leave it for the launcher, and return the exception that ends this rank."""
    error = RankGoneError(f"rank {rank}: {gone}; it was in {where}, and ends with exit code {FAILED}")
    print(f"error: {error}", file=sys.stderr, flush=True)
    leave_for_launcher(error)
    return LostRank(FAILED)
