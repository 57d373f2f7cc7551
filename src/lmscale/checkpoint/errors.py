"""Errors of checkpoints that cannot be used."""


class CheckpointError(ValueError):
    """A checkpoint is damaged, malicious, unfinished or of another program; the message is one line and names it."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint has another format version; it is not damaged and is never renamed."""
