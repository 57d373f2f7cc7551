"""Lines of a rank on stderr, each in a single write: lines of ranks that print at the same time do not mix."""

import sys

from torch.distributed.elastic.multiprocessing.errors import get_error_handler


def print_error(message: object) -> None:
    """Print one line about an error."""
    print(f"error: {message}\n", end="", file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Print a warning in one line; nothing for an empty text."""
    if message:
        print(f"WARNING: {message}\n", end="", file=sys.stderr, flush=True)


def report(error: Exception) -> None:
    """Print an error, and keep it for the launcher without the traceback of what led to it."""
    print_error(error)
    try:
        raise error from None
    except type(error):
        get_error_handler().record_exception(error)
