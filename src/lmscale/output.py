"""The output of a command, which must not end because its encoding lacks a letter or the disk of its log is full."""

import errno
import io
import os
import sys

_FULL = errno.ENOSPC, errno.EDQUOT


class _UntilFull(io.FileIO):
    """A stream that drops what its disk has no room for, and says so once on stderr."""

    said = False

    def write(self, data: bytes) -> int:
        """Write what there is room for."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _FULL:
                raise
        if not self.said and self.fileno() == 1:
            print("WARNING: the disk of the output is full: going on without it", file=sys.stderr, flush=True)
        self.said = True
        return len(data)


def escape_unknown_letters() -> None:
    """Let `print` write what stdout's encoding lacks, as of an ASCII locale, in escapes (`\\xfc`), as on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook has another stream
        sys.stdout.reconfigure(errors="backslashreplace")


def outlast_full_disk() -> None:
    """Let `print` go on where stdout or stderr is a file on a full disk, in this process."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__") or stream is None or os.isatty(descriptor):
            continue  # another stream has taken its place, or it is no file
        stream.flush()
        raw = io.BufferedWriter(_UntilFull(descriptor, "w", closefd=False))
        options = {"encoding": stream.encoding, "errors": stream.errors, "line_buffering": stream.line_buffering}
        setattr(sys, name, io.TextIOWrapper(raw, **options))
