"""The error of a checkpoint that cannot be used."""


class CheckpointError(ValueError):
    """A checkpoint is damaged, hostile, unfinished or of something else; the message is one line and names it."""
