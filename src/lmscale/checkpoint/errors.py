"""The error of a checkpoint that cannot be used."""


class CheckpointError(ValueError):
    """A checkpoint is damaged, hostile, unfinished or of something else; the message is one line and names it."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint of another version of the format: not damaged, and never set aside."""
